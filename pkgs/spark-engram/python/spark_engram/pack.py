"""Packing: one rank's rows of each Engram table, from the checkpoint to local NVMe.

A file is made in segments of 64 MiB. While one is written and synced, the next is packed and
the one after it read. The journal names a segment only when its data is on the drive, so a
run that is killed at any moment goes on where it was.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from spark_engram import format as packed
from spark_engram import layout as geometry
from spark_engram import native, receipt
from spark_engram.checkpoint import Checkpoint, Source, detect_revision
from spark_engram.directio import ALIGNMENT, DirectFile, aligned_buffer, sync_folder
from spark_engram.errors import (
    MismatchError,
    SourceError,
    SpaceError,
    TargetError,
    UsageError,
)
from spark_engram.format import SEGMENT_PAGES, Identity
from spark_engram.journal import Journal, Start
from spark_engram.layout import Layout
from spark_engram.progress import Meter, Reporter, SilentReporter, size_text
from spark_engram.safetensors import TensorPlace

#: Room for journal and receipt beside each packed file.
SIDE_BYTES = 2**20
#: Bytes of one source read. Several in flight keep an NFS server or an NVMe drive busy.
READ_BYTES = 8 * 2**20
RANDOM_ROWS = 1000
STALL_S = 30.0


@dataclass(frozen=True)
class PackOptions:
    """What to pack.

    Attributes:
        checkpoint: folder with ``config.json``, the index and the shards.
        output: folder for the packed files, on the local NVMe drive.
        tp: tensor-parallel size.
        rank: this node's rank, ``0..tp-1``.
        layers: layers to pack; empty for all that have a table.
        layout: row division; None for what SGLang 0.5.23 uses.
        revision: model revision; None to take what the download left behind.
        verify: compare with checksums and source afterwards.
        restart: throw away an unfinished or differing file of the same name.
        readers: source reads in flight.
        check_space: compare free space with what is needed first.
        preallocate: reserve all space at the start.
        segment_pages: pages that are written, synced and journalled together.

    """

    checkpoint: Path
    output: Path
    tp: int
    rank: int
    layers: tuple[int, ...] = ()
    layout: Layout | None = None
    revision: str | None = None
    verify: bool = False
    restart: bool = False
    readers: int = 4
    check_space: bool = True
    preallocate: bool = True
    segment_pages: int = SEGMENT_PAGES


@dataclass(frozen=True)
class Job:
    """One file to pack, and where its bytes come from."""

    identity: Identity
    source: Source
    path: Path

    @property
    def partial(self) -> Path:
        """The file while it is unfinished."""
        return self.path.with_name(self.path.name + ".partial")

    @property
    def journal(self) -> Path:
        """The journal while the file is unfinished."""
        return self.path.with_name(self.path.name + ".partial.journal")

    @property
    def start(self) -> Start:
        """What the journal must say to be this job's."""
        places = (self.source.weight, self.source.scale)
        source = [[place.path.name, place.name, place.offset, place.size] for place in places]
        return Start(packed.encode(self.identity).rstrip(b"\0").hex(), json.dumps(source))


def jobs(options: PackOptions) -> list[Job]:
    """Return the files that ``options`` ask for.

    Raises:
        UsageError: an option does not fit the checkpoint.
        SourceError: the checkpoint is incomplete.

    """
    checkpoint = Checkpoint.read(options.checkpoint)
    tables = [checkpoint.table(layer) for layer in options.layers] or list(checkpoint.tables)
    revision = options.revision
    if revision is None:
        revision = detect_revision(options.checkpoint)
    if len(revision) > 64 or not revision.isascii() or not revision.isprintable():
        raise UsageError(f"--revision {revision!r}: at most 64 printable ASCII characters")
    made = []
    for table in tables:
        layout = options.layout or geometry.engine_layout(table.columns, options.tp)
        identity = Identity.of(
            table,
            tp=options.tp,
            rank=options.rank,
            layout=layout,
            revision=revision,
            config_sha256=checkpoint.config_sha256,
            segment_pages=options.segment_pages,
        )
        made.append(Job(identity, checkpoint.source(table), options.output / identity.file_name))
    return made


