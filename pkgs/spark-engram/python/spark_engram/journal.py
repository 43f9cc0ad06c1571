"""The journal that makes packing resumable, and the lock against a second packer.

One JSON object a line, ended by a ``crc`` member. The first line holds the header of the
packed file (hex) and a fingerprint of the source. Each later line names a segment, in order,
and is written only after that segment's data is on the drive.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from spark_engram.errors import BusyError, MismatchError, TargetError
from spark_engram.format import crc32c


@dataclass(frozen=True)
class Start:
    """What the partial file is for: header bytes (hex) and the source's fingerprint."""

    header: str
    source: str


@dataclass
class Journal:
    """An open, locked journal."""

    path: Path
    fd: int
    start: Start
    checksums: list[int] = field(default_factory=list)
    """CRC of each finished segment, in order."""

    @classmethod
    def open(cls, path: Path, start: Start, *, restart: bool) -> Self:
        """Open or begin the journal at ``path``.

        Raises:
            BusyError: another process has it open.
            MismatchError: it was begun for another file or source and ``restart`` is false.
            TargetError: it cannot be written.

        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise TargetError(f"{path}: {error.strerror}") from error
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BusyError(
                    f"{path}: another process is packing this file; wait for it or stop it"
                ) from None
            journal = cls(path, fd, start)
            journal._load(restart=restart)
        except OSError as error:
            os.close(fd)
            raise TargetError(f"{path}: {error.strerror}") from error
        except BaseException:
            os.close(fd)
            raise
        return journal

    def _load(self, *, restart: bool) -> None:
        with os.fdopen(os.dup(self.fd), "rb") as stream:
            stream.seek(0)
            raw = stream.read()
        found, segments, valid = parse(raw)
        if found is not None and found != self.start and not restart:
            raise MismatchError(
                f"{self.path}: an unfinished pack for another model, layout or source is here; "
                "finish it, or start over with --restart"
            )
        if found != self.start or restart:
            os.ftruncate(self.fd, 0)
            os.lseek(self.fd, 0, os.SEEK_SET)
            self._append({"header": self.start.header, "source": self.start.source})
            return
        self.checksums = segments
        os.ftruncate(self.fd, valid)
        os.lseek(self.fd, valid, os.SEEK_SET)

    def append(self, checksum: int) -> None:
        """Record the next segment as finished; on return the record is on the drive.

        Raises:
            OSError: it could not be written.

        """
        self._append({"segment": len(self.checksums), "checksum": f"{checksum:08x}"})
        self.checksums.append(checksum)

    def forget_last(self) -> None:
        """Drop the last segment (its data does not match its checksum)."""
        kept = self.checksums[:-1]
        os.ftruncate(self.fd, 0)
        os.lseek(self.fd, 0, os.SEEK_SET)
        self.checksums = []
        self._append({"header": self.start.header, "source": self.start.source})
        for checksum in kept:
            self.append(checksum)

    def _append(self, record: dict[str, object]) -> None:
        line = _line(record)
        view = memoryview(line)
        while view:
            view = view[os.write(self.fd, view) :]
        os.fdatasync(self.fd)

    def close(self) -> None:
        """Release the lock."""
        os.close(self.fd)


def parse(raw: bytes) -> tuple[Start | None, list[int], int]:
    """Return the start, the finished segments' checksums, and the length of the valid prefix.

    Anything from the first torn or damaged line on is ignored.
    """
    start: Start | None = None
    checksums: list[int] = []
    valid = 0
    for line in raw.splitlines(keepends=True):
        record = _record(line)
        if record is None:
            break
        if start is None:
            header, source = record.get("header"), record.get("source")
            if not isinstance(header, str) or not isinstance(source, str):
                break
            start = Start(header, source)
        else:
            text = record.get("checksum")
            if record.get("segment") != len(checksums) or not isinstance(text, str):
                break
            checksums.append(int(text, 16))
        valid += len(line)
    return start, checksums, valid


def _line(record: dict[str, object]) -> bytes:
    body = json.dumps(record, separators=(",", ":"))[:-1]
    return f'{body},"crc":"{crc32c(body.encode()):08x}"}}\n'.encode()


def _record(line: bytes) -> dict[str, object] | None:
    # The CRC covers everything before the last member, whose length is fixed.
    tail = len(b',"crc":"00000000"}\n')
    body = line[:-tail]
    if len(line) <= tail or line[-tail:] != f',"crc":"{crc32c(body):08x}"}}\n'.encode():
        return None
    record: dict[str, object] = json.loads(body + b"}")
    return record
