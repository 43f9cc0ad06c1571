"""Reading rows from a packed file."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from spark_engram import format as packed
from spark_engram import layout as geometry
from spark_engram import native
from spark_engram.errors import MismatchError, ReadError, UsageError
from spark_engram.format import Identity

Bytes = NDArray[np.uint8]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class StoreOptions:
    """How to read. The defaults suit one NVMe drive.

    Attributes:
        backend: ``auto``, ``io_uring`` or ``pread``.
        depth: reads in flight (io_uring), 1 to 4096.
        threads: reader threads (pread), 1 to 1024; 96 is what the published store uses.
        max_ids: ids planned at once; more are read in pieces. Costs 40 bytes each.
        max_run_pages: longest read of neighbouring pages, in 4 KiB pages, 1 to 64.
        sqpoll: let a kernel thread poll the submission queue (costs a busy core).
        cache_bytes: size of the row cache, 0 for none: prose hardly repeats rows.
        cache_ways: associativity of the row cache, 1 to 16.
        direct: read with O_DIRECT. Without it the page cache grows into GPU memory on a Spark.

    """

    backend: str = "auto"
    depth: int = 128
    threads: int = 96
    max_ids: int = 65536
    max_run_pages: int = 8
    sqpoll: bool = False
    cache_bytes: int = 0
    cache_ways: int = 16
    direct: bool = True

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> StoreOptions:
        """Return the options that the ``SPARK_ENGRAM_*`` variables ask for.

        Raises:
            UsageError: a variable is not a number or not one of the allowed words.

        """
        backend = environment.get("SPARK_ENGRAM_BACKEND", "") or cls.backend
        if backend not in native.BACKENDS:
            raise UsageError(
                f"SPARK_ENGRAM_BACKEND={backend}: must be one of {', '.join(native.BACKENDS)}"
            )
        return cls(
            backend=backend,
            depth=environment_number(environment, "SPARK_ENGRAM_DEPTH", cls.depth),
            threads=environment_number(environment, "SPARK_ENGRAM_THREADS", cls.threads),
            sqpoll=environment_number(environment, "SPARK_ENGRAM_SQPOLL", 0) != 0,
            cache_bytes=environment_number(environment, "SPARK_ENGRAM_CACHE_BYTES", 0),
        )


def environment_number(environment: Mapping[str, str], name: str, default: int) -> int:
    """Return the non-negative number in variable ``name``, or ``default`` when unset or empty.

    Raises:
        UsageError: it is not such a number.

    """
    text = environment.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"{name}={text}: must be a whole number, 0 or more")
    return int(text)


@dataclass(frozen=True)
class StoreStats:
    """Counters since opening; histogram entry ``i`` counts durations below ``2**i`` us."""

    batches: int
    lookups: int
    owned: int
    cache_hits: int
    pages: int
    reads: int
    read_bytes: int
    errors: int
    batch_us_sum: int
    read_us_sum: int
    batch_us: tuple[int, ...]
    read_us: tuple[int, ...]


class RowStore:
    """One packed file, open for gathers. Use as a context manager, or call `close`.

    Raises:
        MismatchError: the file is missing, damaged, or its file system refuses O_DIRECT.
        UsageError: an option is out of range, or the asked-for backend is not available.

    """

    def __init__(self, path: Path, options: StoreOptions | None = None) -> None:
        self.path = path
        self.options = options if options is not None else StoreOptions()
        self.identity: Identity = packed.read_identity(path)
        self._core = native.library()
        self._handle = ctypes.c_void_p()
        fd = _open(path, self.options.direct)
        try:
            self._open_handle(fd)
        finally:
            os.close(fd)

    def _open_handle(self, fd: int) -> None:
        options = self.options
        if options.backend not in native.BACKENDS:
            raise UsageError(f"backend {options.backend!r}: must be one of auto, io_uring, pread")
        numbers = native.Options(
            fd=fd,
            backend=native.BACKENDS[options.backend],
            depth=options.depth,
            threads=options.threads,
            max_run_pages=options.max_run_pages,
            sqpoll=int(options.sqpoll),
            cache_ways=options.cache_ways,
            file_id=self.identity.file_id,
            row_start=self.identity.row_start,
            row_end=self.identity.row_end,
            max_ids=options.max_ids,
            cache_bytes=options.cache_bytes,
        )
        message = ctypes.create_string_buffer(native.MESSAGE_BYTES)
        status = self._core.se_store_open(
            ctypes.byref(numbers), ctypes.byref(self._handle), message, native.MESSAGE_BYTES
        )
        if status != native.OK:
            raise UsageError(f"{self.path}: cannot open the row store: {message.value.decode()}")

    @property
    def handle(self) -> int:
        """The native ``se_store *``, for jobs (`spark_engram.job`).

        Raises:
            ValueError: the store is closed.

        """
        if not self._handle.value:
            raise ValueError("the row store is closed")
        return self._handle.value

    @property
    def backend(self) -> str:
        """The backend in use, ``io_uring`` or ``pread``."""
        name: bytes = self._core.se_store_backend(self.handle)
        return name.decode()

    @property
    def note(self) -> str:
        """Why the backend is not the best one, or empty."""
        text: bytes = self._core.se_store_note(self.handle)
        return text.decode()

    def gather(
        self, ids: Ids, weights: Bytes | None = None, scales: Bytes | None = None
    ) -> tuple[Bytes, Bytes]:
        """Rows of ``ids`` [n] as weights [n, 256] and scales [n, 8], both uint8.

        Positions whose id is not in this file stay as they are (zero in new arrays).

        Raises:
            ReadError: a page could not be read or failed its checksum. Nothing is returned.

        """
        ids = np.ascontiguousarray(ids, dtype=np.int64)
        if ids.ndim != 1:
            raise ValueError(f"ids must have one dimension, not {ids.ndim}")
        count = len(ids)
        if weights is None:
            weights = np.zeros((count, geometry.WEIGHT_BYTES), np.uint8)
        if scales is None:
            scales = np.zeros((count, geometry.SCALE_BYTES), np.uint8)
        for array, width in ((weights, geometry.WEIGHT_BYTES), (scales, geometry.SCALE_BYTES)):
            if array.shape != (count, width) or array.dtype != np.uint8:
                raise ValueError(f"need a uint8 array of shape ({count}, {width})")
            if not array.flags.c_contiguous or not array.flags.writeable:
                raise ValueError("the output arrays must be contiguous and writable")
        message = ctypes.create_string_buffer(native.MESSAGE_BYTES)
        status = self._core.se_store_gather(
            self.handle,
            ids.ctypes.data,
            count,
            weights.ctypes.data,
            scales.ctypes.data,
            message,
            native.MESSAGE_BYTES,
        )
        if status != native.OK:
            raise ReadError(
                f"{self.path}: {message.value.decode()}; check the drive, then pack again"
            )
        return weights, scales

    def stats(self) -> StoreStats:
        """Return the counters since opening."""
        raw = native.Stats()
        self._core.se_store_stats(self.handle, ctypes.byref(raw))
        return StoreStats(
            batches=raw.batches,
            lookups=raw.lookups,
            owned=raw.owned,
            cache_hits=raw.cache_hits,
            pages=raw.pages,
            reads=raw.reads,
            read_bytes=raw.read_bytes,
            errors=raw.errors,
            batch_us_sum=raw.batch_us_sum,
            read_us_sum=raw.read_us_sum,
            batch_us=tuple(raw.batch_us),
            read_us=tuple(raw.read_us),
        )

    def close(self) -> None:
        """Release the file, the ring and the threads. No gather may be running."""
        if self._handle.value:
            self._core.se_store_close(self._handle)
            self._handle = ctypes.c_void_p()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _open(path: Path, direct: bool) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    except OSError as error:
        advice = (
            "its file system refuses O_DIRECT; keep packed files on a local ext4 or xfs"
            if direct
            else "check the path and its permissions"
        )
        raise MismatchError(f"{path}: {error.strerror}: {advice}") from error
