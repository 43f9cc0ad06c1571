"""How results look on a terminal: problems, tables, budgets. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spark_appliance.errors import Problem
from spark_appliance.memory import Budget

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_BAR = 44
_PARTS = (
    "blue",
    "magenta",
    "cyan",
    "green",
    "yellow",
    "red",
    "bright_blue",
    "bright_magenta",
    "white",
)


def console(*, stderr: bool = False) -> Console:
    """Return a console that never wraps what a program may read."""
    out = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not out.is_terminal:
        out.width = 200
    return out


def print_problems(problems: Iterable[Problem]) -> None:
    """Print problems to stderr: place, severity, what, rule; the remedy on its own line."""
    out = console(stderr=True)
    for problem in problems:
        line = Text()
        if problem.where:
            line.append(f"{problem.where}: ", style="bold")
        line.append(f"{problem.severity}: ", style=_STYLES.get(problem.severity, ""))
        line.append(problem.message)
        line.append(f" [{problem.rule}]", style="dim")
        out.print(line)
        if problem.remedy:
            out.print(Text(f"    remedy: {problem.remedy}", style="green"))


def print_budget(names: Sequence[str], budgets: Sequence[Budget]) -> None:
    """Print the parts of the fullest node and one bar for every node."""
    if not budgets:
        return
    out = console()
    worst = max(range(len(budgets)), key=lambda rank: budgets[rank].used_gib)
    table = Table(title=f"Memory of {names[worst]}, GiB", title_justify="left", box=None)
    table.add_column("part")
    table.add_column("GiB", justify="right")
    table.add_column("")
    for index, part in enumerate(budgets[worst].parts):
        style = _PARTS[index % len(_PARTS)]
        table.add_row(Text(f"■ {part.name}", style=style), f"{part.gib:.1f}", part.why)
    table.add_row(
        "reserve", f"{budgets[worst].reserve_gib:.1f}", "kept free: the guard's threshold"
    )
    out.print(table)
    longest = max(map(len, names))
    for name, node_budget in zip(names, budgets, strict=True):
        line = Text(f"{name:<{longest}} ")
        line.append_text(_bar(node_budget))
        line.append(f" {node_budget.used_gib:.1f} of {node_budget.total_gib:g}")
        verdict = (
            f", {node_budget.free_gib:.1f} free"
            if node_budget.missing_gib <= 0
            else f", {node_budget.missing_gib:.1f} GiB missing"
        )
        line.append(verdict, style="green" if node_budget.missing_gib <= 0 else "bold red")
        out.print(line)


def _bar(node_budget: Budget) -> Text:
    bar = Text("▕")
    used = 0.0
    drawn = 0
    for index, part in enumerate(node_budget.parts):
        used += part.gib
        until = min(_BAR, round(used / node_budget.total_gib * _BAR))
        bar.append("█" * (until - drawn), style=_PARTS[index % len(_PARTS)])
        drawn = max(drawn, until)
    bar.append(" " * (_BAR - drawn))
    bar.append("▏" if node_budget.used_gib <= node_budget.total_gib else "▶", style="bold")
    return bar


def summary(problems: Iterable[Problem]) -> str:
    """Return '2 errors, 1 warning' for a list of problems, or 'no problems'."""
    counts = dict.fromkeys(_STYLES, 0)
    for problem in problems:
        counts[problem.severity] = counts.get(problem.severity, 0) + 1
    parts = [
        f"{count} {severity}{'' if count == 1 else 's'}"
        for severity, count in counts.items()
        if count
    ]
    return ", ".join(parts) or "no problems"
