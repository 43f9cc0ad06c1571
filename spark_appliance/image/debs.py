"""Debian packages into a tree: data and control files, never a script."""

from __future__ import annotations

import posixpath
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path

from debian.arfile import ArError
from debian.debfile import DebError, DebFile

from spark_appliance.image.errors import ImageError
from spark_appliance.image.recipe import Drop
from spark_appliance.image.tree import Entry, Kind, Tree

_MERGED = ("bin", "sbin", "lib", "lib64")


def canonical(path: str) -> str:
    """Return a path without ./ and below usr/ where Debian 13 has merged it."""
    clean = posixpath.normpath("/" + path).lstrip("/")
    top, slash, _ = clean.partition("/")
    return f"usr/{clean}" if slash and top in _MERGED else clean


class Dropped:
    """Decides which paths are left out."""

    def __init__(self, drops: Sequence[Drop]) -> None:
        self._rules = [re.compile(drop.paths) for drop in drops]

    def __call__(self, path: str) -> bool:
        """Return whether a path is left out."""
        return any(rule.search(path) for rule in self._rules)


def add(tree: Tree, path: Path, name: str, dropped: Dropped) -> None:
    """Add a package: its files, and its control file where scanners look for it.

    Set-id bits are removed, owners are root, hard links become copies.

    Raises:
        ImageError: no Debian package, or a device or pipe in it.
    """
    try:
        with DebFile(str(path)) as package:
            control = package.control.get_content("control")
            if not isinstance(control, bytes):
                raise ImageError(f"{path}: no control file")
            # status.d is what image scanners read in images without dpkg
            tree.file(f"var/lib/dpkg/status.d/{name}", control)
            archive = package.data.tgz()
            for member in archive:
                _add_member(tree, member, archive, dropped)
    except (DebError, ArError, OSError, EOFError) as error:
        raise ImageError(f"{path}: not a readable Debian package: {error}") from None


def _add_member(
    tree: Tree, member: tarfile.TarInfo, archive: tarfile.TarFile, dropped: Dropped
) -> None:
    name = canonical(member.name)
    if member.isdir():
        if name and not dropped(f"{name}/x"):
            tree.directory(name, member.mode & 0o1777)
        return
    if dropped(name):
        return
    if member.isfile():
        content = archive.extractfile(member)
        data = content.read() if content is not None else b""
        tree.put(name, Entry(Kind.FILE, member.mode & 0o777, data))
    elif member.issym():
        tree.link(name, member.linkname)
    elif member.islnk():
        tree.put(name, tree[canonical(member.linkname)])
    else:
        raise ImageError(f"{name}: neither file, directory nor link")
