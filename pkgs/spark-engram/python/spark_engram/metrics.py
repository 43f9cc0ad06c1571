"""Row-store counters as Prometheus text (exposition format 0.0.4)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

from spark_engram.store import RowStore

_COUNTERS = (
    ("batches", "Gathers served."),
    ("lookups", "Row ids asked for."),
    ("owned", "Row ids that this rank's file holds."),
    ("cache_hits", "Rows served from the row cache."),
    ("pages", "Distinct 4 KiB pages read."),
    ("reads", "Read requests; a run of neighbouring pages is one."),
    ("read_bytes", "Bytes read from the packed file."),
    ("errors", "Gathers that failed."),
)
_HISTOGRAMS = (
    ("batch", "Duration of a gather in seconds."),
    ("read", "Duration of a read request in seconds."),
)


def render(stores: Iterable[RowStore]) -> str:
    """Return the counters of ``stores``, labelled with layer, rank and backend."""
    entries = [
        (
            ",".join(
                (
                    f'layer="{store.identity.layer}"',
                    f'rank="{store.identity.rank}"',
                    f'backend="{store.backend}"',
                )
            ),
            store.stats(),
        )
        for store in stores
    ]
    lines: list[str] = []
    for name, text in _COUNTERS:
        metric = f"spark_engram_{name}_total"
        lines += [f"# HELP {metric} {text}", f"# TYPE {metric} counter"]
        lines += [f"{metric}{{{labels}}} {getattr(stats, name)}" for labels, stats in entries]
    for name, text in _HISTOGRAMS:
        metric = f"spark_engram_{name}_seconds"
        lines += [f"# HELP {metric} {text}", f"# TYPE {metric} histogram"]
        for labels, stats in entries:
            counts: tuple[int, ...] = getattr(stats, f"{name}_us")
            total: int = getattr(stats, f"{name}_us_sum")
            *bounded, everything = accumulate(counts)
            for index, count in enumerate(bounded):
                lines.append(f'{metric}_bucket{{{labels},le="{2**index / 1e6:g}"}} {count}')
            lines.append(f'{metric}_bucket{{{labels},le="+Inf"}} {everything}')
            lines.append(f"{metric}_sum{{{labels}}} {total / 1e6:.6f}")
            lines.append(f"{metric}_count{{{labels}}} {everything}")
    return "\n".join(lines) + "\n"


def write_file(path: Path, stores: Iterable[RowStore]) -> None:
    """Replace ``path`` with the current counters, for a textfile collector.

    Raises:
        OSError: the folder is missing or not writable.

    """
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(render(stores))
    os.replace(temporary, path)  # noqa: PTH105 - one atomic step, as the collector may be reading


def percentile_us(counts: Sequence[int], fraction: float) -> float:
    """Upper bound in microseconds of the histogram bucket that holds the percentile.

    ``inf`` when it lies in the last, unbounded bucket; 0 when nothing was counted.
    """
    total = sum(counts)
    if total == 0:
        return 0.0
    for index, below in enumerate(accumulate(counts)):
        if below >= fraction * total:
            return float(2**index) if index + 1 < len(counts) else float("inf")
    return float("inf")
