"""Archives in the newc format, which the kernel unpacks as initial file systems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

_DIRECTORY, _REGULAR = 0o40755, 0o100000


def archive(files: Mapping[str, tuple[int, bytes]]) -> bytes:
    """Return an archive of files (path -> mode, content) and their folders, owned by root."""
    output = bytearray()
    for number, (name, mode, content) in enumerate(_entries(files)):
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        head = "070701" + "".join(f"{value:08X}" for value in fields)
        for part in (head.encode() + name.encode() + b"\0", content):
            output += part + b"\0" * (-len(part) % 4)
    return bytes(output)


def tree(top: Path) -> dict[str, tuple[int, bytes]]:
    """Return the regular files below a folder, to be archived."""
    return {
        str(path.relative_to(top)): (path.stat().st_mode & 0o777, path.read_bytes())
        for path in sorted(top.rglob("*"))
        if path.is_file()
    }


def _entries(files: Mapping[str, tuple[int, bytes]]) -> Iterable[tuple[str, int, bytes]]:
    seen: set[str] = set()
    for path, (mode, content) in files.items():
        name = path.lstrip("/")
        for parent in reversed(PurePosixPath(name).parents):
            folder = str(parent)
            if folder != "." and folder not in seen:
                seen.add(folder)
                yield folder, _DIRECTORY, b""
        yield name, _REGULAR | mode, content
    yield "TRAILER!!!", 0, b""
