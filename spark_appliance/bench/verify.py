"""Check a finished result: recompute every number from its raw timings and token counts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from spark_appliance.bench import metrics
from spark_appliance.bench.result import Group, Result, Round, Sample

# Timings are written with six decimals, so a rate of a short span may differ in the sixth digit.
_RELATIVE = 1e-4
_ABSOLUTE = 2e-6


def verify(result: Result) -> list[str]:
    """Return every number that does not follow from the raw data, and broken protocol rules."""
    return list(_problems(result))


def _problems(result: Result) -> Iterator[str]:
    for group in result.groups:
        name = f"{group.prompt_kind} c{group.concurrency}" + (
            f" {group.target_tokens}" if group.target_tokens else ""
        )
        for number, one in enumerate(group.rounds):
            where = f"{name} round {number}"
            for sample in one.samples:
                yield from _sample(f"{where} stream {sample.stream}", sample, result)
            yield from _round(where, one, group)
        yield from _summary(name, group)
    yield from _nonces(result)
    yield from _prompts(result)


def _sample(where: str, sample: Sample, result: Result) -> Iterator[str]:
    timings = sample.timings
    again = metrics.rates(timings, sample.prompt_tokens, sample.completion_tokens)
    for name in ("ttft_s", "prefill_tok_s", "decode_tok_s"):
        yield from _same(f"{where} {name}", getattr(sample, name), getattr(again, name))
    if sample.chunks != len(timings.chunk_us):
        yield f"{where}: {sample.chunks} chunks, {len(timings.chunk_us)} arrival times"
    if timings.chunk_us:
        first = timings.start + timings.chunk_us[0] / 1e6
        last = timings.start + timings.chunk_us[-1] / 1e6
        yield from _same(f"{where} timings.first", timings.first, first)
        yield from _same(f"{where} timings.last", timings.last, last)
        if sorted(timings.chunk_us) != timings.chunk_us:
            yield f"{where}: arrival times go backwards"
    cached = sample.cached_tokens or 0
    if sample.status == "ok" and cached > result.protocol.allowed_cached_tokens:
        yield f"{where}: {cached} cached tokens in a sample that counts"
    if sample.status == "ok" and (sample.completion_tokens or 0) > result.protocol.max_tokens:
        yield f"{where}: more completion tokens than max_tokens"


def _round(where: str, one: Round, group: Group) -> Iterator[str]:
    if one.status != "ok":
        return
    if len(one.samples) != group.concurrency:
        yield f"{where}: {len(one.samples)} samples, {group.concurrency} streams"
    if any(s.status != "ok" for s in one.samples):
        yield f"{where}: counts although a request failed"
    for name, again in (
        ("aggregate_wall_tok_s", metrics.aggregate_wall(one.samples)),
        ("aggregate_window_tok_s", metrics.aggregate_window(one.samples)),
    ):
        yield from _same(f"{where} {name}", getattr(one, name), again)


def _summary(name: str, group: Group) -> Iterator[str]:
    again = metrics.group_of(
        group.prompt_kind, group.concurrency, group.rounds, target_tokens=group.target_tokens
    )
    if again.summary.keys() != group.summary.keys():
        yield f"{name}: the summary has other metrics than the rounds give"
        return
    for metric, summary in group.summary.items():
        for part in ("n", "median", "mean", "min", "max", "stddev"):
            mine, theirs = getattr(summary, part), getattr(again.summary[metric], part)
            yield from _same(f"{name} {metric} {part}", mine, theirs)
        ours, theirs_ci = summary.ci95, again.summary[metric].ci95
        for i in range(2):
            yield from _same(
                f"{name} {metric} ci95",
                ours[i] if ours else None,
                theirs_ci[i] if theirs_ci else None,
            )
    yield from _same(f"{name} ttft_p50_s", group.ttft_p50_s, again.ttft_p50_s)
    yield from _same(f"{name} ttft_p95_s", group.ttft_p95_s, again.ttft_p95_s)


def _nonces(result: Result) -> Iterator[str]:
    nonces = [s.nonce for g in result.groups for r in g.rounds for s in r.samples]
    if len(set(nonces)) != len(nonces):
        yield "a nonce was used twice: a prefix cache may have helped"


def _prompts(result: Result) -> Iterator[str]:
    """In a speed test the prompt of every sample is the protocol's."""
    if result.protocol.mode not in ("speed", "sweep"):
        return
    for group in result.groups:
        wanted = result.protocol.prompts.get(group.prompt_kind)
        if any(s.prompt_sha256 != wanted for r in group.rounds for s in r.samples):
            yield f"{group.prompt_kind} c{group.concurrency}: another prompt than the protocol's"


def _same(what: str, written: float | None, computed: float | None) -> Iterator[str]:
    if written is None and computed is None:
        return
    if (
        written is None
        or computed is None
        or not math.isclose(written, computed, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    ):
        yield f"{what}: the file says {written}, the raw data give {computed}"
