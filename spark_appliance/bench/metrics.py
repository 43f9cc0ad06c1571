"""Every number of a result, computed here and nowhere else.

``bench verify`` runs the same functions over a finished file's raw timings.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from spark_appliance.bench import sse, stats
from spark_appliance.bench.result import (
    Acceptance,
    Failure,
    Group,
    Needle,
    PromptKind,
    Round,
    Sample,
    Summary,
    Timings,
)
from spark_appliance.bench.wire import Recording


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt without its nonce; ``needle`` is (depth 0..1, expected text) if it hides one."""

    text: str
    needle: tuple[float, str] | None = None

    @property
    def sha256(self) -> str:
        """Digest of the UTF-8 text, without the nonce line."""
        return sha256(self.text)


@dataclass(frozen=True, slots=True)
class Rates:
    """Derived from raw timings and the endpoint's token counts; None where undefined."""

    ttft_s: float | None
    prefill_tok_s: float | None
    decode_tok_s: float | None


def sha256(text: str) -> str:
    """Return the hex digest of a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode()).hexdigest()


def rates(timings: Timings, prompt_tokens: int | None, completion_tokens: int | None) -> Rates:
    """Return TTFT in seconds and both rates in tokens per second.

    TTFT = first - start; prefill = prompt_tokens / TTFT;
    decode = (completion_tokens - 1) / (last - first).
    """
    ttft = None if timings.first is None else timings.first - timings.start
    prefill = prompt_tokens / ttft if ttft and prompt_tokens else None
    decode = None
    if timings.first is not None and timings.last is not None and completion_tokens:
        span = timings.last - timings.first
        if span > 0 and completion_tokens > 1:
            decode = (completion_tokens - 1) / span
    return Rates(ttft, prefill, decode)


def aggregate_wall(samples: Sequence[Sample]) -> float | None:
    """Sum of completion tokens / (last end of text - first request start), or None."""
    if not samples or any(s.completion_tokens is None or s.timings.last is None for s in samples):
        return None
    span = max(s.timings.last or 0.0 for s in samples) - min(s.timings.start for s in samples)
    return sum(s.completion_tokens or 0 for s in samples) / span if span > 0 else None


def aggregate_window(samples: Sequence[Sample]) -> float | None:
    """Sum of (completion tokens - 1) / (latest last token - earliest first token), or None."""
    if not samples or any(s.timings.first is None or s.timings.last is None for s in samples):
        return None
    span = max(s.timings.last or 0.0 for s in samples) - min(
        s.timings.first or 0.0 for s in samples
    )
    tokens = sum((s.completion_tokens or 0) - 1 for s in samples)
    return tokens / span if span > 0 and tokens > 0 else None


def sample(
    recording: Recording,
    prompt: Prompt,
    *,
    stream: int,
    nonce: str,
    origin: float,
    allowed_cached: int,
    need_decode: bool = True,
) -> tuple[Sample, str]:
    """Interpret one recording; returns the sample and the text that was generated.

    ``origin`` is the ``perf_counter`` time that the timings count from. Without
    ``need_decode`` an answer too short for a decode rate still counts for TTFT and prefill.
    """
    said = sse.parse(recording.reads)
    usage = said.usage or {}
    timings = _timings(recording, said, origin)
    prompt_tokens = _count(usage.get("prompt_tokens"))
    completion_tokens = _count(usage.get("completion_tokens"))
    details = usage.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    reasoning_tokens = _count(usage.get("reasoning_tokens"))
    if reasoning_tokens is None and isinstance(usage.get("completion_tokens_details"), dict):
        reasoning_tokens = _count(usage["completion_tokens_details"].get("reasoning_tokens"))
    derived = rates(timings, prompt_tokens, completion_tokens)
    failure = _judge(recording, said, completion_tokens, cached, allowed_cached)
    if failure is None and need_decode and derived.decode_tok_s is None:
        failure = Failure(
            kind="too-short",
            message=f"{completion_tokens} completion tokens in {len(said.text_times)} events, "
            "all at one time: that gives no rate",
            remedy="use a prompt with a longer answer, or --ignore-eos where the engine knows it",
        )
    content, reasoning = "".join(said.content), "".join(said.reasoning)
    output = reasoning + content
    made = Sample(
        stream=stream,
        status="failed" if failure else "ok",
        failure=failure,
        nonce=nonce,
        prompt_sha256=prompt.sha256,
        output_sha256=sha256(output) if output else None,
        finish_reason=said.finish_reason,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        cached_tokens=cached,
        reasoning_tokens=reasoning_tokens,
        chunks=len(said.text_times),
        ttft_s=derived.ttft_s,
        prefill_tok_s=derived.prefill_tok_s,
        decode_tok_s=derived.decode_tok_s,
        acceptance=_acceptance(said.extension),
        needle=_needle(prompt, content, reasoning),
        timings=timings,
    )
    return made, output


def round_of(
    samples: Sequence[Sample],
    *,
    started_s: float,
    ended_s: float,
    interrupted: bool = False,
    acceptance: Acceptance | None = None,
) -> Round:
    """Put the samples of one round together; one bad sample spoils the round's aggregates."""
    good = all(s.status == "ok" for s in samples) and bool(samples)
    ok = good and not interrupted
    return Round(
        status="interrupted" if interrupted else ("ok" if good else "failed"),
        started_s=started_s,
        ended_s=ended_s,
        samples=list(samples),
        aggregate_wall_tok_s=aggregate_wall(samples) if ok else None,
        aggregate_window_tok_s=aggregate_window(samples) if ok else None,
        acceptance=acceptance,
    )


