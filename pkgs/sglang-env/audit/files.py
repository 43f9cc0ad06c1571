"""Which paths the wheels install, and whether two wheels install the same one."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from audit.wheels import LockedWheel, members, open_wheel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from audit.libraries import Libraries


def scan(folder: Path, wheels: list[LockedWheel]) -> Iterator[tuple[str, str, int]]:
    """Yield (package, path, size in bytes) of every file of every wheel."""
    for wheel in wheels:
        with open_wheel(folder, wheel) as archive:
            for path, info in members(archive):
                yield wheel.name, path, info.file_size


def judge(files: Iterable[tuple[str, str, int]], table: Libraries) -> dict[str, Any]:
    """Return totals; `problems` name shared paths and strays that do not exist."""
    owners: dict[str, set[str]] = defaultdict(set)
    total = count = 0
    unseen = {(wheel, path) for wheel, paths in table.stray.items() for path in paths}
    for wheel, path, size in files:
        count += 1
        total += size
        if path in table.stray.get(wheel, ()):
            unseen.discard((wheel, path))
        else:
            owners[path].add(wheel)
    problems = [
        f"{path}: in {' and '.join(sorted(wheels))}"
        for path, wheels in owners.items()
        if len(wheels) > 1
    ]
    problems += [f"libraries.json: stray {wheel} {path}: no such file" for wheel, path in unseen]
    return {"files": count, "bytes": total, "problems": sorted(problems)}
