"""Write `poetry.lock` for one target: Poetry resolves, this package prunes.

`prune` decides (pure), `target` knows tags and markers, `lockfile` reads and writes, `poetry` is
the only module that starts a program, `__main__` parses and prints.
"""
