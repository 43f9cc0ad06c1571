"""Files read and written past the page cache, with a stated fallback.

On a Spark the page cache takes memory from the GPU, so packing 100 GB through it is not a
detail. A file system that refuses O_DIRECT is used buffered, and its pages dropped at once.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

ALIGNMENT = 4096


def aligned_buffer(size: int) -> mmap.mmap:
    """Page-aligned zeroed memory of at least ``size`` bytes."""
    return mmap.mmap(-1, max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT))


@dataclass
class DirectFile:
    """An open file and whether O_DIRECT is on."""

    path: Path
    fd: int
    direct: bool

    @classmethod
    def open(cls, path: Path, flags: int, *, direct: bool = True) -> DirectFile:
        """Open ``path``, with O_DIRECT if wanted and possible.

        Raises:
            OSError: it cannot be opened at all.

        """
        if direct:
            try:
                fd = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o644)
                return cls(path, fd, direct=True)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return cls(path, os.open(path, flags | os.O_CLOEXEC, 0o644), direct=False)

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill ``view`` (aligned, as is ``offset``) from ``offset``; returns bytes read.

        Less than asked for means the file ended there.

        Raises:
            OSError: the read failed.

        """
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self.fd, [view[done:]], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and self.direct:
                    self._leave_direct()
                    continue
                raise
            if got == 0:
                break
            done += got
            if done % ALIGNMENT and self.direct:
                break  # the unaligned end of the file
        self.drop(offset, done)
        return done

    def write_all(self, view: memoryview, offset: int) -> None:
        """Write all of ``view`` (aligned) at ``offset``.

        Raises:
            OSError: the write failed; ENOSPC among others.

        """
        done = 0
        while done < len(view):
            try:
                done += os.pwrite(self.fd, view[done:], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and self.direct:
                    self._leave_direct()
                    continue
                raise

    def drop(self, offset: int, size: int) -> None:
        """Let go of the page cache's copy of a range (clean pages only)."""
        os.posix_fadvise(self.fd, offset, size, os.POSIX_FADV_DONTNEED)

    def _leave_direct(self) -> None:
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)


def sync_folder(folder: Path) -> None:
    """Make names created or renamed in ``folder`` survive a power loss.

    Raises:
        OSError: the folder cannot be synced.

    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
