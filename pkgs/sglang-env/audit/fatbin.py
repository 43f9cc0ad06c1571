"""Read the headers of CUDA fat binaries that lie outside the sections which cuobjdump lists.

cuFFT keeps thousands of them in `.data`. The layout is not documented by NVIDIA; it is the one of
`fatbinary.h` in the toolkit (outer header) and of ZLUDA's reader (entries). Each architecture found
here is confirmed with cuobjdump on one sample, which also gives its suffix.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from mmap import mmap

MAGIC = (0xBA55ED50).to_bytes(4, "little")
OUTER = struct.Struct("<IHHQ")
"""magic, version, size of this header, size of the entries."""

INNER = struct.Struct("<HHIQ12xI")
"""kind, version, size of this header, size of the payload, (unknown), architecture."""

KINDS = {1: "ptx", 2: "sass"}
"""Kind 8 is LTO-IR, which only nvJitLink reads; it is left out."""


class Entry(NamedTuple):
    """One PTX or SASS entry: `start` and `end` bound the whole container in the file."""

    kind: str
    architecture: int
    start: int
    end: int


def entries(data: mmap | bytes, skip: list[tuple[int, int]]) -> Iterator[Entry]:
    """Yield the entries of every container of `data` that starts outside the ranges `skip`."""
    start = data.find(MAGIC)
    while start >= 0:
        if not any(low <= start < high for low, high in skip):
            yield from _container(data, start)
        start = data.find(MAGIC, start + 1)


def _container(data: mmap | bytes, start: int) -> Iterator[Entry]:
    if start + OUTER.size > len(data):
        return
    _, version, header, size = OUTER.unpack_from(data, start)
    place, end = start + header, start + header + size
    if version != 1 or header != OUTER.size or end > len(data):
        return
    while place + INNER.size <= end:
        kind, _, inner, payload, architecture = INNER.unpack_from(data, place)
        if inner < INNER.size:
            return
        if kind in KINDS:
            yield Entry(KINDS[kind], architecture, start, end)
        place += inner + payload
