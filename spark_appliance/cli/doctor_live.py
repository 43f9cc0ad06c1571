"""What is shown while nodes are asked: one changing table, or lines without a terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

import click


class Progress(Protocol):
    """Where the library tells what happens."""

    def tell(self, node: str, state: str, text: str) -> None:
        """Something happened on a node."""

    def step(self, text: str) -> None:
        """A measurement begins."""

    def again(self) -> None:
        """All nodes are asked once more."""


class _Lines:
    def tell(self, node: str, state: str, text: str) -> None:
        if state != "asking":
            click.echo(f"{node}: {state}: {text}", err=True)

    def step(self, text: str) -> None:
        click.echo(f"measuring: {text}", err=True)

    def again(self) -> None:
        pass


class _Table:
    def __init__(self, nodes: list[str]) -> None:
        self._rows = dict.fromkeys(nodes, ("waiting", ""))
        self._since = time.monotonic()
        self._step = ""

    def tell(self, node: str, state: str, text: str) -> None:
        self._rows[node] = (state, text)

    def step(self, text: str) -> None:
        self._step = text

    def again(self) -> None:
        self._rows = dict.fromkeys(self._rows, ("waiting", ""))

    def __rich__(self) -> object:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None)
        for column in ("node", "state", ""):
            table.add_column(column)
        styles = {"answered": "green", "failed": "bold red", "asking": "cyan"}
        for node, (state, text) in self._rows.items():
            table.add_row(node, Text(state, style=styles.get(state, "dim")), text)
        tail = f"{time.monotonic() - self._since:.0f} s" + (f"  {self._step}" if self._step else "")
        return Group(table, Text(tail, style="dim"))


@contextlib.contextmanager
def progress(nodes: list[str]) -> Iterator[Progress]:
    """Show a live table on a terminal, lines elsewhere; always on stderr."""
    from spark_appliance.cli.output import console

    out = console(stderr=True)
    if not out.is_terminal:
        yield _Lines()
        return
    from rich.live import Live

    table = _Table(nodes)
    with Live(get_renderable=table.__rich__, console=out, refresh_per_second=4, transient=True):  # type: ignore[arg-type]
        yield table
