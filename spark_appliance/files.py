"""Files on the control machine: read with a bound, written in one step."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from spark_appliance.errors import InputError, Location, read_failure


def read_bounded(path: Path, limit: int) -> bytes:
    """Read a regular file of at most ``limit`` bytes.

    Raises:
        InputError: when it cannot be read, is no regular file (a pipe or a device would never
            end) or is larger.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InputError.one(
                    "file.not-regular",
                    f"{path} is no regular file",
                    "give the path of a file",
                    Location(str(path)),
                )
            raw = file.read(limit + 1)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise read_failure(path, error) from None
    except ValueError as error:  # a NUL byte in the path
        raise read_failure(path, OSError(0, str(error))) from None
    if len(raw) > limit:
        raise InputError.one(
            "file.too-large",
            f"the file has {max(size, len(raw)):,} bytes; at most {limit:,} are read",
            "give the right file",
            Location(str(path), 1, 1),
        )
    return raw


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step, so that a reader or a crash never sees half of it.

    A symbolic link is followed and the mode of an existing file kept; what is no regular file
    (a terminal, a pipe) is written to directly.

    Raises:
        OSError: when the folder cannot be written.
    """
    target = path.resolve()
    try:
        before: os.stat_result | None = target.stat()
    except FileNotFoundError:
        before = None
    if before is not None and not stat.S_ISREG(before.st_mode):
        with target.open("w", encoding="utf-8") as file:
            file.write(text)
        return
    handle, name = tempfile.mkstemp(prefix=f".{target.name[:100]}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            mask = os.umask(0o077)
            os.umask(mask)
            mode = 0o666 & ~mask if before is None else stat.S_IMODE(before.st_mode)
            os.fchmod(file.fileno(), mode)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
