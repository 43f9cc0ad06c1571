"""Versions of this project's files on a DGX OS node: applied, confirmed, rolled back, removed.

Standard library only, like the rest of ``spark_appliance.node``. A generation is a set of files
with their hashes. Switching writes each file in one step; ``state.json`` says at every moment
which generation is current, which one was confirmed by somebody who could still reach the node,
and whether a switch was cut off in the middle.
"""
