"""A picture of a result; needs the extra ``plot`` (matplotlib)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from spark_appliance.bench.result import Group, Result
from spark_appliance.errors import InputError, OperationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg")


def check_path(path: Path) -> None:
    """Refuse another format, or a missing library, before anything is measured."""
    if path.suffix.lower() not in FORMATS:
        raise InputError.one(
            "bench.plot", f"{path} is neither .png nor .svg", "end the file's name in .png or .svg"
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise OperationError(
            "`--plot` needs matplotlib, which is not installed\n"
            "    remedy: pip install '.[plot]' (in a checkout)"
        ) from None


def draw(result: Result, path: Path) -> None:
    """Write a PNG or SVG file. Raises InputError, OperationError."""
    check_path(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    if result.protocol.mode in ("context", "longcheck"):
        _lines(left, result, "target_tokens", "prefill_tok_s", "prefill, tok/s")
        _lines(right, result, "target_tokens", "ttft_s", "TTFT, s")
        for axes in (left, right):
            axes.set_xlabel("prompt tokens (target)")
            axes.set_xscale("log", base=2)
        right.set_yscale("log")
    elif result.protocol.mode == "sweep":
        _lines(
            left, result, "concurrency", "aggregate_wall_tok_s", "aggregate decode (wall), tok/s"
        )
        _lines(right, result, "concurrency", "decode_tok_s", "decode of one stream, tok/s")
        for axes in (left, right):
            axes.set_xlabel("streams")
            axes.set_xticks(sorted({g.concurrency for g in result.groups}))
            axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
    else:
        _bars(left, result, "decode_tok_s", "decode, tok/s")
        _bars(right, result, "ttft_s", "TTFT, s")
    engine = result.evidence.engine or "engine unknown"
    partial = " (partial)" if result.status == "partial" else ""
    figure.suptitle(f"{result.endpoint.model}, {engine}, {result.started[:10]}{partial}")
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise OperationError(f"cannot write {path}: {error.strerror or error}") from None


def _lines(axes: Axes, result: Result, x: str, metric: str, label: str) -> None:
    """Medians with a bar from the least to the greatest round, one line a prompt kind."""
    for kind in dict.fromkeys(g.prompt_kind for g in result.groups):
        groups = [g for g in result.groups if g.prompt_kind == kind and metric in g.summary]
        if not groups:
            continue
        axes.errorbar(
            [getattr(g, x) for g in groups],
            [g.summary[metric].median for g in groups],
            yerr=_errors(groups, metric),
            marker="o",
            capsize=3,
            label=kind,
        )
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def _bars(axes: Axes, result: Result, metric: str, label: str) -> None:
    groups = [g for g in result.groups if metric in g.summary]
    axes.bar(
        [g.prompt_kind for g in groups],
        [g.summary[metric].median for g in groups],
        yerr=_errors(groups, metric) if groups else None,
        capsize=4,
    )
    axes.set_ylabel(label)
    axes.grid(axis="y", alpha=0.3)


def _errors(groups: list[Group], metric: str) -> list[list[float]]:
    summaries = [g.summary[metric] for g in groups]
    return [[s.median - s.min for s in summaries], [s.max - s.median for s in summaries]]
