"""May this cluster boot? Look at every node, judge what was seen, say what to do.

- ``probe``: the program that runs on a node; it reports and judges nothing.
- ``program``, ``request``, ``collect``: send it over SSH, one session a node, and take its answer.
- ``checks``: small registered functions over the plan and the documents.
- ``deep``: measurements that load the machines.
- ``evaluate``, ``report``, ``evidence``: run the checks, and what is written down.
"""
