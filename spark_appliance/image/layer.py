"""One layer: from packages or wheels to a blob. Runs in a process of its own."""

from __future__ import annotations

import posixpath
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spark_appliance.image import base, debs, ldcache, tar, wheels
from spark_appliance.image.lock import DebPackage, Wheel
from spark_appliance.image.oci import Blob, Layout
from spark_appliance.image.recipe import Drop
from spark_appliance.image.store import Store
from spark_appliance.image.tree import Tree

MTIME = 315532800 + 86400
"""Time of every file: 1980-01-02, the first day that a ZIP file can hold in every time zone."""


@dataclass(frozen=True)
class Job:
    """What goes into one layer. ``drops`` are the wheel rules as (wheel, pattern)."""

    name: str
    key: str
    packages: tuple[DebPackage, ...] = ()
    wheels: tuple[Wheel, ...] = ()
    deb_drops: tuple[Drop, ...] = ()
    drops: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Result:
    """A written layer.

    ``libraries`` are the paths of shared libraries in wheel layers; ``names`` maps folders of
    the base layer to what ldconfig would enter of them.
    """

    name: str
    key: str
    digest: str
    size: int
    files: int
    libraries: tuple[str, ...]
    names: dict[str, tuple[str, ...]]

    @property
    def blob(self) -> Blob:
        """Digest and size."""
        return Blob(self.digest, self.size)

    def as_data(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Result:
        """Undo ``as_data`` after a way through JSON."""
        names = {folder: tuple(found) for folder, found in data.pop("names").items()}
        return cls(libraries=tuple(data.pop("libraries")), names=names, **data)


def plan(job: Job, store: Store, layout: wheels.Layout) -> Tree:
    """Return the tree of a layer; every file is checked against the lock before it is opened.

    Raises:
        ImageError: a file is missing, unreadable, wrong, or two bring the same path.
    """
    tree = Tree()
    if job.packages:
        dropped = debs.Dropped(job.deb_drops)
        for package in job.packages:
            debs.add(tree, store.verified(package), package.name, dropped)
        base.finish(tree)
    for wheel in job.wheels:
        rules = [pattern for name, pattern in job.drops if name == wheel.name]
        wheels.add(tree, store.verified(wheel), layout, rules)
    return tree


def write(job: Job, store: Store, layout: wheels.Layout, out: Path) -> Result:
    """Plan and write a layer into an OCI layout folder.

    Raises:
        ImageError: as ``plan``.
        OSError: the output cannot be written.
    """
    tree = plan(job, store, layout)
    blob = Layout(out).put_stream(tar.stream(tree, MTIME))
    names: dict[str, tuple[str, ...]] = {}
    libraries: tuple[str, ...] = ()
    if job.packages:
        folders = {
            head
            for head, name in map(posixpath.split, tree.entries)
            if head.startswith(("usr/lib", "usr/local/lib")) and ldcache.considered(name)
        }
        for folder in sorted(folders):
            if found := ldcache.names(tree, folder):
                names[folder] = tuple(found)
    else:
        libraries = tuple(
            path for path, _ in tree.sorted() if ldcache.LIBRARY.fullmatch(posixpath.basename(path))
        )
    return Result(job.name, job.key, blob.digest, blob.size, len(tree.entries), libraries, names)
