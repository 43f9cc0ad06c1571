"""Tables in Markdown, shaped like the published ones, so that they can be pasted."""

from __future__ import annotations

from collections.abc import Sequence

from spark_appliance.bench.compare import Line
from spark_appliance.bench.result import Group, Node, Reading, Result, Summary


def render(result: Result) -> str:
    """Return the tables of a result, its nodes, and what a reader must know."""
    by_mode = {
        "speed": _speed,
        "sweep": _sweep,
        "context": _context,
        "longcheck": _longcheck,
    }
    parts = [_title(result), by_mode[result.protocol.mode](result)]
    if result.evidence.nodes:
        parts.append(_nodes(result.evidence.nodes))
    if result.problems:
        parts.append("\n".join(f"note: {problem}" for problem in result.problems))
    return "\n\n".join(parts)


def _title(result: Result) -> str:
    protocol = result.protocol
    partial = " - PARTIAL" if result.status == "partial" else ""
    return (
        f"{result.endpoint.model} at {result.endpoint.url}"
        f" ({result.evidence.engine or 'engine unknown'}){partial}\n"
        f"{protocol.mode}: {protocol.warmup} warm-up + {protocol.rounds} timed, greedy, "
        f"max_tokens {protocol.max_tokens}, {protocol.definitions}"
    )


def _speed(result: Result) -> str:
    rows = []
    names = (
        ("decode_tok_s", "decode tok/s", 1),
        ("prefill_tok_s", "prefill tok/s", 0),
        ("ttft_s", "TTFT s", 3),
        ("accept_length", "accepted length", 2),
        ("accept_rate", "acceptance rate", 3),
        ("prompt_tokens", "prompt tokens", 0),
        ("completion_tokens", "completion tokens", 0),
    )
    for group in result.groups:
        for name, title, digits in names:
            summary = group.summary.get(name)
            if summary is not None:
                rows.append([group.prompt_kind, title, *_spread(summary, digits)])
        cached = [s.cached_tokens for r in group.rounds for s in r.samples if s.status == "ok"]
        if cached:
            reported = [c for c in cached if c is not None]
            shown = str(max(reported)) if reported else "not reported"
            rows.append([group.prompt_kind, "cached tokens", shown, "", "", "", "", ""])
    return markdown(["prompt", "metric", "median", "min", "max", "stddev", "95 % CI", "n"], rows, 2)


def _spread(summary: Summary, digits: int) -> list[str]:
    interval = "-"
    if summary.ci95 is not None:
        interval = f"{summary.ci95[0]:.{digits}f} .. {summary.ci95[1]:.{digits}f}"
    stddev = "-" if summary.stddev is None else f"{summary.stddev:.{max(digits, 1)}f}"
    values = [f"{v:.{digits}f}" for v in (summary.median, summary.min, summary.max)]
    return [*values, stddev, interval, str(summary.n)]


def _sweep(result: Result) -> str:
    streams = result.protocol.concurrency
    kinds = list(result.protocol.prompts)
    found = {(str(g.prompt_kind), g.concurrency): g for g in result.groups}

    def table(title: str, cell: str, digits: int) -> str:
        rows = [
            [kind, *(_median(found.get((kind, c)), cell, digits) for c in streams)]
            for kind in kinds
        ]
        return title + "\n" + markdown(["prompt", *(f"c{c}" for c in streams)], rows, 1)

    ttft = [[kind, *(_ttft(found.get((kind, c))) for c in streams)] for kind in kinds]
    return "\n\n".join(
        [
            table("aggregate decode tok/s, wall (all tokens / start to last token)",
                  "aggregate_wall_tok_s", 1),
            table("aggregate decode tok/s, window (tokens after the first / first to last token)",
                  "aggregate_window_tok_s", 1),
            table("decode tok/s of one stream (median)", "decode_tok_s", 1),
            "TTFT p50 / p95, s\n" + markdown(["prompt", *(f"c{c}" for c in streams)], ttft, 1),
        ]
    )  # fmt: skip


