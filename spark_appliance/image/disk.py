"""Write the disk image to a disk: the right one, not in use, and read back afterwards."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from spark_appliance import process
from spark_appliance.errors import InputError, Location, read_failure
from spark_appliance.image import partitions
from spark_appliance.image.errors import ImageError

_CHUNK = 4 << 20
_TIMEOUT_S = 30.0
_COLUMNS = "PATH,TYPE,SIZE,LOG-SEC,MODEL,SERIAL,TRAN,RO,MOUNTPOINTS"
_SECTOR = 512  # bytes: image.repart.sectorSize in modules/image.nix
# First bytes of what is often handed over by mistake (magic numbers of the formats).
_COMPRESSED = {
    b"\x28\xb5\x2f\xfd": "zstd -d",
    b"\x1f\x8b": "gzip -d",
    b"\xfd7zXZ\0": "xz -d",
    b"BZh": "bzip2 -d",
}

Progress = Callable[[str, int, int], None]
"""Called with what is done ("write" or "verify"), bytes so far, and bytes in all."""


@dataclass(frozen=True, slots=True)
class Disk:
    """A block device as lsblk sees it; ``mounts`` of it and all below it.

    ``size`` and ``sector`` (logical) are in bytes.
    """

    path: str
    kind: str
    size: int
    sector: int
    model: str
    serial: str
    transport: str
    read_only: bool
    mounts: tuple[str, ...]

    def __str__(self) -> str:
        name = " ".join(part for part in (self.model, self.serial, self.transport) if part)
        return f"{self.path}: {name or 'no model'}, {self.size / 1e9:.1f} GB"


def inspect(device: Path) -> Disk:
    """Ask lsblk about a device.

    Raises:
        ImageError: no such block device, or lsblk is missing.
    """
    argv = ["lsblk", "--json", "--bytes", "--output", _COLUMNS, str(device.resolve())]
    try:
        answer = process.run(argv, timeout=_TIMEOUT_S).stdout
    except process.FailedError:
        raise ImageError(
            f"{device}: not a block device\n    remedy: lsblk lists the disks of this machine"
        ) from None
    return parse(answer)


def parse(answer: str) -> Disk:
    """Read lsblk's JSON for one device."""
    (entry,) = json.loads(answer)["blockdevices"]
    return Disk(
        path=entry["path"],
        kind=entry["type"],
        size=int(entry["size"]),
        sector=int(entry["log-sec"]),
        model=(entry["model"] or "").strip(),
        serial=(entry["serial"] or "").strip(),
        transport=entry["tran"] or "",
        read_only=bool(entry["ro"]),
        mounts=tuple(_mounts(entry)),
    )


def _mounts(entry: dict[str, Any]) -> Iterator[str]:
    yield from (point for point in entry.get("mountpoints", ()) if point)
    for child in entry.get("children", ()):
        yield from _mounts(child)


def check(disk: Disk, size: int) -> None:
    """Refuse a disk that must not or cannot be written.

    Args:
        disk: the target.
        size: of the image, in bytes.

    Raises:
        InputError: a partition, in use, write-protected, too small, or of other sectors.
    """
    if disk.kind != "disk":
        fault = f"a {disk.kind}, not a whole disk", "name the disk that it is on"
    elif disk.mounts:
        fault = (
            f"in use: {', '.join(disk.mounts)}",
            "unmount it, if this is really the disk to overwrite",
        )
    elif disk.read_only:
        fault = "write-protected", "look for a switch on it"
    elif disk.size < size:
        fault = f"too small: the image has {size / 1e9:.1f} GB", "take a larger one"
    elif disk.sector != _SECTOR:
        fault = (
            f"of sectors of {disk.sector} bytes: the image's partition table counts {_SECTOR}",
            f"take a disk with {_SECTOR}, or format this one so (nvme format; it erases all)",
        )
    else:
        return
    raise InputError.one("image.disk", f"{disk} is {fault[0]}", fault[1])


def image_size(image: Path) -> int:
    """Return the size of a raw image in bytes.

    Raises:
        InputError: unreadable, empty, or compressed.
    """
    try:
        with partitions.open_image(image) as file:
            size = partitions.size(file)
            head = file.read(8)
    except OSError as error:
        raise read_failure(image, error) from None
    for magic, command in _COMPRESSED.items():
        if head.startswith(magic):
            raise InputError.one(
                "image.disk-image",
                "compressed",
                f"unpack it first: {command} {image}",
                Location(str(image)),
            )
    if size == 0 or size % 512:
        raise InputError.one(
            "image.disk-image",
            f"{size} bytes are not a number of disk sectors (512 bytes): an unfinished download?",
            where=Location(str(image)),
        )
    return size


def write(image: Path, device: Path, progress: Progress = lambda *_: None) -> str:
    """Write an image and read it back from the disk; return its sha256 in hex.

    Raises:
        ImageError: the disk is in use, fails, or returns other bytes than were written.
    """
    size = image_size(image)
    try:
        with partitions.open_image(image) as source, _exclusive(device) as target:
            wanted = _copy(source, target, size, progress)
            target.flush()
            os.fsync(target.fileno())
            # what is read next must come from the disk, not from memory
            os.posix_fadvise(target.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            target.seek(0)
            found = _hash(target, size, progress)
    except OSError as error:
        raise ImageError(_write_failure(device, error)) from None
    if found != wanted:
        raise ImageError(
            f"{device}: reads back other bytes than were written\n"
            "    remedy: the disk or its cable is faulty, take another"
        )
    return wanted


def _write_failure(device: Path, error: OSError) -> str:
    # both come from opening the disk: nothing was written
    if error.errno == errno.EBUSY:
        return (
            f"{device}: in use by the kernel (mounted, RAID or LVM)\n"
            "    remedy: unmount it, or stop the RAID or volume group; nothing was written"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{device}: {error.strerror}\n    remedy: use sudo; nothing was written"
    reason = error.strerror or str(error)
    return f"{device}: {reason}\n    remedy: the disk is not bootable now; write it again"


def _exclusive(device: Path) -> BinaryIO:
    # On a block device O_EXCL without O_CREAT fails while anything else holds it (open(2)).
    return os.fdopen(os.open(device, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC), "r+b", buffering=0)


def _copy(source: BinaryIO, target: BinaryIO, size: int, progress: Progress) -> str:
    total = hashlib.sha256()
    done = 0
    while chunk := source.read(_CHUNK):
        view = memoryview(chunk)
        while view:
            view = view[target.write(view) :]
        total.update(chunk)
        done += len(chunk)
        progress("write", done, size)
    return total.hexdigest()


def _hash(target: BinaryIO, size: int, progress: Progress) -> str:
    total = hashlib.sha256()
    done = 0
    while done < size:
        chunk = target.read(min(_CHUNK, size - done))
        if not chunk:
            break
        total.update(chunk)
        done += len(chunk)
        progress("verify", done, size)
    return total.hexdigest()
