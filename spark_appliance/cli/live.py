"""What is shown while nodes work: one changing table, or lines without a terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

    from spark_appliance.fleet.board import Board, Row

_STYLES = {"waiting": "dim", "working": "cyan", "done": "green", "failed": "bold red"}
_STEP = 0.1  # of a stage: how far it must get before another line is worth it


@contextlib.contextmanager
def showing(board: Board) -> Iterator[None]:
    """Show a board while something runs; always on stderr, so that stdout stays for results."""
    from spark_appliance.cli.output import console

    out = console(stderr=True)
    if not out.is_terminal:
        board.listen(_Lines().row)
        try:
            yield
        finally:
            board.listen(None)
        return
    from rich.live import Live

    def render() -> RenderableType:
        return table(board)

    with Live(get_renderable=render, console=out, refresh_per_second=4):
        yield


def table(board: Board) -> RenderableType:
    """Return the table of a board as it is now."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = Table(box=None)
    for column in ("node", "does", "for", ""):
        rows.add_column(column)
    for row in board.rows():
        seconds = f"{time.monotonic() - row.since:.0f} s" if row.state == "working" else ""
        bar = ""
        if row.share is not None:
            bar = "▕" + ("█" * round(10 * row.share)).ljust(10) + "▏ "
        style = _STYLES[row.state]
        text = Text(f"{bar}{row.detail}", overflow="ellipsis", no_wrap=True)
        rows.add_row(row.node, Text(row.stage or row.state, style=style), seconds, text)
    parts: list[RenderableType] = [rows]
    if board.note:
        parts.append(Text(board.note, style="yellow"))
    return Group(*parts)


class _Lines:
    """One line for each change worth a line; safe to call from several threads."""

    def __init__(self) -> None:
        self._last: dict[str, Row] = {}

    def row(self, row: Row) -> None:
        last = self._last.get(row.node)
        same = last is not None and (last.state, last.stage) == (row.state, row.stage)
        if same and last is not None and row.share is not None and last.share is not None:
            if 0 <= row.share - last.share < _STEP and row.share < 1:
                return
        elif same and last is not None and _shape(row.detail) == _shape(last.detail):
            return
        self._last[row.node] = row
        text = ": ".join(part for part in (row.node, row.stage, row.detail) if part)
        mark = {"failed": "failed: ", "done": "done: "}.get(row.state, "")
        click.echo(f"{mark}{text}", err=True)


def _shape(text: str) -> str:
    """Return a text without its numbers: two that differ only there are one piece of news."""
    return "".join("#" if c.isdigit() else c for c in text)