def _context(result: Result) -> str:
    rows = [
        [
            str(group.target_tokens),
            _median(group, "prompt_tokens", 0),
            _median(group, "prefill_tok_s", 0),
            *_range(group, "prefill_tok_s", 0),
            _median(group, "ttft_s", 2),
            _ttft(group),
            _median(group, "decode_tok_s", 1),
            _count(group),
        ]
        for group in result.groups
    ]
    head = ["target", "prompt tokens", "prefill tok/s", "min", "max", "TTFT s", "p50 / p95",
            "decode tok/s", "n"]  # fmt: skip
    return f"{', '.join(result.protocol.prompts)} text\n" + markdown(head, rows, 0)


def _longcheck(result: Result) -> str:
    rows = [
        [
            f"c{group.concurrency}",
            str(sample.prompt_tokens),
            f"{sample.needle.depth:.2f}" if sample.needle else "-",
            ("found" if sample.needle.found else "NOT FOUND") if sample.needle else "-",
            _number(sample.ttft_s, 2),
            _number(sample.prefill_tok_s, 0),
            _number(sample.decode_tok_s, 1),
            sample.failure.kind if sample.failure else "ok",
        ]
        for group in result.groups
        for one in group.rounds
        for sample in one.samples
    ]
    head = ["streams", "prompt tokens", "depth", "needle", "TTFT s", "prefill tok/s",
            "decode tok/s", "status"]  # fmt: skip
    return markdown(head, rows, 1)


def _nodes(nodes: Sequence[Node]) -> str:
    rows = []
    for node in nodes:
        use = node.use
        rows.append(
            [
                node.name,
                node.facts.get("kernel", "-"),
                node.facts.get("gpu.driver_version", "-"),
                _reading(use.power_w if use else None, 1),
                _reading(use.sm_clock_mhz if use else None, 0),
                _reading(use.gpu_memory_used_mib if use else None, 0),
                _gib(use.mem_available_min_kib if use else None),
                str(use.readings if use else 0),
            ]
        )
    head = ["node", "kernel", "driver", "power W", "SM MHz", "GPU memory MiB",
            "least available GiB", "readings"]  # fmt: skip
    title = "nodes while generating (mean of readings with SM utilisation >= 50 %)"
    return title + "\n" + markdown(head, rows, 3)


def render_comparison(lines: Sequence[Line], a: str, b: str) -> str:
    """Return the table of ``compare.compare``; ``a`` and ``b`` name the two files."""
    rows = [
        [
            f"{line.prompt_kind} c{line.concurrency}"
            + (f" {line.target_tokens}" if line.target_tokens else ""),
            line.metric,
            _with_interval(line.a),
            _with_interval(line.b),
            f"{line.change_pct:+.1f} %",
            f"{line.verdict} ({line.reason})",
        ]
        for line in lines
    ]
    head = ["group", "metric", "A median [95 % CI]", "B median [95 % CI]", "change", "verdict"]
    return f"A: {a}\nB: {b}\n\n" + markdown(head, rows, 2)


def _with_interval(summary: Summary) -> str:
    digits = 1 if summary.median >= 10 else 3
    if summary.ci95 is None:
        return f"{summary.median:.{digits}f} [n = {summary.n}]"
    return (
        f"{summary.median:.{digits}f} [{summary.ci95[0]:.{digits}f}, {summary.ci95[1]:.{digits}f}]"
    )


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """Return an aligned Markdown table; the first ``left`` columns are left-aligned."""
    widths = [max(3, *(len(row[i]) for row in [head, *rows])) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(head), line(rule), *map(line, rows)])


def _median(group: Group | None, metric: str, digits: int) -> str:
    summary = group.summary.get(metric) if group else None
    return f"{summary.median:.{digits}f}" if summary else "-"


def _range(group: Group, metric: str, digits: int) -> tuple[str, str]:
    summary = group.summary.get(metric)
    return (f"{summary.min:.{digits}f}", f"{summary.max:.{digits}f}") if summary else ("-", "-")


def _ttft(group: Group | None) -> str:
    if group is None or group.ttft_p50_s is None or group.ttft_p95_s is None:
        return "-"
    return f"{group.ttft_p50_s:.2f} / {group.ttft_p95_s:.2f}"


def _count(group: Group) -> str:
    return str(sum(r.status == "ok" for r in group.rounds))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _reading(value: Reading | None, digits: int) -> str:
    if value is None:
        return "-"
    return value if value == "N/A" else f"{value:.{digits}f}"


def _gib(kib: Reading | None) -> str:
    return _reading(kib / 2**20 if kib is not None and kib != "N/A" else kib, 1)
