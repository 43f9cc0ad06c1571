"""A file tree in memory: paths to entries, without anything on disc."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from spark_appliance.image.errors import ImageError


class Kind(Enum):
    """What an entry is; the value is the type flag of ustar (POSIX.1-2017, pax)."""

    FILE = b"0"
    LINK = b"2"
    DIRECTORY = b"5"


@dataclass(frozen=True, slots=True)
class ZipMember:
    """Content that stays in a wheel until it is written; ``size`` in bytes, unpacked."""

    archive: Path
    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One file, link or directory. ``mode`` are the permission bits, ``owner`` uid and gid."""

    kind: Kind
    mode: int
    content: bytes | ZipMember = b""
    target: str = ""
    owner: int = 0

    @property
    def size(self) -> int:
        """Bytes of content."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.size


@dataclass
class Tree:
    """Entries by path, without a leading slash; parents are made as needed."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def __contains__(self, path: str) -> bool:
        return path in self.entries

    def __getitem__(self, path: str) -> Entry:
        return self.entries[path]

    def directory(self, path: str, mode: int = 0o755, owner: int = 0) -> None:
        """Add a directory; naming it again with another mode or owner changes them."""
        if not path:
            return
        old = self.entries.get(path)
        if old is None:
            self.directory(posixpath.dirname(path))
        elif old.kind is not Kind.DIRECTORY:
            raise ImageError(f"{path}: a directory and a file or link in one layer")
        elif (mode, owner) == (0o755, 0):
            return
        self.entries[path] = Entry(Kind.DIRECTORY, mode, owner=owner)

    def file(
        self,
        path: str,
        content: bytes | str | ZipMember,
        mode: int = 0o644,
        *,
        replace: bool = False,
    ) -> None:
        """Add a file.

        Raises:
            ImageError: another entry with other content has that path, without ``replace``.
        """
        data = content.encode() if isinstance(content, str) else content
        self.put(path, Entry(Kind.FILE, mode, data), replace=replace)

    def link(self, path: str, target: str, *, replace: bool = False) -> None:
        """Add a symbolic link; conditions as for ``file``."""
        self.put(path, Entry(Kind.LINK, 0o777, target=target), replace=replace)

    def copy(self, source: str, path: str) -> None:
        """Add a file with the content of another, mode 0644."""
        self.file(path, self.entries[source].content)

    def remove(self, path: str) -> None:
        """Remove an entry if it is there."""
        self.entries.pop(path, None)

    def sorted(self) -> Iterator[tuple[str, Entry]]:
        """Yield entries in byte order of their paths: a directory before what is in it."""
        for path in sorted(self.entries, key=str.encode):
            yield path, self.entries[path]

    def put(self, path: str, entry: Entry, *, replace: bool = False) -> None:
        """Add an entry; conditions as for ``file``."""
        if path.startswith("/") or ".." in path.split("/") or not path:
            raise ImageError(f"{path!r}: not a path inside the image")
        old = self.entries.get(path)
        if old is not None and old != entry and not replace:
            raise ImageError(f"{path}: two packages bring it with different content")
        self.directory(posixpath.dirname(path))
        self.entries[path] = entry