def pack(options: PackOptions, reporter: Reporter | None = None) -> list[Job]:
    """Pack every file that ``options`` ask for; complete, matching files are left alone.

    Raises:
        EngramError: one of its subclasses; the resumable ones lose nothing.

    """
    report = reporter if reporter is not None else SilentReporter()
    started = monotonic()
    made = jobs(options)
    if not options.output.is_dir():
        raise UsageError(f"{options.output}: no such folder; create it on the NVMe drive")
    finished = {job.path for job in made if _is_complete(job, options)}
    _check_space([job for job in made if job.path not in finished], made, options, report)
    for job in made:
        if job.path in finished:
            _file_event(report, job, "kept", job.identity.file_bytes)
        else:
            _pack_file(job, options, report)
        if options.verify:
            verify(job.path, job.source, report)
    total = sum(job.identity.file_bytes for job in made)
    report.emit("done", files=len(made), bytes=total, seconds=round(monotonic() - started, 3))
    return made


def verify(
    path: Path,
    source: Source | None,
    reporter: Reporter | None = None,
    generator: random.Random | None = None,
) -> None:
    """Re-read the file at ``path``: every page, every segment, and rows of the source.

    With a ``source``, 1000 random rows and all boundary rows (of the rank, of its hash columns
    and of its segments) are compared with the checkpoint.

    Raises:
        MismatchError: a checksum, a page or a row differs.

    """
    report = reporter if reporter is not None else SilentReporter()
    identity = packed.read_identity(path)
    found = receipt.read(path, identity)
    checksums = _scan(path, identity, report)
    if found is not None:
        for index, (now, then) in enumerate(zip(checksums, found.segments, strict=True)):
            if now != then:
                raise MismatchError(
                    f"{path}: segment {index} has checksum {now:08x}, the receipt {then:08x}"
                )
    compared = 0
    if source is not None:
        rows = sample_rows(identity, generator if generator is not None else random.Random())  # noqa: S311
        compared = _compare(path, identity, source, rows)
    report.emit("verify", file=path.name, pages=identity.pages, rows_compared=compared)


def sample_rows(identity: Identity, generator: random.Random) -> list[int]:
    """All boundary rows of the file and up to 1000 random ones, as sorted global row ids."""
    owned = identity.rows
    if owned.rows == 0:
        return []
    rows = {owned.start, owned.end - 1}
    edges = [*identity.column_bounds, *range(owned.start, owned.end, identity.segment_rows)]
    rows.update(row for edge in edges for row in (edge - 1, edge) if owned.start <= row < owned.end)
    rows.update(generator.randrange(owned.start, owned.end) for _ in range(RANDOM_ROWS))
    return sorted(rows)


def _is_complete(job: Job, options: PackOptions) -> bool:
    if not job.path.exists():
        return False
    try:
        found = packed.read_identity(job.path)
        packed.require(found, job.identity, str(job.path))
        if receipt.read(job.path, found) is not None:
            _forget_journal(job)
            return True
    except MismatchError as error:
        if options.restart:
            return False
        raise MismatchError(f"{error}; --restart replaces it") from error
    # Stopped between the two renames: the data is complete, only the receipt is missing.
    with _target_errors(receipt.path_for(job.path)):
        receipt.write(job.path, job.identity, job.source, _scan(job.path, job.identity))
    _forget_journal(job)
    return True


def _forget_journal(job: Job) -> None:
    # Left by a stop just before the end; with a partial file it may be a running packer's.
    if not job.partial.exists():
        with _target_errors(job.journal):
            job.journal.unlink(missing_ok=True)


def _check_space(
    missing: Sequence[Job], everything: Sequence[Job], options: PackOptions, report: Reporter
) -> None:
    needed = 0
    for job in missing:
        there = job.partial.stat().st_blocks * 512 if job.partial.exists() else 0
        needed += max(0, job.identity.file_bytes - there) + SIDE_BYTES
    state = os.statvfs(options.output)
    free = state.f_bavail * state.f_frsize
    report.emit(
        "plan",
        files=[
            {
                "file": job.path.name,
                "layer": job.identity.layer,
                "bytes": job.identity.file_bytes,
                "rows": job.identity.rows.rows,
                "row_start": job.identity.row_start,
                "row_end": job.identity.row_end,
                "layout": job.identity.layout.label,
            }
            for job in everything
        ],
        bytes=sum(job.identity.file_bytes for job in everything),
        free_bytes=free,
        needed_bytes=needed,
    )
    if options.check_space and needed > free:
        raise SpaceError(
            f"{options.output}: packing needs {needed} bytes ({size_text(needed)}), only {free} "
            f"({size_text(free)}) are free; make room and run the same command again"
        )


