"""The partitions of a disk or of a disk image, and where two images differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from spark_appliance import process
from spark_appliance.errors import read_failure
from spark_appliance.image.errors import ImageError

_TIMEOUT_S: Final = 30.0
_CHUNK: Final = 1 << 20
ESP_LABEL: Final = "spark-esp"
"""modules/image/esp.nix."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition of a GPT; ``start`` and ``size`` in bytes, counted from the disk's beginning."""

    label: str
    start: int
    size: int

    @property
    def end(self) -> int:
        """Offset behind its last byte."""
        return self.start + self.size


def partitions(disk: Path) -> tuple[Partition, ...]:
    """Ask sfdisk for the partitions of a disk or a raw image, in their order on the disk.

    Raises:
        ImageError: no GUID partition table, or sfdisk is missing.
    """
    try:
        answer = process.run(["sfdisk", "--json", str(disk)], timeout=_TIMEOUT_S).stdout
    except process.FailedError:
        raise ImageError(
            f"{disk}: no partition table\n    remedy: give a raw image made by nix build .#image"
        ) from None
    except process.ProgramMissingError:
        raise ImageError("sfdisk is not there\n    remedy: install fdisk (util-linux)") from None
    table = json.loads(answer)["partitiontable"]
    if table["label"] != "gpt":
        raise ImageError(
            f"{disk}: partition table of type {table['label']}, not gpt\n"
            "    remedy: give a raw image made by nix build .#image"
        )
    sector = int(table.get("sectorsize", 512))
    found = (
        Partition(entry.get("name", ""), int(entry["start"]) * sector, int(entry["size"]) * sector)
        for entry in table.get("partitions", ())
    )
    return tuple(sorted(found, key=lambda partition: partition.start))


def esp(disk: Path) -> Partition:
    """Return the ESP of one of our images.

    Raises:
        ImageError: when there is none.
    """
    for partition in partitions(disk):
        if partition.label == ESP_LABEL:
            return partition
    raise ImageError(
        f"{disk}: no partition {ESP_LABEL}, so this is no image of spark-appliance\n"
        "    remedy: give a raw image made by nix build .#image"
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """A partition in which two images differ.

    ``begin`` and ``end`` are offsets in it, in bytes, end excluded: the first and behind the last
    byte that differs. ``label`` is empty for what lies outside of partitions (the tables).
    """

    label: str
    begin: int
    end: int

    def __str__(self) -> str:
        place = f"partition {self.label}" if self.label else "outside of the partitions"
        return f"{place}, bytes {self.begin} to {self.end}"


def differences(left: Path, right: Path) -> list[Difference]:
    """Compare two raw images; an empty list when they have the same bytes.

    Partitions are those of ``left``.

    Raises:
        ImageError: ``left`` is no image.
        InputError: one cannot be read.
    """
    found = []
    spans = list(_spans(partitions(left), max(_size(left), _size(right))))
    with _open(left) as a, _open(right) as b:
        for partition in spans:
            a.seek(partition.start)
            b.seek(partition.start)
            span = _differing(a, b, partition.size)
            if span is not None:
                base = 0 if partition.label else partition.start
                found.append(Difference(partition.label, base + span[0], base + span[1]))
    return found


def _spans(table: tuple[Partition, ...], size: int) -> Iterator[Partition]:
    done = 0
    for partition in table:
        if partition.start > done:
            yield Partition("", done, partition.start - done)
        yield partition
        done = partition.end
    if size > done:
        yield Partition("", done, size - done)


def _differing(a: BinaryIO, b: BinaryIO, size: int) -> tuple[int, int] | None:
    begin = end = None
    for offset in range(0, size, _CHUNK):
        length = min(_CHUNK, size - offset)
        one, two = a.read(length), b.read(length)
        if one == two:
            continue
        count = max(len(one), len(two))
        one, two = one.ljust(count, b"\0"), two.ljust(count, b"\0")
        places = [place for place in range(count) if one[place] != two[place]] or [0, count - 1]
        begin = offset + places[0] if begin is None else begin
        end = offset + places[-1] + 1
    return None if begin is None or end is None else (begin, end)


def _size(image: Path) -> int:
    try:
        return image.stat().st_size
    except OSError as error:
        raise read_failure(image, error) from None


def _open(image: Path) -> BinaryIO:
    try:
        return image.open("rb")
    except OSError as error:
        raise read_failure(image, error) from None
