"""Start all ranks and wait until the endpoint gives a right answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from spark_appliance import lockfile
from spark_appliance.errors import OperationError
from spark_appliance.fleet import drain
from spark_appliance.fleet.crew import Crew
from spark_appliance.fleet.evidence import RunFolder
from spark_appliance.fleet.follow import Failure, Followers, clock_offsets, save_logs
from spark_appliance.fleet.remote import NodeGoneError, Remote, StepError
from spark_appliance.fleet.report import Report, ask
from spark_appliance.fleet.units import forget_failures, started_by_target, systemctl
from spark_appliance.names import SUPERVISOR

START_SECONDS: Final = 60.0
POLL_SECONDS: Final = 5.0
GONE_LIMIT: Final = 4
"""Answers in a row that a node may owe before it counts as gone: a start loads it heavily."""

GRACE_SECONDS: Final = 120
"""Beyond the plan's own time for a start, so that the node's reason comes first."""

Preflight = Callable[[], None]
"""Raises OperationError when the cluster may not boot."""


class ServeError(OperationError):
    """The endpoint did not become ready."""

    def __init__(self, reason: str, first: Failure | None, folder: str | None) -> None:
        self.reason = reason
        self.first = first
        lines = [f"not serving: {reason}"]
        if first is not None:
            lines.append(f"    failed first: {first.node}: {first.reason}")
        if folder is not None:
            lines.append(f"    every rank's log: {folder}/log-*.txt")
        super().__init__("\n".join(lines))


@dataclass(slots=True)
class Start:
    """One start of a cluster. ``wait`` lets time pass; tests give their own."""

    crew: Crew
    evidence: RunFolder | None = None
    fail_fast: bool = False
    any_plan: bool = False
    poll: float = POLL_SECONDS
    wait: Callable[[float], object] = field(default_factory=lambda: threading.Event().wait)
    clock: Callable[[], float] = time.monotonic

    def run(self, preflight: Preflight | None = None) -> float:
        """Start and wait; returns the seconds that it took.

        Raises:
            ServeError: when it fails; the reason, the rank that failed first and where the logs
                are.
            FleetError: when a node cannot be reached: then nothing was started.
        """
        began = self.clock()
        self._same_plan()
        if preflight is not None:
            preflight()
        offsets = clock_offsets(self.crew)
        if self.crew.rehearsal is not None:
            self._start_all()
            return 0.0
        with Followers(self.crew, offsets) as followers:
            reason = None
            try:
                self._start_all()
                reason = self._until_ready(followers, began)
            except OperationError as error:
                reason = str(error)
            since = {remote.name: followers.since(remote.name) for remote in self.crew}
            first = followers.first_failure()
        if reason is None:
            for remote in self.crew:
                self.crew.board.done(remote.name, "serving")
            return self.clock() - began
        raise ServeError(reason, first, self._keep_logs(since))

    def _same_plan(self) -> None:
        def check(remote: Remote) -> None:
            wanted = lockfile.own_sha256(self.crew.plan, remote.name)
            found = ask(remote).plan
            if self.crew.rehearsal is None and found != wanted and not self.any_plan:
                raise StepError(
                    remote.name,
                    "compare the plan",
                    "the node has another plan",
                    "install this one (spark-appliance rollout), or start with --any-plan",
                )

        self.crew.each(check)

    def _start_all(self) -> None:
        if self.crew.head is not None:
            drain.reopen(self.crew.head)
        for group in self.crew.groups(self.crew.plan.start_order):
            group.each(self._start)

    def _start(self, remote: Remote) -> None:
        self.crew.board.work(remote.name, "starting")
        names = started_by_target(remote.plan)
        forget_failures(remote, names)
        systemctl(remote, "start", "start", names, seconds=START_SECONDS, block=False)

    def _until_ready(self, followers: Followers, began: float) -> str | None:
        limit = self.crew.plan.health.ready_timeout + GRACE_SECONDS
        gone: dict[str, int] = {}
        restarts = 0
        while True:
            reports, failures = self.crew.gather(ask)
            for remote in self.crew:
                error = failures.get(remote.name)
                gone[remote.name] = gone.get(remote.name, 0) + 1 if error is not None else 0
                if isinstance(error, NodeGoneError) and gone[remote.name] >= GONE_LIMIT:
                    return f"{remote.name} is gone: {error.reason}"
            head = self.crew.head
            report = reports.get(head.name) if head is not None else None
            if report is not None and report.ready:
                return None
            for name, other in reports.items():
                _observe(followers, name, other)
                if reason := _gave_up(name, other):
                    return reason
            count = len(report.part("status", "supervisor", "restarts") or []) if report else 0
            if count > restarts:
                restarts = count
                self.crew.board.note = ""
                for remote in self.crew:
                    followers.again(remote.name)
            first = followers.first_failure()
            if first is not None:
                self.crew.board.note = f"{first.node} failed first: {first.reason}"
                if self.fail_fast:
                    return f"{first.node} failed"
            if self.clock() - began > limit:
                return f"not ready after {limit} s"
            self.wait(self.poll)

    def _keep_logs(self, since: dict[str, float]) -> str | None:
        if self.evidence is None:
            return None
        for name, text in save_logs(self.crew, since).items():
            self.evidence.keep(f"log-{name}.txt", text)
        return str(self.evidence.path)


def _observe(followers: Followers, name: str, report: Report) -> None:
    shard, of = report.part("loading", "shard"), report.part("loading", "of")
    if isinstance(shard, int) and isinstance(of, int):
        followers.observed(name, shard, of)


def _gave_up(name: str, report: Report) -> str | None:
    if report.phase == "gave-up":
        text = report.part("status", "supervisor", "text") or "its restarts are used up"
        return f"the supervisor of {name} gave up: {text}"
    if report.unit(SUPERVISOR) == "failed":
        return (
            f"{SUPERVISOR} of {name} failed: {report.part('status', 'units', SUPERVISOR, 'text')}"
        )
    return None