def _pack_file(job: Job, options: PackOptions, report: Reporter) -> None:
    journal = Journal.open(job.journal, job.start, restart=options.restart)
    try:
        with _target_errors(job.partial):
            target = DirectFile.open(job.partial, os.O_RDWR | os.O_CREAT)
        try:
            _fill(job, journal, target, options, report)
            with _target_errors(job.partial):
                os.fsync(target.fd)
        finally:
            target.close()
        with _target_errors(job.path):
            receipt.path_for(job.path).unlink(missing_ok=True)
            job.partial.rename(job.path)
            sync_folder(job.path.parent)
            receipt.write(job.path, job.identity, job.source, journal.checksums)
            job.journal.unlink()
            sync_folder(job.path.parent)
    finally:
        journal.close()
    _file_event(report, job, "complete", job.identity.file_bytes)


def _fill(
    job: Job, journal: Journal, target: DirectFile, options: PackOptions, report: Reporter
) -> None:
    if not target.direct:
        report.emit(
            "warning",
            message=f"{job.partial}: this file system refuses O_DIRECT; packing goes through the "
            "page cache, and the engine will refuse to read from here",
        )
    with _target_errors(job.partial):
        _reserve(target.fd, job.identity.file_bytes, preallocate=options.preallocate)
    _check_last(job, journal, target)
    done = len(journal.checksums)
    done_bytes = _bytes_before(job, done)
    _file_event(report, job, "resume" if done else "start", done_bytes)
    meter = Meter(report, job.path.name, job.identity.file_bytes, done_bytes)
    with _Reader(job, options.readers, report) as reader:
        _segments(job, journal, target, reader, meter)
    header = aligned_buffer(geometry.HEADER_BYTES)
    header[:] = packed.encode(job.identity)
    with _target_errors(job.partial), memoryview(header) as view:
        target.write_all(view, 0)


def _segments(
    job: Job, journal: Journal, target: DirectFile, reader: _Reader, meter: Meter
) -> None:
    """Read, pack, write and sync what is missing; each step works on another segment."""
    core = native.library()
    first, count = len(journal.checksums), job.identity.segments
    segment_pages = job.identity.segment_pages
    buffers = [aligned_buffer(segment_pages * geometry.PAGE_BYTES) for _ in range(2)]
    writes: list[Future[None]] = []
    syncs: list[Future[None]] = []

    def write(index: int, size: int, checksum: int) -> None:
        with (
            _target_errors(job.partial),
            memoryview(buffers[index % 2]) as whole,
            whole[:size] as view,
        ):
            target.write_all(view, _bytes_before(job, index))
        syncs.append(syncer.submit(sync, index, size, checksum))

    def sync(index: int, size: int, checksum: int) -> None:
        if index != len(journal.checksums):
            return  # an earlier segment failed; its future carries the error
        with _target_errors(job.partial):
            os.fdatasync(target.fd)
            if not target.direct:
                target.drop(_bytes_before(job, index), size)
            journal.append(checksum)
        meter.update(_bytes_before(job, index + 1))

    with (
        ThreadPoolExecutor(max_workers=1) as syncer,
        ThreadPoolExecutor(max_workers=1) as writer,
    ):
        try:
            if first < count:
                reader.begin(first)
            for index in range(first, count):
                weights, scales, rows = reader.finish(index)
                if index + 1 < count:
                    reader.begin(index + 1)
                if len(writes) >= 2:
                    writes[-2].result()  # its buffer is needed again
                for done in [future for future in syncs if future.done()]:
                    done.result()
                with memoryview(buffers[index % 2]) as view:
                    checksum = core.se_pack_pages(
                        weights,
                        scales,
                        rows,
                        index * segment_pages,
                        job.identity.file_id,
                        0,
                        ctypes.addressof(ctypes.c_char.from_buffer(view)),
                    )
                size = geometry.page_count(rows) * geometry.PAGE_BYTES
                writes.append(writer.submit(write, index, size, checksum))
            for future in writes:
                future.result()
            for future in syncs:
                future.result()
        except BaseException:
            # A later segment must not be journalled when an earlier one failed.
            for future in [*writes, *syncs]:
                future.cancel()
            raise


