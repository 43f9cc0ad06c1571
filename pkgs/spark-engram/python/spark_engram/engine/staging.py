"""From ids on the GPU to staged rows in pinned memory, as work on a CUDA stream."""

from __future__ import annotations

from collections.abc import Callable

import torch

from spark_engram import layout as geometry
from spark_engram.engine.kernels import publish_ids
from spark_engram.job import Job, Queue, Step, launch
from spark_engram.store import RowStore

Gather = Callable[..., torch.Tensor]


class Staging:
    """Pinned buffers for up to ``capacity`` ids of one layer, allocated once.

    The buffers are used again by every lookup, so lookups of a layer must be ordered on the
    device: they run on one stream, or on streams joined by events.
    """

    def __init__(self, store: RowStore, capacity: int, device: torch.device, queue: Queue) -> None:
        self.store = store
        self._queue = queue
        self.capacity = capacity

        def pinned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device="cpu", pin_memory=True)

        self.ids = pinned(capacity, dtype=torch.int64)
        self.weights = pinned(capacity, geometry.WEIGHT_BYTES, dtype=torch.uint8)
        self.scales = pinned(capacity, geometry.SCALE_BYTES, dtype=torch.uint8)
        self.slots = torch.empty(capacity, dtype=torch.int32, device=device)
        self._jobs: dict[int, Job] = {}

    @property
    def nbytes(self) -> int:
        """Pinned bytes."""
        return int(self.ids.nbytes + self.weights.nbytes + self.scales.nbytes)

    def read(self, ids: torch.Tensor) -> None:
        """Enqueue the read of ``ids`` [T, C] (T * C <= capacity) on the current stream."""
        launch(_stream(), self._publish(ids), Step.RUN)

    def start(self, ids: torch.Tensor) -> Job:
        """Enqueue the start of a read that `wait` on the returned job completes."""
        job = self._publish(ids)
        launch(_stream(), job, Step.START)
        return job

    def wait(self, job: Job) -> None:
        """Enqueue the wait for a started read on the current stream."""
        launch(_stream(), job, Step.WAIT)

    def _publish(self, ids: torch.Tensor) -> Job:
        count = ids.numel()
        owned = self.store.identity.rows
        publish_ids(ids, owned.start, owned.end, self.ids, self.slots)
        job = self._jobs.get(count)
        if job is None:
            # Never freed: a captured graph may run it for as long as the process lives.
            job = Job(
                self.store,
                self.ids.data_ptr(),
                count,
                self.weights.data_ptr(),
                self.scales.data_ptr(),
                queue=self._queue,
            )
            self._jobs[count] = job
        return job

    def dequantise(self, count: int, out: torch.Tensor, gather: Gather) -> None:
        """Enqueue the dequantisation of the staged rows into ``out`` [count, 256] bf16.

        ``gather`` is the engine's ``engram_gather``; rows of other ranks come out as zeros.
        """
        gather(
            self.weights.data_ptr(),
            self.scales.data_ptr(),
            self.slots[:count],
            out,
            geometry.WEIGHT_BYTES,
            geometry.SCALE_BLOCK,
            row_lo=0,
            row_hi=count,
        )


def _stream() -> int:
    handle: int = torch.cuda.current_stream().cuda_stream
    return handle
