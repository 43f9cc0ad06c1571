"""Starts the reads of a forward as soon as its hash ids are known.

The engine hashes all tokens before its first layer. The reads then run on a side stream while
the layers before each lookup compute. In a CUDA graph the side stream is captured as a branch.

SGLang's hooks are plain functions, so the process's one prefetcher is a module variable.
"""

from __future__ import annotations

import functools
import logging
import sys
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.runner_backend_utils import breakable_cuda_graph as breakable

from spark_engram.engine.staging import Staging
from spark_engram.job import Job, Queue

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Pending:
    """A read that was started. Holding ``ids`` keeps their memory from being used again."""

    ids: torch.Tensor
    started: torch.cuda.Event
    staging: Staging
    job: Job
    capture: bool

    def join(self) -> None:
        torch.cuda.current_stream().wait_event(self.started)
        self.staging.wait(self.job)

    def is_for(self, staging: Staging, ids: torch.Tensor, capture: bool) -> bool:
        return (
            self.staging is staging
            and self.capture == capture
            and self.ids.data_ptr() == ids.data_ptr()
            and self.ids.shape == ids.shape
            and self.ids.stride() == ids.stride()
        )


class Prefetcher:
    """One for each process: the stagings by hash index, and what was started for them."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._stagings: dict[int, Staging] = {}
        self._pending: dict[int, _Pending] = {}
        self._enabled = True

    def add(self, hash_index: int, staging: Staging) -> None:
        """Read into ``staging`` from now on; ``hash_index`` is its layer's place in the ids."""
        self._stagings[hash_index] = staging

    def start(self, hash_ids: torch.Tensor) -> None:
        """Start the reads of ``hash_ids`` [T, layers, columns], the first needed layer first."""
        if not self._enabled or not hash_ids.is_cuda or hash_ids.shape[0] == 0:
            return
        capture = torch.cuda.is_current_stream_capturing()
        known = torch.cuda.Event()
        known.record(torch.cuda.current_stream())
        self._stream.wait_event(known)
        for index, staging in sorted(self._stagings.items()):
            ids = hash_ids[:, index]
            if ids.numel() > staging.capacity:
                continue
            with torch.cuda.stream(self._stream):
                job = staging.start(ids)
                started = torch.cuda.Event()
                started.record(self._stream)
            self._pending[index] = _Pending(ids, started, staging, job, capture)

    def join(self, hash_index: int, staging: Staging, ids: torch.Tensor) -> bool:
        """Make the current stream wait for the read of exactly these ``ids``, if one was started.

        False: the caller must read itself; the staging is then free to use.

        Raises:
            RuntimeError: a read outside this capture still has the staging.

        """
        pending = self._pending.pop(hash_index, None)
        if pending is None:
            return False
        capture = torch.cuda.is_current_stream_capturing()
        if pending.is_for(staging, ids, capture):
            pending.join()
            return True
        if pending.capture != capture:
            raise RuntimeError(
                "spark-engram: rows were prefetched outside the CUDA graph being captured (or "
                "the other way round); set SPARK_ENGRAM_PREFETCH=0 and report this"
            )
        pending.join()
        # Prefetching reads nobody uses would cost more than it gains.
        logger.warning("spark-engram: lookups do not use the hash ids as they are: no prefetch")
        self._enabled = False
        return False


def note_hash_index(_result: object, module: Any, *_arguments: object, **_named: object) -> None:
    """AFTER hook of ``Engram.__init__``: tell the embedding its place in the hash ids."""
    join = getattr(module.embed, "join_prefetch", None)
    if join is not None:
        join(module.layer_hash_index)


def start_after_hash(
    hash_ids: torch.Tensor, _hasher: object, *_arguments: object, **_named: object
) -> None:
    """AFTER hook of ``EngramHasher.forward``."""
    # In the breakable graph the lookups use a copy of these ids, and a side stream must not
    # cross a break: `_hash_outside_prefill_graph` decides there.
    if _current is not None and not breakable.is_in_breakable_cuda_graph():
        _current.start(hash_ids)


@functools.cache
def read_queue() -> Queue:
    """Return this process's read thread: the layer that is needed first reads first, alone."""
    return Queue()


_current: Prefetcher | None = None


def prefetcher(device: torch.device) -> Prefetcher:
    """Return this process's prefetcher, made on first use."""
    global _current
    if _current is None:
        _current = Prefetcher(device)
        _hash_outside_prefill_graph(_current)
    return _current


def _hash_outside_prefill_graph(current: Prefetcher) -> None:
    """Prefetch in the engine's breakable prefill graph too.

    There the ids are hashed between two graph segments and copied into the tensor that the
    lookups use, so the reads must start from that copy.
    """
    module: Any = sys.modules.get("sglang.srt.models.deepseek_v4")
    inner = getattr(module, "deepseek_v4_engram_hash_ids", None)
    if module is None or inner is None or not hasattr(module, "bcg_deepseek_v4_engram_hash_ids"):
        return

    def hash_and_start(hasher: object, input_ids: torch.Tensor, out: torch.Tensor) -> None:
        inner(hasher, input_ids, out)
        batch = module.get_tc_piecewise_forward_context().forward_batch
        # Only plain extend looks its rows up between segments, where waiting is possible.
        if batch.forward_mode.is_extend_without_speculative():
            current.start(out)

    module.bcg_deepseek_v4_engram_hash_ids = breakable.eager_on_graph(hash_and_start)
