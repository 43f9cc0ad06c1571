"""What each node is doing now; whoever shows it listens. Nothing here prints."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

State = Literal["waiting", "working", "done", "failed"]
Listener = Callable[["Row"], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One node: what it does (``stage``), how far it is (``detail``, ``share`` of 1)."""

    node: str
    state: State = "waiting"
    stage: str = ""
    detail: str = ""
    share: float | None = None
    since: float = field(default_factory=time.monotonic)


class Board:
    """Rows of all nodes; safe to use from several threads."""

    def __init__(self, nodes: Iterable[str], listener: Listener | None = None) -> None:
        self._lock = threading.Lock()
        self._rows = {node: Row(node) for node in nodes}
        self._listener = listener
        self.note = ""

    def listen(self, listener: Listener | None) -> None:
        """Call ``listener`` with every row that changes from now on."""
        self._listener = listener

    def work(self, node: str, stage: str, detail: str = "", share: float | None = None) -> None:
        """Say what a node does; a new stage starts its clock anew."""
        self._set(node, "working", stage, detail, share)

    def done(self, node: str, detail: str = "") -> None:
        """Say that a node is finished."""
        self._set(node, "done", self.row(node).stage, detail, None)

    def fail(self, node: str, detail: str) -> None:
        """Say that a node failed."""
        self._set(node, "failed", self.row(node).stage, detail, None)

    def row(self, node: str) -> Row:
        """Return one row."""
        with self._lock:
            return self._rows.get(node) or Row(node)

    def rows(self) -> list[Row]:
        """Return all rows, in the order of the plan."""
        with self._lock:
            return list(self._rows.values())

    def _set(self, node: str, state: State, stage: str, detail: str, share: float | None) -> None:
        with self._lock:
            old = self._rows.get(node) or Row(node)
            since = old.since if (old.state, old.stage) == (state, stage) else time.monotonic()
            new = Row(node, state, stage, detail, share, since)
            if replace(new, since=0) == replace(old, since=0):
                return
            self._rows[node] = new
        if self._listener is not None:
            self._listener(new)
