"""Follow the journals of all ranks at once, and know which rank failed first."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Final, Self

from spark_appliance.errors import OperationError
from spark_appliance.fleet.crew import Crew
from spark_appliance.fleet.enginelog import TITLES, Progress, read_line
from spark_appliance.fleet.remote import NodeGoneError, Remote, Stopped
from spark_appliance.model.plan import NodePlan
from spark_appliance.process import Sessions

_FIELDS: Final = "MESSAGE,UNIT,_SYSTEMD_UNIT"
_RETRY_SECONDS: Final = 5.0
LOG_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a journal; ``when`` is the node's clock, seconds since the epoch."""

    when: float
    unit: str
    text: str
    manager: bool = False
    """Whether systemd says it of the unit, and not the unit itself."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of a rank; ``when`` is in our clock, whatever the node's says."""

    node: str
    when: float
    reason: str


def own_units(node: NodePlan) -> list[str]:
    """Return the units of ours on a node whose journal tells of a start."""
    return [unit.name for unit in node.units if unit.name.startswith("spark-")]


def journal_argv(
    units: Sequence[str],
    *,
    since: float | None = None,
    lines: int | None = None,
    follow: bool = False,
    output: str = "json",
) -> list[str]:
    """Return the command that reads the journal of units."""
    argv = ["journalctl", f"--output={output}", "--no-pager", "--quiet"]
    if output == "json":
        argv.append(f"--output-fields={_FIELDS}")
    if since is not None:
        # whole seconds, never later than asked: rounding up would skip entries
        argv.append(f"--since=@{math.floor(since)}")
    if lines is not None:
        argv.append(f"--lines={lines}")
    if follow:
        argv.append("--follow")
    return argv + [f"--unit={unit}" for unit in units]


def parse_entry(line: str) -> Entry | None:
    """Read one line of ``journalctl --output=json``; None for anything else."""
    try:
        data = json.loads(line)
        raw = data.get("MESSAGE", "")
        # what is no plain text (a progress bar's carriage returns) comes as a list of bytes
        text = bytes(raw).decode(errors="replace") if isinstance(raw, list) else str(raw)
        unit = data.get("UNIT") or data.get("_SYSTEMD_UNIT") or ""
        when = int(data["__REALTIME_TIMESTAMP"]) / 1e6
        return Entry(when, str(unit), text, manager=bool(data.get("UNIT")))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def clock_offsets(crew: Crew) -> dict[str, float]:
    """Return by how many seconds each node's clock is ahead of ours.

    A node whose clock is off by an hour (field notes: seen after power cuts) must not seem to
    have failed an hour before the others.

    Raises:
        FleetError: when a node cannot be asked.
    """

    def ask(remote: Remote) -> float:
        before = time.time()
        text = remote.run("read the clock", ["date", "+%s.%N"], seconds=30, rehearsed="0").stdout
        middle = (before + time.time()) / 2
        try:
            return float(text.strip()) - middle
        except ValueError:
            return 0.0

    return crew.each(ask)


class Followers:
    """One thread a rank reads its journal; the board shows what it does."""

    def __init__(self, crew: Crew, offsets: dict[str, float]) -> None:
        self._crew = crew
        self._sessions = Sessions()
        self._offsets = offsets
        self._lock = threading.Lock()
        self._progress = {remote.name: Progress() for remote in crew}
        self._failures: dict[str, Failure] = {}
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._since = {remote.name: time.time() + offsets.get(remote.name, 0.0) for remote in crew}

    def __enter__(self) -> Self:
        for remote in self._crew:
            own = replace(remote, sessions=self._sessions)
            thread = threading.Thread(target=self._follow, args=(own,), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._sessions.close()
        for thread in self._threads:
            thread.join(timeout=10)

    def progress(self, node: str) -> Progress:
        """Return where a rank is."""
        with self._lock:
            return self._progress[node]

    def since(self, node: str) -> float:
        """Return when following began, in the node's clock."""
        return self._since[node]

    def observed(self, node: str, shard: int, of: int) -> None:
        """Take over which shard a rank holds open: its journal is silent meanwhile."""
        with self._lock:
            now = self._progress[node]
            if now.stage in ("init", "weights") and shard:
                self._progress[node] = Progress(
                    "weights", f"shard {shard} of {of}", shard / of, now.kv_tokens
                )
        self._show(node)

    def first_failure(self) -> Failure | None:
        """Return the failure that came first, by our clock."""
        with self._lock:
            return min(self._failures.values(), key=lambda f: f.when, default=None)

    def _follow(self, remote: Remote) -> None:
        since = self._since[remote.name]
        heard = newest = -math.inf
        while not self._stop.is_set():
            argv = journal_argv(own_units(remote.plan), since=max(since, newest), follow=True)
            try:
                with remote.lines(
                    "follow the journal", argv, seconds=24 * 3600, root=True
                ) as lines:
                    for line in lines:
                        entry = parse_entry(line)
                        # after a reconnect the journal repeats the last second
                        if entry is not None and entry.when > heard:
                            newest = max(newest, entry.when)
                            self._take(remote.name, entry)
            except (OperationError, Stopped) as error:
                if self._stop.is_set():
                    return
                if isinstance(error, NodeGoneError):
                    self._crew.board.work(remote.name, "no contact", error.reason)
            heard = newest
            self._stop.wait(_RETRY_SECONDS)

    def _take(self, node: str, entry: Entry) -> None:
        with self._lock:
            before = self._progress[node]
            now = read_line(before, entry.unit, entry.text)
            self._progress[node] = now
            if now.failure is not None and node not in self._failures:
                when = entry.when - self._offsets.get(node, 0.0)
                self._failures[node] = Failure(node, when, now.failure)
        if now != before:
            self._show(node)

    def again(self, node: str) -> None:
        """Forget a rank's failure: the group starts anew."""
        with self._lock:
            self._failures.pop(node, None)
            if self._progress[node].failure is not None:
                self._progress[node] = Progress()
        self._show(node)

    def _show(self, node: str) -> None:
        now = self.progress(node)
        if now.stage == "failed":
            self._crew.board.fail(node, now.detail)
        else:
            self._crew.board.work(node, TITLES[now.stage], now.detail, now.share)


def save_logs(crew: Crew, since: dict[str, float]) -> dict[str, str]:
    """Return every rank's journal since a moment of its own clock; a gone node's reason."""

    def read(remote: Remote) -> str:
        argv = journal_argv(
            own_units(remote.plan), since=since[remote.name], output="short-iso-precise"
        )
        try:
            return remote.run("save the log", argv, seconds=LOG_SECONDS, root=True).stdout
        except OperationError as error:
            return f"no log: {error}\n"

    return crew.gather(read)[0]
