"""Engram row store and packer, as ratios against fio on the same file in the same run.

    python benchmarks/engram.py [--folder DIR] [--rounds N] [--seconds S] [--json]

Needs the ``spark-engram`` package and fio. ``--folder`` must be on the drive to be measured (at
least 6 GiB free with the defaults). Every figure is the median over interleaved rounds, so the
ratios hold on a loaded machine. References:

- row store: fio randread, 4 KiB, O_DIRECT, io_uring with registered file and buffers, same depth
  and same file; and the package's own pread pool with as many threads as reads in flight, which
  is how the published store reads (96 threads);
- packer: fio reading the source and writing a file of the packed size at the same time, 4 MiB
  blocks, O_DIRECT, both on the same drive as the packer's files.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from spark_engram import bench, fake, pack, receipt
from spark_engram.store import RowStore, StoreOptions

DEPTHS = (64, 96, 128)
POOL_THREADS = 96
#: A prefill chunk of 2048 tokens x 24 columns: long enough that ramp-up does not count.
LARGE_BATCH = 49152
#: The decode steps of 1, 4 and 8 streams.
DECODE_BATCHES = (144, 576, 1152)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rows-per-column", type=int, default=250_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if shutil.which("fio") is None:
        raise SystemExit("benchmarks/engram.py: fio is the reference and is not installed")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        work = Path(name)
        packed, packing = measure_packing(work, arguments.rows_per_column, arguments.rounds)
        reading = measure_reading(packed, arguments.rounds, arguments.seconds)
        decode = measure_decode(packed, arguments.rounds, arguments.seconds)
    result = {"packing": packing, "reading": reading, "decode": decode}
    print(json.dumps(result, indent=1) if arguments.json else table(result))


def measure_reading(packed: Path, rounds: int, seconds: float) -> list[dict[str, float]]:
    """IOPS of large gathers beside fio and beside the pread pool."""
    rows = []
    for depth in DEPTHS:
        samples: dict[str, list[float]] = {"fio": [], "io_uring": [], "pread": []}
        for number in range(rounds):
            samples["fio"].append(bench.fio_randread(packed, depth, seconds) or 0)
            for backend in ("io_uring", "pread"):
                # One page a read, as fio does it: no gain from neighbouring pages.
                options = StoreOptions(
                    backend=backend,
                    depth=depth,
                    threads=depth,
                    max_ids=LARGE_BATCH,
                    max_run_pages=1,
                )
                with RowStore(packed, options) as store:
                    generator = np.random.default_rng(number)
                    found = bench.measure(store, LARGE_BATCH, seconds, generator)
                samples[backend].append(found.pages_per_second)
        medians = {key: statistics.median(values) for key, values in samples.items()}
        rows.append(
            {
                "depth": depth,
                **{f"{key}_iops": round(value) for key, value in medians.items()},
                "over_fio": round(medians["io_uring"] / medians["fio"], 3),
                "over_pread_pool": round(medians["io_uring"] / medians["pread"], 3),
            }
        )
    return rows


def measure_decode(packed: Path, rounds: int, seconds: float) -> list[dict[str, float]]:
    """Latency of decode-sized gathers: io_uring beside the 96-thread pread pool."""
    rows = []
    for ids in DECODE_BATCHES:
        samples: dict[str, list[bench.BatchResult]] = {"io_uring": [], "pread": []}
        for number in range(rounds):
            for backend, results in samples.items():
                options = StoreOptions(backend=backend, threads=POOL_THREADS)
                with RowStore(packed, options) as store:
                    generator = np.random.default_rng(number)
                    results.append(bench.measure(store, ids, seconds / 4, generator))
        row: dict[str, float] = {"ids": ids}
        for backend, results in samples.items():
            row[f"{backend}_p50_us"] = round(statistics.median(one.p50_us for one in results))
            row[f"{backend}_p99_us"] = round(statistics.median(one.p99_us for one in results))
        row["pread_over_io_uring_p50"] = round(row["pread_p50_us"] / row["io_uring_p50_us"], 3)
        rows.append(row)
    return rows


def measure_packing(work: Path, rows_per_column: int, rounds: int) -> tuple[Path, dict[str, float]]:
    """Time of packing one whole table beside fio moving the same bytes."""
    checkpoint, output = work / "checkpoint", work / "packed"
    output.mkdir()
    fake.write_checkpoint(checkpoint, fake.FakeSpec(rows_per_column=rows_per_column, layers=(1,)))
    options = pack.PackOptions(checkpoint=checkpoint, output=output, tp=1, rank=0)
    (job,) = pack.jobs(options)
    scratch = work / "scratch"
    times: dict[str, list[float]] = {"fio": [], "pack": []}
    for _ in range(rounds):
        times["fio"].append(timed(lambda: fio_copy(job.source.weight.path, scratch, job)))
        scratch.unlink()
        for leftover in (job.path, receipt.path_for(job.path)):
            leftover.unlink(missing_ok=True)
        times["pack"].append(timed(lambda: pack.pack(options)))
    medians = {key: statistics.median(values) for key, values in times.items()}
    size = job.identity.file_bytes
    return job.path, {
        "bytes": size,
        "fio_mib_per_s": round(size / medians["fio"] / 2**20),
        "pack_mib_per_s": round(size / medians["pack"] / 2**20),
        "over_fio": round(medians["fio"] / medians["pack"], 3),
    }


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def fio_copy(source: Path, target: Path, job: pack.Job) -> None:
    """Read the source's tables and write the packed size at the same time, as the packer does."""
    read_bytes = job.source.weight.size + job.source.scale.size
    shared = ["--bs=4M", "--direct=1", "--ioengine=io_uring", "--iodepth=4", "--thread"]
    subprocess.run(
        [
            "fio", *shared, "--fallocate=native",
            "--name=read", f"--filename={source}", "--rw=read",
            f"--size={read_bytes // 4194304 * 4194304}",
            "--name=write", f"--filename={target}", "--rw=write", "--end_fsync=1",
            f"--size={-(-job.identity.file_bytes // 4194304) * 4194304}",
        ],
        check=True, capture_output=True,
    )  # fmt: skip


def table(result: dict[str, object]) -> str:
    """Return the figures as text."""
    lines = []
    for name, rows in result.items():
        lines.append(name)
        for row in rows if isinstance(rows, list) else [rows]:
            lines.append("  " + "  ".join(f"{key} {value}" for key, value in row.items()))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
