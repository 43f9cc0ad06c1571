"""A worker's supervisor: does what the head says, and stops its rank when the head is gone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass, field

from spark_appliance.node.errors import NodeError
from spark_appliance.node.journal import Journal
from spark_appliance.node.supervisor.protocol import (
    MAX_LINE,
    Channel,
    Identity,
    LostError,
    Message,
    ProtocolError,
    RefusedError,
    Timing,
    beat,
    join,
)
from spark_appliance.node.supervisor.rank import Down, LocalRank
from spark_appliance.node.supervisor.state import Phase, State


@dataclass(slots=True)
class Worker:
    """Keeps a connection to the head. ``source`` is the address to come from, None for any."""

    me: Identity
    head: str
    address: str
    port: int
    source: str | None
    local: LocalRank
    state: State
    journal: Journal
    timing: Timing
    _channel: Channel | None = field(default=None)
    _start: asyncio.Task[None] | None = field(default=None)
    _number: int = 0
    _running: bool = False
    _last_word: str = ""
    _sends: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve the head until told to stop; the rank is stopped whenever the head is not there."""
        self.state.enter(Phase.WAITING, f"for the supervisor of {self.head}")
        try:
            while not stop.is_set():
                reason = await self._session_until(stop)
                if stop.is_set():
                    break
                await self._stop_rank(reason)
                self.state.enter(Phase.WAITING, f"for {self.head}{self._last_word}: {reason}")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.timing.reconnect):
                        await stop.wait()
        finally:
            await self._leave()
            self.state.enter(Phase.STOPPED, "this rank is stopped")

    def down(self, down: Down) -> None:
        """Report that the engine is down."""
        self.journal.error(down.reason)
        self._send_soon(
            {"type": "down", "id": self._number, "reason": down.reason, "killed": down.killed}
        )

    async def _session_until(self, stop: asyncio.Event) -> str:
        session = asyncio.create_task(self._session())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({session, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if session.done():
                return session.result()
            if self._channel is not None:
                with contextlib.suppress(LostError):
                    await self._channel.send({"type": "leaving", "reason": "its supervisor stops"})
            return "stopping"
        finally:
            for task in (session, stopping):
                task.cancel()
            await asyncio.gather(session, stopping, return_exceptions=True)

    async def _session(self) -> str:
        """Connect and serve; returns why it ended."""
        local = (self.source, 0) if self.source is not None else None
        try:
            async with asyncio.timeout(self.timing.handshake):
                reader, writer = await asyncio.open_connection(
                    self.address, self.port, limit=MAX_LINE, family=socket.AF_INET, local_addr=local
                )
        except TimeoutError:
            return f"no connection to {self.address} port {self.port}: timed out"
        except OSError as error:
            return f"no connection to {self.address} port {self.port}: {error.strerror or error}"
        channel = Channel(reader, writer)
        pulse = None
        try:
            await join(channel, self.me, self.head, self.timing.handshake)
            self._channel = channel
            self._last_word = ""
            self.state.enter(Phase.WAITING, f"connected to {self.head}, for its start")
            pulse = asyncio.create_task(beat(channel, self.timing))
            while True:
                await self._handle(await channel.receive(self.timing.deadline))
        except (LostError, ProtocolError, RefusedError) as error:
            return str(error)
        finally:
            self._channel = None
            if pulse is not None:
                pulse.cancel()
            await channel.close()

    async def _handle(self, message: Message) -> None:
        kind = message["type"]
        if kind == "start":
            await self._end_start()
            self._start = asyncio.create_task(self._do_start(message))
        elif kind == "stop":
            await self._end_start()
            self._start = asyncio.create_task(self._do_stop(message))
        elif kind == "ready":
            self.local.set_ready(ready=message.get("ready") is True and self._running)
        elif kind == "goodbye":
            self._last_word = f" (its last word: {str(message.get('text'))[:1000]})"
        elif kind != "heartbeat":
            raise ProtocolError(f"an unknown message {kind[:40]!r}")

    async def _do_start(self, message: Message) -> None:
        number, seconds = message.get("id"), message.get("seconds")
        self._number = number if isinstance(number, int) else 0
        try:
            self.state.enter(Phase.STARTING, "this rank")
            await self.local.start(float(seconds) if isinstance(seconds, int | float) else 600.0)
            self._running = True
            self.state.enter(Phase.RUNNING, "this rank runs")
            self._send_soon({"type": "result", "id": number, "ok": True})
        except NodeError as error:
            self.journal.error(str(error))
            self._send_soon({"type": "result", "id": number, "ok": False, "reason": str(error)})

    async def _do_stop(self, message: Message) -> None:
        number = message.get("id")
        answer: Message = {"type": "result", "id": number, "ok": True}
        try:
            self.state.enter(Phase.STOPPING, f"{self.head} says so")
            self._running = False
            await self.local.stop(kill=message.get("kill") is True)
            self.state.enter(Phase.WAITING, f"connected to {self.head}, for its start")
        except NodeError as error:
            self.journal.error(str(error))
            answer |= {"ok": False, "reason": str(error)}
        self._send_soon(answer)

    async def _stop_rank(self, reason: str) -> None:
        """Stop the rank because the head is gone: it would only hang in NCCL."""
        busy = self._start is not None and not self._start.done()
        await self._end_start()
        if not (self._running or busy):
            return
        self.state.failed(f"stopping this rank: {reason}")
        self._running = False
        try:
            await self.local.stop(kill=True)
        except NodeError as error:
            self.journal.error(str(error))

    async def _leave(self) -> None:
        await self._end_start()
        self._running = False
        try:
            self.state.enter(Phase.STOPPING, "this rank")
            await self.local.stop(kill=False)
        except NodeError as error:
            self.journal.error(str(error))

    async def _end_start(self) -> None:
        task, self._start = self._start, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _send_soon(self, message: Message) -> None:
        if self._channel is None:
            return
        task = asyncio.create_task(self._send(self._channel, message))
        self._sends.add(task)
        task.add_done_callback(self._sends.discard)

    async def _send(self, channel: Channel, message: Message) -> None:
        with contextlib.suppress(LostError):
            await channel.send(message)
