"""How fast rows come from a packed file, beside fio on the same file."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np

from spark_engram import layout as geometry
from spark_engram.errors import EngramError, UsageError
from spark_engram.store import RowStore, StoreOptions

#: 2 tokens of one layer, the decode steps of 1, 4 and 8 streams (6 verify tokens x 24), and
#: prefill chunks up to 2048 tokens x 24.
BATCHES = (48, 144, 576, 1152, 4608, 49152)
_FIO_TIMEOUT_S = 120


@dataclass(frozen=True)
class BatchResult:
    """One batch size: gathers of random rows. A run of neighbouring pages counts as its pages."""

    ids: int
    gathers: int
    pages_per_second: float
    p50_us: float
    p99_us: float


@dataclass(frozen=True)
class BenchResult:
    """All batch sizes, and fio's 4 KiB random reads of the same file where fio is installed."""

    file: str
    backend: str
    depth: int
    note: str
    batches: tuple[BatchResult, ...]
    fio_iops: float | None
    fio_depth: int | None


def run(
    path: Path,
    options: StoreOptions,
    *,
    batches: Sequence[int] = BATCHES,
    seconds: float = 3.0,
    seed: int = 0,
    with_fio: bool = True,
) -> BenchResult:
    """Measure gathers of each batch size for ``seconds``.

    Raises:
        UsageError: the file holds no rows.
        MismatchError, ReadError: from the row store.

    """
    options = replace(options, max_ids=max(*batches, options.max_ids))
    generator = np.random.default_rng(seed)
    with RowStore(path, options) as store:
        if store.identity.rows.rows == 0:
            raise UsageError(f"{path}: this rank owns no rows, there is nothing to measure")
        results = tuple(measure(store, ids, seconds, generator) for ids in batches)
        backend, note = store.backend, store.note
    depth = options.depth if backend == "io_uring" else options.threads
    iops = fio_randread(path, depth, seconds) if with_fio else None
    return BenchResult(
        str(path), backend, depth, note, results, iops, depth if iops is not None else None
    )


def measure(
    store: RowStore, ids: int, seconds: float, generator: np.random.Generator
) -> BatchResult:
    """Gather random rows, ``ids`` at a time, for about ``seconds``."""
    owned = store.identity.rows
    weights = np.empty((ids, geometry.WEIGHT_BYTES), np.uint8)
    scales = np.empty((ids, geometry.SCALE_BYTES), np.uint8)
    store.gather(generator.integers(owned.start, owned.end, ids), weights, scales)
    before = store.stats().pages
    durations: list[float] = []
    while sum(durations) < seconds:
        wanted = generator.integers(owned.start, owned.end, ids)
        start = perf_counter()
        store.gather(wanted, weights, scales)
        durations.append(perf_counter() - start)
    pages = store.stats().pages - before
    p50, p99 = np.percentile(durations, (50, 99)) * 1e6
    return BatchResult(
        ids, len(durations), pages / sum(durations), round(float(p50), 1), round(float(p99), 1)
    )


def fio_randread(
    path: Path, depth: int, seconds: float, *, engine: str = "io_uring", jobs: int = 1
) -> float | None:
    """Fio's 4 KiB O_DIRECT random-read IOPS on ``path``; None where fio is not installed.

    Raises:
        EngramError: fio failed.

    """
    fio = shutil.which("fio")
    if fio is None:
        return None
    argv = [
        fio, "--name=randread", f"--filename={path}", "--readonly", "--rw=randread", "--bs=4k",
        "--direct=1", f"--ioengine={engine}", f"--iodepth={depth}", f"--numjobs={jobs}",
        "--thread", "--group_reporting", "--time_based", f"--runtime={seconds:g}",
        "--norandommap", "--randrepeat=0", "--output-format=json",
    ]  # fmt: skip
    if engine == "io_uring":
        argv += ["--registerfiles=1", "--fixedbufs=1"]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, check=True, timeout=_FIO_TIMEOUT_S + seconds
        )
    except subprocess.CalledProcessError as error:
        raise EngramError(f"fio failed: {error.stderr.strip()[-300:]}") from error
    except subprocess.TimeoutExpired as error:
        raise EngramError("fio did not end in time") from error
    report = json.loads(done.stdout[done.stdout.index("{") :])
    iops: float = report["jobs"][0]["read"]["iops"]
    return iops


def text(result: BenchResult) -> str:
    """Return the result as a table."""
    lines = [f"{result.file}: {result.backend}, depth {result.depth}"]
    if result.note:
        lines.append(f"note: {result.note}")
    lines.append(f"{'ids':>7} {'gathers':>8} {'4k/s':>10} {'p50 us':>10} {'p99 us':>10}")
    for row in result.batches:
        lines.append(
            f"{row.ids:7} {row.gathers:8} {row.pages_per_second:10.0f} "
            f"{row.p50_us:10.1f} {row.p99_us:10.1f}"
        )
    if result.fio_iops is None:
        lines.append("fio is not installed or was not asked for: nothing to compare with")
    else:
        best = max(row.pages_per_second for row in result.batches)
        lines.append(
            f"fio randread 4k, depth {result.fio_depth}: {result.fio_iops:.0f} IOPS; "
            f"best batch size reaches {best / result.fio_iops:.2f} of it"
        )
    return "\n".join(lines)
