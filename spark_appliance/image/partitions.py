"""The partitions of a disk or of a disk image, and where two images differ."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from spark_appliance import process
from spark_appliance.errors import InputError, Location, read_failure
from spark_appliance.image.errors import ImageError

_TIMEOUT_S: Final = 30.0
_CHUNK: Final = 1 << 20
_SECTOR: Final = 512
_BACKUP_SECTORS: Final = 33
"""16 KiB of entries and the header behind them (UEFI 2.10, 5.3.1)."""
_GPT_MAGIC: Final = b"EFI PART"
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
        ImageError: no GUID partition table, one for a larger disk, or sfdisk is missing.
        InputError: it cannot be read, or is neither a file nor a disk.
    """
    with open_image(disk) as file:
        end = size(file)
    try:
        answer = process.run(["sfdisk", "--json", str(disk)], timeout=_TIMEOUT_S).stdout
    except process.FailedError:
        raise ImageError(
            f"{disk}: no partition table, or only a part of the image\n"
            "    remedy: give a whole raw image made by nix build .#image"
        ) from None
    except process.ProgramMissingError:
        raise ImageError("sfdisk is not there\n    remedy: install fdisk (util-linux)") from None
    answered = json.loads(answer)["partitiontable"]
    if answered["label"] != "gpt":
        # of a shortened image sfdisk sees the protective MBR only
        raise ImageError(
            f"{disk}: partition table of type {answered['label']}, not gpt: only a part of the "
            "image, or another one\n    remedy: give a whole raw image made by nix build .#image"
        )
    sector = int(answered.get("sectorsize", _SECTOR))
    entries = (
        Partition(entry.get("name", ""), int(entry["start"]) * sector, int(entry["size"]) * sector)
        for entry in answered.get("partitions", ())
    )
    table = tuple(sorted(entries, key=lambda partition: partition.start))
    for partition in table:
        if partition.end > end:
            raise ImageError(
                f"{disk}: ends at byte {end}, its partition {partition.label} at "
                f"{partition.end}: an unfinished download?\n"
                "    remedy: give a whole raw image made by nix build .#image"
            )
    return table


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


def require_whole(image: Path) -> None:
    """Refuse what is no disk image of ours, or only a part of one.

    Raises:
        ImageError: no partition table with our ESP, or the backup table is not at the end.
        InputError: it cannot be read.
    """
    esp(image)
    needed = max(partition.end for partition in partitions(image)) + _BACKUP_SECTORS * _SECTOR
    with open_image(image) as file:
        found = size(file)
        file.seek(max(found - _SECTOR, 0))
        magic = file.read(len(_GPT_MAGIC))
    if found < needed or magic != _GPT_MAGIC:
        raise ImageError(
            f"{image}: the second partition table is not at its end: an unfinished download?\n"
            "    remedy: give a whole raw image made by nix build .#image"
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
    table = partitions(left)
    with open_image(left) as a, open_image(right) as b:
        spans = list(_spans(table, max(size(a), size(b))))
        for partition in spans:
            a.seek(partition.start)
            b.seek(partition.start)
            span = _differing(a, b, partition.size)
            if span is not None:
                base = 0 if partition.label else partition.start
                found.append(Difference(partition.label, base + span[0], base + span[1]))
    return found


def _spans(table: tuple[Partition, ...], total: int) -> Iterator[Partition]:
    done = 0
    for partition in table:
        if partition.start > done:
            yield Partition("", done, partition.start - done)
        yield partition
        done = partition.end
    if total > done:
        yield Partition("", done, total - done)


def _differing(a: BinaryIO, b: BinaryIO, total: int) -> tuple[int, int] | None:
    begin = end = None
    for offset in range(0, total, _CHUNK):
        length = min(_CHUNK, total - offset)
        one, two = a.read(length), b.read(length)
        if not one and not two:
            break
        if one == two:
            continue
        count = max(len(one), len(two))
        one, two = one.ljust(count, b"\0"), two.ljust(count, b"\0")
        places = [place for place in range(count) if one[place] != two[place]] or [0, count - 1]
        begin = offset + places[0] if begin is None else begin
        end = offset + places[-1] + 1
    return None if begin is None or end is None else (begin, end)


def size(file: BinaryIO) -> int:
    """Return the size of an open file or disk in bytes; reading goes on from the beginning."""
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
    return end


def open_image(image: Path) -> BinaryIO:
    """Open a raw image or a disk for reading; never waits for a pipe's other end.

    Raises:
        InputError: it cannot be read, or is neither a file nor a disk.
    """
    try:
        file = os.fdopen(os.open(image, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_ISREG(mode) or stat.S_ISBLK(mode):
            return file
        file.close()
    except OSError as error:
        raise read_failure(image, error) from None
    raise InputError.one(
        "image.disk-image",
        "neither a file nor a disk",
        "give a raw image made by nix build .#image",
        Location(str(image)),
    )
