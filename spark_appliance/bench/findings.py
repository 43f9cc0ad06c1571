"""What a reader must know before believing the numbers."""

from __future__ import annotations

from collections.abc import Sequence

from spark_appliance.bench.result import Group, LoadReading, Mode


def findings(
    groups: Sequence[Group],
    loads: Sequence[LoadReading],
    *,
    mode: Mode,
    max_tokens: int,
) -> list[str]:
    """Return one sentence for each doubt that the samples themselves raise."""
    samples = [s for g in groups for r in g.rounds for s in r.samples]
    good = [s for s in samples if s.status == "ok"]
    found = []
    if len(good) < len(samples):
        kinds = sorted({s.failure.kind for s in samples if s.failure})
        failed = len(samples) - len(good)
        found.append(f"{failed} of {len(samples)} requests failed: {', '.join(kinds)}")
    if any(s.cached_tokens is None for s in good):
        found.append(
            "the endpoint does not report cached_tokens, so it is not proved that no prefix "
            "cache helped (SGLang: --enable-cache-report)"
        )
    short = sum(
        s.finish_reason == "stop" and (s.completion_tokens or 0) < max_tokens // 4 for s in good
    )
    if short and mode in ("speed", "sweep"):
        found.append(f"{short} answers ended before a quarter of max_tokens")
    found += _strangers(groups, loads)
    lost = sum(s.needle is not None and not s.needle.found for s in good)
    if lost:
        found.append(f"{lost} of {sum(s.needle is not None for s in good)} needles were not found")
    return found


def _strangers(groups: Sequence[Group], loads: Sequence[LoadReading]) -> list[str]:
    """Compare each load reading with the number of requests that were ours at that moment."""
    rounds = [(r.started_s, r.ended_s, g.concurrency) for g in groups for r in g.rounds]
    for reading in loads:
        ours = next((c for start, end, c in rounds if start <= reading.t <= end), None)
        seen = reading.running + reading.waiting
        if ours is not None and seen > ours:
            return [f"the engine had {seen} requests while {ours} were ours: others used it"]
    return []
