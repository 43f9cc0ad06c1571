"""Compare two images, down to the first byte range that differs."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from spark_appliance.image.oci import Image, Layout, read_image

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference: which layer (counted from 0), file, and what.

    ``begin`` and ``end`` are offsets in the file, in bytes, end excluded: the first and behind
    the last byte that differs. They are None when the contents are equal or cannot be compared.
    """

    layer: int | None
    path: str
    what: str
    begin: int | None = None
    end: int | None = None

    def __str__(self) -> str:
        place = "config" if self.layer is None else f"layer {self.layer}"
        file = f", {self.path}" if self.path else ""
        span = f", bytes {self.begin} to {self.end}" if self.begin is not None else ""
        return f"{place}{file}{span}: {self.what}"


def first_difference(left: Path, right: Path) -> Difference | None:
    """Compare two layouts; None when the images are the same.

    Raises:
        InputError: one of the folders is no layout with an image.
    """
    a, b = read_image(left), read_image(right)
    if a.manifest == b.manifest:
        return None
    for number, (one, two) in enumerate(zip(a.layers, b.layers, strict=False)):
        if one != two:
            return compare_layers(number, Layout(left).path(one), Layout(right).path(two))
    if len(a.layers) != len(b.layers):
        return Difference(
            min(len(a.layers), len(b.layers)), "", f"{len(a.layers)} layers and {len(b.layers)}"
        )
    return _config(left, right, a, b)


def _config(left: Path, right: Path, a: Image, b: Image) -> Difference:
    one, two = Layout(left).json(a.config), Layout(right).json(b.config)
    fields = sorted(key for key in {*one, *two} if one.get(key) != two.get(key))
    return Difference(None, "", f"the layers are equal, these fields differ: {', '.join(fields)}")


def compare_layers(number: int, left: Path, right: Path) -> Difference:
    """Name the first entry of two layers that differs."""
    with tarfile.open(left, "r:") as one, tarfile.open(right, "r:") as two:
        while True:
            a, b = one.next(), two.next()
            if a is None and b is None:
                return Difference(number, "", "the same entries, but other tar headers")
            if a is None or b is None or a.name != b.name:
                present = [m for m in (a, b) if m is not None]
                first = min(present, key=lambda member: member.name)
                side = "first" if first is a else "second"
                return Difference(number, first.name, f"only in the {side} image")
            for field in ("type", "mode", "uid", "gid", "mtime", "linkname"):
                if getattr(a, field) != getattr(b, field):
                    return Difference(
                        number, a.name,
                        f"{field} {_shown(field, a)} and {_shown(field, b)}",
                    )  # fmt: skip
            if a.isreg():
                found = _contents(one.extractfile(a), two.extractfile(b))
                if found is not None:
                    what = (
                        "content differs"
                        if a.size == b.size
                        else f"sizes are {a.size} and {b.size}"
                    )
                    return Difference(number, a.name, what, *found)


def _shown(field: str, member: tarfile.TarInfo) -> str:
    value = getattr(member, field)
    return f"{value:04o}" if field == "mode" else repr(value)


def _contents(one: IO[bytes] | None, two: IO[bytes] | None) -> tuple[int, int] | None:
    """Return the range that holds every differing byte, or None."""
    if one is None or two is None:
        return None
    begin = end = None
    offset = 0
    while True:
        a, b = one.read(_CHUNK), two.read(_CHUNK)
        if not a and not b:
            break
        if a != b:
            longest = max(len(a), len(b))
            differs = [
                index for index in range(longest) if a[index : index + 1] != b[index : index + 1]
            ]
            begin = offset + differs[0] if begin is None else begin
            end = offset + differs[-1] + 1
        offset += _CHUNK
    return None if begin is None or end is None else (begin, end)
