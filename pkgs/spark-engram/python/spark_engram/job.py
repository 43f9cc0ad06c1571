"""Gathers with fixed arguments, for the host functions of CUDA streams."""

from __future__ import annotations

import ctypes
import functools
from enum import Enum

from spark_engram import native
from spark_engram.errors import EngramError
from spark_engram.store import RowStore


class Queue:
    """A native thread that does started jobs one after the other.

    Raises:
        EngramError: no thread could be started.

    """

    def __init__(self) -> None:
        self._core = native.library()
        self.address: int = self._core.se_queue_new() or 0
        if not self.address:
            raise EngramError("cannot start the thread that reads rows")

    def close(self) -> None:
        """End the thread; no job of it may be started or waited for any more."""
        self._core.se_queue_free(self.address)
        self.address = 0


class Job:
    """One gather: ``count`` ids at ``ids`` to ``weights`` [count, 256] and ``scales`` [count, 8].

    The three addresses are host memory that must outlive the job, as must ``store`` and ``queue``
    (needed to `start` it). A CUDA
    graph holds on to the job: keep it for as long as the graph may be replayed.
    """

    def __init__(
        self,
        store: RowStore,
        ids: int,
        count: int,
        weights: int,
        scales: int,
        *,
        queue: Queue | None = None,
        abort_on_error: bool = True,
    ) -> None:
        self._core = native.library()
        self.address: int = self._core.se_job_new(
            store.handle,
            queue.address if queue is not None else None,
            ids,
            count,
            weights,
            scales,
            int(abort_on_error),
        )
        if not self.address:
            raise EngramError("not enough memory for a read job")

    def run(self) -> None:
        """Read now, on this thread."""
        self._core.se_job_run(self.address)

    def start(self) -> None:
        """Hand the read to the job's queue."""
        self._core.se_job_start(self.address)

    def wait(self) -> None:
        """Wait until every started read is done."""
        self._core.se_job_wait(self.address)

    @property
    def failed(self) -> bool:
        """Whether any run failed (only of use without ``abort_on_error``)."""
        return bool(self._core.se_job_status(self.address) != native.OK)

    def free(self) -> None:
        """Release the job; nothing may run it any more."""
        self._core.se_job_free(self.address)
        self.address = 0


class Step(Enum):
    """What a stream's host function does with a job; the value is the native callback's name."""

    RUN = "se_job_run"
    START = "se_job_start"
    WAIT = "se_job_wait"


@functools.cache
def callback_address(step: Step) -> int:
    """Return the address of a native callback, ``void (*)(void *job)``."""
    address = ctypes.cast(getattr(native.library(), step.value), ctypes.c_void_p).value
    if not address:
        raise EngramError(f"the native core has no {step.value}")
    return address


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise EngramError(f"cannot load the CUDA driver: {error}") from error
    driver.cuLaunchHostFunc.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    driver.cuLaunchHostFunc.restype = ctypes.c_int
    return driver


def launch(stream: int, job: Job, step: Step) -> None:
    """Enqueue a step of ``job`` on a CUDA stream handle; also while the stream is being captured.

    Raises:
        EngramError: the driver refused.

    """
    status = _driver().cuLaunchHostFunc(stream, callback_address(step), job.address)
    if status != 0:
        raise EngramError(f"cuLaunchHostFunc failed with CUDA error {status}")