def group_of(
    prompt_kind: PromptKind,
    concurrency: int,
    rounds: Sequence[Round],
    *,
    target_tokens: int | None = None,
    prompt_sample: str = "",
    output_sample: str = "",
) -> Group:
    """Summarize the ``ok`` rounds of a group."""
    ttfts = [
        s.ttft_s for r in rounds if r.status == "ok" for s in r.samples if s.ttft_s is not None
    ]
    return Group(
        prompt_kind=prompt_kind,
        concurrency=concurrency,
        target_tokens=target_tokens,
        rounds=list(rounds),
        summary=summary_of(rounds),
        ttft_p50_s=stats.percentile(ttfts, 50) if ttfts else None,
        ttft_p95_s=stats.percentile(ttfts, 95) if ttfts else None,
        prompt_sample=prompt_sample,
        output_sample=output_sample,
    )


def summary_of(rounds: Sequence[Round]) -> dict[str, Summary]:
    """One summary a metric. The round is the unit: streams of one round are not independent.

    A round's value of a per-stream metric is the median over its streams. Metrics that no round
    has are left out.
    """
    values: dict[str, list[float]] = {}
    for name, value in _METRICS.items():
        found = [value(r) for r in rounds if r.status == "ok"]
        values[name] = [v for v in found if v is not None]
    return {name: stats.summarize(found) for name, found in values.items() if found}


def _per_stream(get: Callable[[Sample], float | None]) -> Callable[[Round], float | None]:
    def value(of: Round) -> float | None:
        return _median(get(s) for s in of.samples)

    return value


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def _accept_length(of: Round) -> float | None:
    if of.acceptance is not None:
        return of.acceptance.accept_length
    return _median(s.acceptance.accept_length if s.acceptance else None for s in of.samples)


def _accept_rate(of: Round) -> float | None:
    if of.acceptance is not None:
        return of.acceptance.accept_rate
    return _median(s.acceptance.accept_rate if s.acceptance else None for s in of.samples)


