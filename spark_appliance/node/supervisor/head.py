"""The head's supervisor: starts all ranks in order, and stops all when one fails."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from spark_appliance.names import READY
from spark_appliance.node.errors import GaveUpError, NodeError
from spark_appliance.node.journal import Journal
from spark_appliance.node.plan import NodeContext
from spark_appliance.node.supervisor.hub import Hub
from spark_appliance.node.supervisor.protocol import Timing
from spark_appliance.node.supervisor.rank import Down, LocalRank
from spark_appliance.node.supervisor.restarts import Restarts
from spark_appliance.node.supervisor.state import Phase, State
from spark_appliance.node.systemctl import Units, UnitState

JOB_GRACE: Final = 10.0
"""Seconds that a queued start job may take to begin."""

READY_STOP_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Incident:
    """Why a group came down. One that does not count uses up no restart."""

    text: str
    counts: bool = True


@dataclass(slots=True)
class Head:
    """Runs the group until it is told to stop or gives up.

    Ranks other than the own one are reached through ``hub``; a single node has none.
    """

    context: NodeContext
    local: LocalRank
    hub: Hub
    units: Units
    restarts: Restarts
    state: State
    journal: Journal
    timing: Timing
    _troubles: dict[str, Down] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the group running.

        Raises:
            GaveUpError: when the restarts of the window are used up; every rank is stopped then.
        """
        try:
            while not stop.is_set():
                if not await self._gather(stop):
                    break
                incident = await self._attempt(stop)
                if incident is None:
                    break
                cause = await self._cause(incident, stop)
                if stop.is_set():  # an ordered stop uses up no restart and is no giving up
                    break
                await self._recover(cause, stop)
        finally:
            # also when cancelled or broken: nothing stays up unsupervised
            if self.state.phase is not Phase.GAVE_UP:
                await self._stop_all(kill=False)
                self.state.enter(Phase.STOPPED, "every rank is stopped")
            await self.hub.broadcast({"type": "goodbye", "text": self.state.line})
            await self.hub.close()

    def trouble(self, node: str, down: Down) -> None:
        """Take note of the first thing that each rank says of its end."""
        self._troubles.setdefault(node, down)
        self._news.set()

    async def _gather(self, stop: asyncio.Event) -> bool:
        while self.hub.missing:
            self.state.enter(Phase.WAITING, f"for the supervisors of {_names(self.hub.missing)}")
            if not await _unless(stop, self.hub.change()):
                return False
        return not stop.is_set()

    async def _attempt(self, stop: asyncio.Event) -> Incident | None:
        """Start and serve until something happens; returns None when told to stop."""
        self._troubles.clear()
        self._news.clear()
        work = asyncio.create_task(self._start_and_serve())
        stopping = asyncio.create_task(stop.wait())
        trouble = asyncio.create_task(self._news.wait())
        tasks: set[asyncio.Task[Any]] = {work, stopping, trouble}
        try:
            if self.hub.missing:  # lost between gathering and now
                return Incident(f"{_names(self.hub.missing)}: supervisor lost", counts=False)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                return None
            for node, down in self._troubles.items():
                return Incident(f"{node}: {down.reason}", counts=not down.orderly)
            failure = work.exception()
            if isinstance(failure, NodeError):
                return Incident(str(failure))
            if failure is not None:
                raise failure
            return Incident("the group ended")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _cause(self, first: Incident, stop: asyncio.Event) -> Incident:
        """Return the cause of a failure, which need not be what was heard of first.

        When a rank dies the others end by themselves and may be heard before it. SIGKILL never
        comes from a peer, so a rank that it ended is the cause; else it is the first one heard.
        """
        end = time.monotonic() + self.timing.settle
        while first.counts and not stop.is_set():
            for node, down in self._troubles.items():
                if down.killed:
                    return Incident(f"{node}: {down.reason}")
            left = end - time.monotonic()
            if left <= 0 or len(self._troubles) > len(self.hub.workers):
                break
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await _unless(stop, self._news.wait())
        return first

    async def _start_and_serve(self) -> None:
        seconds = float(self.context.plan.view("health").integer("ready_timeout"))
        # one that a crashed supervisor left behind would call the new group ready at once
        await self._tolerate(self.units.stop(READY, seconds=READY_STOP_SECONDS))
        for group in self.context.plan.groups("start_order"):
            self.state.enter(Phase.STARTING, _names(group))
            await _all(*(self._start(node, seconds) for node in group))
        await self.units.start(READY, seconds=JOB_GRACE, wait=False)
        self.state.enter(Phase.LOADING, "every rank runs, waiting for a right answer")
        await self._serve()

    async def _serve(self) -> None:
        begun = False
        start = time.monotonic()
        while True:
            await asyncio.sleep(self.timing.poll)
            state = (await self.units.show([READY])).get(READY, UnitState(READY, "unknown"))
            if state.running and self.state.phase is not Phase.SERVING:
                self.state.enter(Phase.SERVING, "the endpoint gives right answers")
                await self.hub.broadcast({"type": "ready", "ready": True})
            begun = begun or state.active == "activating" or state.running
            waited = time.monotonic() - start
            if state.active in ("failed", "inactive", "unknown") and (
                begun or state.active == "failed" or waited > JOB_GRACE
            ):
                raise NodeError(f"{self.context.name}: {state.describe()} (journalctl -u {READY})")

    async def _start(self, node: str, seconds: float) -> None:
        if node == self.context.name:
            try:
                await self.local.start(seconds)
            except NodeError as error:
                raise NodeError(f"{node}: {error}") from None
            return
        link = self.hub.links.get(node)
        if link is None:
            raise NodeError(f"{node}: supervisor lost")
        await link.start(seconds)

    async def _recover(self, incident: Incident, stop: asyncio.Event) -> None:
        self.state.failed(f"stopping every rank, because of {incident.text}")
        await self._stop_all(kill=True)
        if not incident.counts:
            return
        delay = self.restarts.next(time.monotonic())
        self.state.restarts = self.restarts.times
        if delay is None:
            text = (
                f"after {self.restarts.limit} restarts within {self.restarts.window:g} s; last: "
                f"{incident.text}; then: systemctl restart spark.target"
            )
            self.state.enter(Phase.GAVE_UP, text)
            raise GaveUpError(f"gave up {text}")
        used = len(self.restarts.times)
        self.state.enter(
            Phase.BACKOFF,
            f"restart {used} of {self.restarts.limit} in {delay:g} s, after {incident.text}",
        )
        await _unless(stop, asyncio.sleep(delay))

    async def _stop_all(self, *, kill: bool) -> None:
        self.state.enter(Phase.STOPPING, "every rank")
        await self.hub.broadcast({"type": "ready", "ready": False})
        await self._tolerate(self.units.stop(READY, seconds=READY_STOP_SECONDS))
        links = list(self.hub.links.values())
        own = self.local.stop(kill=kill)
        others = [self._tolerate(link.stop(kill=kill)) for link in links]
        if kill:
            await asyncio.gather(self._tolerate(own), *others)
        else:
            # the head first: a worker's engine waits for rank 0 to say goodbye
            await self._tolerate(own)
            await asyncio.gather(*others)

    async def _tolerate(self, step: Coroutine[Any, Any, None]) -> None:
        try:
            await step
        except NodeError as error:
            self.journal.error(str(error))


async def _unless(stop: asyncio.Event, step: Coroutine[Any, Any, Any]) -> bool:
    """Wait for a step or for stop; returns whether it was the step."""
    task = asyncio.create_task(step)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return not stopping.done()
    finally:
        for each in (task, stopping):
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await each


async def _all(*steps: Coroutine[Any, Any, None]) -> None:
    """Run steps at once; the first failure cancels the others and is raised."""
    tasks = [asyncio.create_task(step) for step in steps]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _names(nodes: list[str]) -> str:
    return ", ".join(nodes)
