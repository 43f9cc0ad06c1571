"""The program that looks at a node: stdlib only, Python 3.8 or newer, strictly read-only.

Its modules travel as one text over standard input (``spark_appliance.doctor.program``) and its
answer is one JSON document. It reports what it saw and judges nothing: judging is done on the
control side, where a recorded document can be judged again.
"""
