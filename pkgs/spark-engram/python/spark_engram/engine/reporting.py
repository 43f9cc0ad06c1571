"""Says how the row stores do: a log line now and then, and a metrics file."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path

from spark_engram import metrics
from spark_engram.store import RowStore, StoreStats, environment_number

logger = logging.getLogger(__name__)

METRICS_VARIABLE = "SPARK_ENGRAM_METRICS_FILE"
SECONDS_VARIABLE = "SPARK_ENGRAM_STATS_SECONDS"
_DEFAULT_SECONDS = 60

_watched: list[RowStore] = []


def watch(store: RowStore, environment: Mapping[str, str]) -> None:
    """Report on ``store`` for the rest of the process; 0 seconds turns reporting off."""
    seconds = environment_number(environment, SECONDS_VARIABLE, _DEFAULT_SECONDS)
    file = environment.get(METRICS_VARIABLE, "")
    _watched.append(store)
    if seconds == 0 or len(_watched) > 1:
        return
    threading.Thread(
        target=_loop,
        args=(seconds, Path(file) if file else None),
        name="spark-engram-stats",
        daemon=True,
    ).start()


def _loop(seconds: int, file: Path | None) -> None:
    pause = threading.Event()
    before: dict[Path, StoreStats] = {}
    while True:
        report(before, file)
        pause.wait(seconds)


def report(before: dict[Path, StoreStats], file: Path | None) -> None:
    """Log what changed since ``before`` (updated in place) and rewrite the metrics file."""
    for store in list(_watched):
        now = store.stats()
        then = before.get(store.path)
        before[store.path] = now
        if then is None or now.batches == then.batches:
            continue
        logger.info("Engram layer %d: %s", store.identity.layer, summary(then, now))
    if file is not None:
        try:
            metrics.write_file(file, list(_watched))
        except OSError as error:
            logger.warning("cannot write %s: %s", file, error.strerror)


def summary(then: StoreStats, now: StoreStats) -> str:
    """Return one line on the work between two readings."""
    lookups = now.lookups - then.lookups
    owned = now.owned - then.owned
    hits = now.cache_hits - then.cache_hits
    reads = [after - before for after, before in zip(now.read_us, then.read_us, strict=True)]
    batches = [after - before for after, before in zip(now.batch_us, then.batch_us, strict=True)]
    return (
        f"{now.batches - then.batches} batches, {lookups} lookups, {owned} own rows, "
        f"{100 * hits / owned if owned else 0:.0f} % from the cache, "
        f"{now.reads - then.reads} reads; p50/p99 below "
        f"{metrics.percentile_us(reads, 0.5):g}/{metrics.percentile_us(reads, 0.99):g} us a read, "
        f"{metrics.percentile_us(batches, 0.5):g}/{metrics.percentile_us(batches, 0.99):g} us "
        "a batch"
    )
