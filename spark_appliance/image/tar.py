"""Deterministic tar: ustar headers, pax records only where ustar has no room.

Written here, not with tarfile, whose bytes may change with the Python version; the published
digest must not. Format: POSIX.1-2017, utility pax.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from spark_appliance.image.errors import ImageError
from spark_appliance.image.tree import Entry, Kind, Tree

BLOCK = 512
_NAME = 100  # bytes of the name and linkname fields
_SIZE_LIMIT = 8**11  # the size field holds eleven octal digits
_CHUNK = 1 << 20
END = b"\0" * (2 * BLOCK)


def _octal(value: int, width: int) -> bytes:
    return b"%0*o\0" % (width - 1, value)


def _header(name: bytes, entry_type: bytes, mode: int, size: int, owner: int, mtime: int,
            link: bytes = b"") -> bytes:  # fmt: skip
    fields = [
        name.ljust(_NAME, b"\0"),
        _octal(mode, 8),
        _octal(owner, 8),
        _octal(owner, 8),
        _octal(size, 12),
        _octal(mtime, 12),
        b" " * 8,
        entry_type,
        link.ljust(_NAME, b"\0"),
        b"ustar\x0000",
        b"\0" * 64,
        _octal(0, 8) * 2,
    ]
    block = bytearray(b"".join(fields).ljust(BLOCK, b"\0"))
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pax_record(key: bytes, value: bytes) -> bytes:
    """Return ``LENGTH key=value`` and a line end; LENGTH counts all of it."""
    body = b" %s=%s\n" % (key, value)
    length = len(body) + 1
    while len(str(length)) + len(body) != length:
        length = len(str(length)) + len(body)
    return b"%d" % length + body


def entry_header(path: str, entry: Entry, mtime: int = 0) -> bytes:
    """Return the header blocks of one entry; ``mtime`` in seconds since 1970."""
    name = path.encode() + (b"/" if entry.kind is Kind.DIRECTORY else b"")
    link = entry.target.encode()
    size = entry.size
    records = b""
    if len(name) > _NAME:
        records += pax_record(b"path", name)
    if len(link) > _NAME:
        records += pax_record(b"linkpath", link)
    if size >= _SIZE_LIMIT:
        records += pax_record(b"size", b"%d" % size)
    out = b""
    if records:
        out = _header(b"pax", b"x", 0o644, len(records), 0, mtime) + _padded(records)
    return out + _header(
        name[:_NAME],
        entry.kind.value,
        entry.mode,
        size if size < _SIZE_LIMIT else 0,
        entry.owner,
        mtime,
        link[:_NAME],
    )


def padding(size: int) -> bytes:
    """Return the zeros that fill the last block of a content."""
    return b"\0" * (-size % BLOCK)


def _padded(data: bytes) -> bytes:
    return data + padding(len(data))


def stream(tree: Tree, mtime: int = 0) -> Iterator[bytes]:
    """Yield the bytes of a tree as a tar archive, in sorted order.

    Raises:
        ImageError: a wheel's member does not have the size that its directory states.
    """
    with ExitStack() as stack:
        archives: dict[Path, zipfile.ZipFile] = {}
        for path, entry in tree.sorted():
            yield entry_header(path, entry, mtime)
            content = entry.content
            if isinstance(content, bytes):
                yield content
            else:
                archive = archives.get(content.archive)
                if archive is None:
                    archive = stack.enter_context(zipfile.ZipFile(content.archive))
                    archives[content.archive] = archive
                size = 0
                try:
                    with archive.open(content.name) as member:
                        while chunk := member.read(_CHUNK):
                            size += len(chunk)
                            yield chunk
                except (zipfile.BadZipFile, zlib.error) as error:
                    raise ImageError(f"{content.archive}: {content.name}: {error}") from None
                if size != content.size:
                    raise ImageError(
                        f"{content.archive}: {content.name}: {size} bytes, stated {content.size}"
                    )
            yield padding(entry.size)
        yield END