class _Reader:
    """Reads one segment's weights and scales with several reads in flight."""

    def __init__(self, job: Job, readers: int, report: Reporter) -> None:
        self._job = job
        self._report = report
        self._pool = ThreadPoolExecutor(max_workers=max(1, readers))
        self._files: dict[Path, DirectFile] = {}
        widths = (geometry.WEIGHT_BYTES, geometry.SCALE_BYTES)
        # Two sets: the next segment is read while this one is packed.
        self._buffers = [
            [aligned_buffer(job.identity.segment_rows * width + 2 * ALIGNMENT) for width in widths]
            for _ in range(2)
        ]
        self._pending: list[tuple[TensorPlace, int, Future[int]]] = []

    def __enter__(self) -> _Reader:
        for place in (self._job.source.weight, self._job.source.scale):
            if place.path not in self._files:
                with _source_errors(place.path):
                    self._files[place.path] = DirectFile.open(place.path, os.O_RDONLY)
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for file in self._files.values():
            file.close()

    def begin(self, segment: int) -> None:
        """Start reading ``segment``."""
        first, rows = _segment_rows(self._job.identity, segment)
        source = self._job.source
        for place, buffer, width in (
            (source.weight, self._buffers[segment % 2][0], geometry.WEIGHT_BYTES),
            (source.scale, self._buffers[segment % 2][1], geometry.SCALE_BYTES),
        ):
            start = place.offset + first * width
            skip = start % ALIGNMENT
            size = -(-(skip + rows * width) // ALIGNMENT) * ALIGNMENT
            for at in range(0, size, READ_BYTES):
                piece = min(READ_BYTES, size - at)
                needed = min(piece, skip + rows * width - at)
                offset = start - skip + at
                future = self._pool.submit(self._read, place.path, buffer, at, piece, offset)
                self._pending.append((place, needed, future))

    def _read(self, path: Path, buffer: object, at: int, piece: int, offset: int) -> int:
        with memoryview(buffer) as view, view[at : at + piece] as part:  # type: ignore[arg-type]
            return self._files[path].read_into(part, offset)

    def finish(self, segment: int) -> tuple[int, int, int]:
        """Wait for ``segment``; the addresses of its weights and scales, and its row count."""
        for place, needed, future in self._pending:
            self._wait(place, future)
            with _source_errors(place.path):
                got = future.result()
            if got < needed:
                raise SourceError(
                    f"{place.path}: ended inside {place.name}: the shard is truncated"
                )
        self._pending.clear()
        first, rows = _segment_rows(self._job.identity, segment)
        source = self._job.source
        weights = _address(self._buffers[segment % 2][0]) + (
            (source.weight.offset + first * geometry.WEIGHT_BYTES) % ALIGNMENT
        )
        scales = _address(self._buffers[segment % 2][1]) + (
            (source.scale.offset + first * geometry.SCALE_BYTES) % ALIGNMENT
        )
        return weights, scales, rows

    def _wait(self, place: TensorPlace, future: Future[int]) -> None:
        waited = 0.0
        while not wait_for([future], timeout=STALL_S).done:
            waited += STALL_S
            self._report.emit("stalled", what=str(place.path), seconds=waited)


def _segment_rows(identity: Identity, segment: int) -> tuple[int, int]:
    """First global row and number of rows of a segment."""
    first = identity.row_start + segment * identity.segment_rows
    return first, min(identity.segment_rows, identity.row_end - first)


def _bytes_before(job: Job, segment: int) -> int:
    pages = min(segment * job.identity.segment_pages, job.identity.pages)
    return geometry.HEADER_BYTES + pages * geometry.PAGE_BYTES


def _check_last(job: Job, journal: Journal, target: DirectFile) -> None:
    """Drop the newest journalled segment if its data did not survive."""
    while journal.checksums:
        index = len(journal.checksums) - 1
        try:
            (checksum,) = _scan_segments(target, job.identity, range(index, index + 1), job.partial)
        except MismatchError:
            checksum = -1
        if checksum == journal.checksums[-1]:
            return
        journal.forget_last()


def _scan(path: Path, identity: Identity, report: Reporter | None = None) -> list[int]:
    """Check every page; the segments' checksums."""
    with _target_errors(path):
        file = DirectFile.open(path, os.O_RDONLY)
    meter = Meter(report, path.name, identity.file_bytes, 0) if report is not None else None
    try:
        segments = range(identity.segments)
        return list(_scan_segments(file, identity, segments, path, meter))
    finally:
        file.close()


def _scan_segments(
    file: DirectFile,
    identity: Identity,
    segments: range,
    path: Path,
    meter: Meter | None = None,
) -> Iterator[int]:
    core = native.library()
    buffer = aligned_buffer(min(identity.segment_pages, identity.pages) * geometry.PAGE_BYTES)
    for segment in segments:
        first = segment * identity.segment_pages
        pages = min(identity.segment_pages, identity.pages - first)
        size = pages * geometry.PAGE_BYTES
        offset = geometry.HEADER_BYTES + first * geometry.PAGE_BYTES
        with memoryview(buffer) as whole, whole[:size] as view, _target_errors(path):
            got = file.read_into(view, offset)
        if got < size:
            raise MismatchError(f"{path}: ended inside segment {segment}: truncated")
        checksum, bad = ctypes.c_uint32(0), ctypes.c_uint64(0)
        status = core.se_check_pages(
            _address(buffer),
            pages,
            first,
            identity.file_id,
            ctypes.byref(checksum),
            ctypes.byref(bad),
        )
        if status != native.OK:
            raise MismatchError(
                f"{path}: page {bad.value} failed its check (checksum, page number or file id); "
                "the drive or a copy damaged it, pack again with --restart"
            )
        if meter is not None:
            meter.update(offset + size)
        yield checksum.value


def _compare(path: Path, identity: Identity, source: Source, rows: Sequence[int]) -> int:
    """Compare packed rows with the checkpoint's; the number compared."""
    parts = (
        (source.weight, 0, geometry.WEIGHT_BYTES),
        (source.scale, geometry.WEIGHT_BYTES, geometry.SCALE_BYTES),
    )
    with path.open("rb", buffering=0) as file:
        for place, at, width in parts:
            with _source_errors(place.path), place.path.open("rb", buffering=0) as shard:
                for row in rows:
                    page, slot = divmod(row - identity.row_start, geometry.ROWS_PER_PAGE)
                    here = (
                        geometry.HEADER_BYTES
                        + page * geometry.PAGE_BYTES
                        + slot * geometry.ROW_BYTES
                        + at
                    )
                    ours = os.pread(file.fileno(), width, here)
                    theirs = os.pread(shard.fileno(), width, place.offset + row * width)
                    if ours != theirs:
                        raise MismatchError(
                            f"{path}: row {row} differs from {place.name} in {place.path}; "
                            "pack again with --restart"
                        )
                for descriptor in (file.fileno(), shard.fileno()):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return len(rows)


def _reserve(fd: int, size: int, *, preallocate: bool) -> None:
    if os.fstat(fd).st_size > size:
        os.ftruncate(fd, size)
    if preallocate and size > 0:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        # os.posix_fallocate would write every block where the file system cannot reserve.
        while libc.fallocate(fd, 0, 0, size) != 0:
            code = ctypes.get_errno()
            if code in (errno.EOPNOTSUPP, errno.ENOSYS):
                break
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
    os.ftruncate(fd, size)


def _address(buffer: object) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))  # type: ignore[arg-type]


def _file_event(report: Reporter, job: Job, state: str, done: int) -> None:
    report.emit(
        "file",
        file=job.path.name,
        layer=job.identity.layer,
        state=state,
        done_bytes=done,
        bytes=job.identity.file_bytes,
    )


@contextmanager
def _source_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SourceError(
            f"{path}: {error.strerror}; check the file or the NFS server, then run the same "
            "command again: what is packed is kept"
        ) from error


@contextmanager
def _target_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        again = "then run the same command again: what is packed is kept"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SpaceError(f"{path}: {error.strerror}; make room, {again}") from error
        raise TargetError(f"{path}: {error.strerror}; check the drive, {again}") from error