_METRICS: dict[str, Callable[[Round], float | None]] = {
    "decode_tok_s": _per_stream(lambda s: s.decode_tok_s),
    "aggregate_wall_tok_s": lambda r: r.aggregate_wall_tok_s,
    "aggregate_window_tok_s": lambda r: r.aggregate_window_tok_s,
    "prefill_tok_s": _per_stream(lambda s: s.prefill_tok_s),
    "ttft_s": _per_stream(lambda s: s.ttft_s),
    "prompt_tokens": _per_stream(lambda s: s.prompt_tokens),
    "completion_tokens": _per_stream(lambda s: s.completion_tokens),
    "accept_length": _accept_length,
    "accept_rate": _accept_rate,
}


def _timings(recording: Recording, said: sse.Transcript, origin: float) -> Timings:
    def since(time: float | None) -> float | None:
        return None if time is None else round(time - origin, 6)

    texts = said.text_times
    return Timings(
        start=round(recording.started - origin, 6),
        connected=since(recording.connected),
        first=since(texts[0] if texts else None),
        last=since(texts[-1] if texts else None),
        finish=since(said.finish_time),
        end=round(recording.ended - origin, 6),
        chunk_us=[round((t - recording.started) * 1e6) for t in texts],
    )


def _judge(
    recording: Recording,
    said: sse.Transcript,
    completion_tokens: int | None,
    cached: int | None,
    allowed_cached: int,
) -> Failure | None:
    """Return why this is not a sample, or None."""
    if recording.failure and not (
        said.finish_reason and said.usage and recording.failure.kind in ("cut", "stalled")
    ):
        return recording.failure
    if said.error is not None:
        return Failure(
            kind="engine-error",
            message=f"the engine reported an error inside the stream: {said.error}",
            remedy="read the engine's log",
        )
    if said.malformed is not None:
        return Failure(
            kind="malformed",
            message=f"an event of the stream is not JSON: {said.malformed}",
            remedy="a proxy may rewrite the stream: measure the engine directly",
        )
    if said.finish_reason is None:
        return Failure(
            kind="cut",
            message=f"the stream ended in the middle, after {len(said.text_times)} text events",
            remedy="read the engine's log: a rank or a proxy ended the request",
        )
    if said.usage is None or completion_tokens is None:
        return Failure(
            kind="no-usage",
            message="the endpoint sends no usage in its stream, and counting events would be "
            "wrong: one event can carry several tokens",
            remedy="use an endpoint that obeys stream_options.include_usage",
        )
    if not said.text_times:
        return Failure(
            kind="empty",
            message=f"the answer has no text (finish reason {said.finish_reason})",
            remedy="look at the engine's log, or use another prompt",
        )
    if cached is not None and cached > allowed_cached:
        return Failure(
            kind="cached",
            message=f"{cached} prompt tokens came from the prefix cache, {allowed_cached} are "
            "allowed: the prefill rate would be wrong",
            remedy="an engine with a page size of 1 caches the chat template's first tokens: "
            "--allow-cached N accepts that many",
        )
    return None


def _acceptance(extension: dict[str, Any] | None) -> Acceptance | None:
    """Read SGLang's ``sglext.spec_tokens_details`` (sent for return_spec_tokens_details)."""
    details = (extension or {}).get("spec_tokens_details")
    if isinstance(details, list):
        details = details[0] if details else None
    if not isinstance(details, dict) or not details.get("spec_verify_ct"):
        return None
    return Acceptance(
        accept_rate=_number(details.get("spec_accept_rate")),
        accept_length=_number(details.get("spec_accept_length")),
        source="sglext.spec_tokens_details of this request",
    )


def _needle(prompt: Prompt, content: str, reasoning: str) -> Needle | None:
    if prompt.needle is None:
        return None
    depth, expected = prompt.needle
    in_content, in_reasoning = expected in content, expected in reasoning
    return Needle(
        depth=depth,
        expected=expected,
        found=in_content or in_reasoning,
        where="content" if in_content else ("reasoning" if in_reasoning else "nowhere"),
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
