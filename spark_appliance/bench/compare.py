"""Compare two results, and say which is faster only where the numbers allow it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from spark_appliance.bench.result import Group, Protocol, Result, Summary
from spark_appliance.errors import InputError, Problem

Verdict = Literal["B is better", "A is better", "no verdict"]

# What is compared, and whether more is better.
_METRICS = {
    "decode_tok_s": True,
    "aggregate_wall_tok_s": True,
    "aggregate_window_tok_s": True,
    "prefill_tok_s": True,
    "ttft_s": False,
}


@dataclass(frozen=True, slots=True)
class Line:
    """One metric of one group in both results."""

    prompt_kind: str
    concurrency: int
    target_tokens: int | None
    metric: str
    a: Summary
    b: Summary
    change_pct: float  # of the median, B against A
    verdict: Verdict
    reason: str


def as_dict(line: Line) -> dict[str, Any]:
    """Return plain data, for JSON."""
    return {
        field.name: value.model_dump() if isinstance(value, Summary) else value
        for field in fields(line)
        for value in [getattr(line, field.name)]
    }


def protocol_differences(a: Protocol, b: Protocol) -> list[str]:
    """Return every protocol field that differs, as ``name: A / B``; ``rounds`` may differ."""
    found = []
    for name in Protocol.model_fields:
        if name == "rounds":
            continue
        left, right = getattr(a, name), getattr(b, name)
        if name == "prompts":
            found += _prompt_differences(left, right)
        elif left != right:
            found.append(f"{name}: {_show(left)} / {_show(right)}")
    return found


def _prompt_differences(a: dict[str, str], b: dict[str, str]) -> list[str]:
    if a.keys() != b.keys():
        return [f"prompt kinds: {', '.join(a)} / {', '.join(b)}"]
    return [
        f"prompt sha256 ({kind}): {a[kind][:12]}… / {b[kind][:12]}…"
        for kind in a
        if a[kind] != b[kind]
    ]


def _show(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def compare(a: Result, b: Result) -> list[Line]:
    """Compare group by group.

    Raises InputError naming every protocol field that differs, or when no group is in both.
    """
    different = protocol_differences(a.protocol, b.protocol)
    if different:
        raise InputError(
            [
                Problem("bench.protocol-differs", f"not comparable, A / B differ in {one}")
                for one in different[:-1]
            ]
            + [
                Problem(
                    "bench.protocol-differs",
                    f"not comparable, A / B differ in {different[-1]}",
                    "measure both with the same options",
                )
            ]
        )
    theirs = {_key(g): g for g in b.groups}
    pairs = [(g, theirs[_key(g)]) for g in a.groups if _key(g) in theirs]
    lines = [
        _line(mine, other, metric)
        for mine, other in pairs
        for metric in _METRICS
        if metric in mine.summary
        and metric in other.summary
        # With one stream both aggregates say nothing that decode does not.
        and not (mine.concurrency == 1 and metric.startswith("aggregate"))
    ]
    if not lines:
        raise InputError.one(
            "bench.nothing-in-common",
            "no group is finished in both results",
            "finish them with --resume",
        )
    return lines


def _key(group: Group) -> tuple[str, int, int | None]:
    return (group.prompt_kind, group.concurrency, group.target_tokens)


def _line(a: Group, b: Group, metric: str) -> Line:
    left, right = a.summary[metric], b.summary[metric]
    verdict, reason = judge(left, right, more_is_better=_METRICS[metric])
    return Line(
        prompt_kind=a.prompt_kind,
        concurrency=a.concurrency,
        target_tokens=a.target_tokens,
        metric=metric,
        a=left,
        b=right,
        change_pct=(right.median / left.median - 1) * 100 if left.median else 0.0,
        verdict=verdict,
        reason=reason,
    )


def judge(a: Summary, b: Summary, *, more_is_better: bool) -> tuple[Verdict, str]:
    """Return a verdict only when the two 95 % confidence intervals do not touch."""
    if a.ci95 is None or b.ci95 is None:
        return "no verdict", "one repetition has no confidence interval"
    if a.ci95[1] < b.ci95[0]:
        return ("B is better" if more_is_better else "A is better"), "intervals separate"
    if b.ci95[1] < a.ci95[0]:
        return ("A is better" if more_is_better else "B is better"), "intervals separate"
    return "no verdict", "intervals overlap"
