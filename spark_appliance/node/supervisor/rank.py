"""The rank on this node: its engine under systemd, watched while it should run."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from spark_appliance.names import ENGINE, GUARD, HEAD_STOP_TIMEOUT, WORKER_STOP_TIMEOUT
from spark_appliance.node.errors import NodeError
from spark_appliance.node.files import read_json, remove, write_atomic
from spark_appliance.node.guard import READY_FILE
from spark_appliance.node.guard import STATE_FILE as GUARD_STATE_FILE
from spark_appliance.node.journal import Journal, gib
from spark_appliance.node.plan import NodeContext
from spark_appliance.node.systemctl import Units, UnitState

SHOW_FAILURES: Final = 5
"""Looks in a row at which systemd may give no answer before the rank counts as lost."""

GUARD_SECONDS: Final = 120.0
"""Seconds for the guard to start; it waits for enough memory (systemd's own limit is 90 s)."""

STOP_MARGIN: Final = 30
"""Seconds beyond the unit's own stop timeout: SIGKILL and removing a container take time."""


@dataclass(frozen=True, slots=True)
class Down:
    """How a rank ended. ``killed``: by SIGKILL; ``orderly``: its supervisor was told to leave."""

    reason: str
    killed: bool = False
    orderly: bool = False


@dataclass(slots=True)
class LocalRank:
    """Starts, watches and stops the engine of this node.

    ``on_down`` is called once when an engine that should run does not.
    """

    context: NodeContext
    units: Units
    journal: Journal
    poll: float
    on_down: Callable[[Down], None]
    _watch: asyncio.Task[None] | None = field(default=None)

    @property
    def stop_seconds(self) -> float:
        """Longest time that stopping may take."""
        unit = HEAD_STOP_TIMEOUT if self.context.is_head else WORKER_STOP_TIMEOUT
        return float(unit + STOP_MARGIN)

    async def clear(self) -> None:
        """Stop an engine that an earlier supervisor left behind: it belongs to no group.

        Raises:
            NodeError: when it cannot be stopped.
        """
        states = await self.units.show([ENGINE])
        state = states.get(ENGINE)
        if state is not None and state.active not in ("inactive", "failed"):
            self.journal.notice(f"{ENGINE} {state.active} without a supervisor: stopping it")
            await self.stop(kill=True)

    async def start(self, seconds: float) -> None:
        """Start the engine and watch it.

        The guard is armed first. It is no requirement of the engine's unit: systemd would then
        restart this one engine whenever it restarts the guard.

        Raises:
            NodeError: when the guard does not arm or the engine not start within ``seconds``.
        """
        self.set_ready(ready=False)
        if not (await self.units.show([GUARD])).get(GUARD, UnitState(GUARD, "")).running:
            await self.units.start(GUARD, seconds=GUARD_SECONDS)
        await self.units.start(ENGINE, seconds=seconds)
        self._watch = asyncio.create_task(self._look())

    async def stop(self, *, kill: bool) -> None:
        """Stop the engine. ``kill``: at once, for a group that is broken anyway.

        Raises:
            NodeError: when it stays.
        """
        await self._end_watch()
        self.set_ready(ready=False)
        if kill:
            # ranks of a broken group hang in NCCL and would only answer SIGKILL
            await self.units.kill(ENGINE)
        await self.units.stop(ENGINE, seconds=self.stop_seconds)

    def set_ready(self, *, ready: bool) -> None:
        """Tell the memory guard of this node whether the group serves."""
        path = self.context.path(READY_FILE)
        try:
            if ready:
                write_atomic(path, "")
            else:
                remove(path)
        except NodeError as error:
            self.journal.warning(str(error))

    async def _end_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def _look(self) -> None:
        failures = 0
        invocation: str | None = None
        while True:
            await asyncio.sleep(self.poll)
            try:
                states = await self.units.show([ENGINE, GUARD])
            except NodeError as error:
                failures += 1
                if failures >= SHOW_FAILURES:
                    self.on_down(Down(str(error)))
                    return
                continue
            failures = 0
            engine = states.get(ENGINE, UnitState(ENGINE, "unknown"))
            reason = self._wrong(engine, states.get(GUARD, UnitState(GUARD, "unknown")))
            if reason is None and invocation not in (None, engine.invocation):
                reason = (
                    f"{ENGINE} was restarted by somebody else: a rank that restarts alone never "
                    "joins its group"
                )
            invocation = engine.invocation
            if reason is not None:
                self.on_down(Down(reason, killed=engine.killed))
                return

    def _wrong(self, engine: UnitState, guard: UnitState) -> str | None:
        if not engine.running:
            return engine.describe() + self._killed_by_guard()
        if guard.active in ("failed", "inactive", "unknown"):
            return f"{guard.describe()}: without the memory guard the engine may not run"
        return None

    def _killed_by_guard(self) -> str:
        data = read_json(self.context.path(GUARD_STATE_FILE))
        try:
            if data is None or not data["killed"] or time.time() - data["time"] > 60:
                return ""
            available, threshold = data["available_bytes"], data["threshold_bytes"]
            return f" (memory guard: {gib(available)} available, threshold {gib(threshold)})"
        except (KeyError, TypeError):
            return ""
