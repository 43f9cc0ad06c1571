"""Act on the nodes of a plan: install, share, pack, serve, stop, look, roll out.

- ``remote``, ``crew``: one node over SSH with a deadline on every step; several at once.
- ``evidence``: what was run, what came back; ``board``: what is shown while it runs.
- ``enginelog``, ``follow``: what a rank is doing, from its journal.
- one module a command; ``spark_appliance.cli`` parses for them and prints.
"""
