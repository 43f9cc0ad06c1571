"""The head's end of the connections to the workers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from spark_appliance.names import WORKER_STOP_TIMEOUT
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
    admit,
    beat,
    refuse,
)
from spark_appliance.node.supervisor.rank import STOP_MARGIN, Down

REMEMBERED: Final = 256
"""Refusals that are remembered, so that the same one is logged once."""


@dataclass(slots=True)
class Link:
    """A worker that is connected."""

    node: str
    channel: Channel
    _numbers: count[int] = field(default_factory=lambda: count(1))
    _pending: dict[int, asyncio.Future[Message]] = field(default_factory=dict)
    current_start: int = 0

    async def start(self, seconds: float) -> None:
        """Start the worker's rank.

        Raises:
            NodeError: when it does not start.
        """
        number = next(self._numbers)
        self.current_start = number
        await self._call({"type": "start", "id": number, "seconds": seconds}, seconds + 30)

    async def stop(self, *, kill: bool) -> None:
        """Stop the worker's rank.

        Raises:
            NodeError: when it stays.
        """
        self.current_start = 0
        message = {"type": "stop", "id": next(self._numbers), "kill": kill}
        await self._call(message, WORKER_STOP_TIMEOUT + STOP_MARGIN + 10)

    async def tell(self, message: Message) -> None:
        """Send what needs no answer; a lost connection is seen by its reader."""
        with contextlib.suppress(LostError):
            await self.channel.send(message)

    def answer(self, message: Message) -> None:
        """Hand a result to whoever waits for it."""
        number = message.get("id")
        future = self._pending.pop(number, None) if isinstance(number, int) else None
        if future is not None and not future.done():
            future.set_result(message)

    def lost(self, reason: str) -> None:
        """Fail every call that waits."""
        for future in self._pending.values():
            if not future.done():
                future.set_exception(NodeError(f"{self.node}: {reason}"))
                future.exception()  # somebody may have stopped waiting
        self._pending.clear()

    async def _call(self, message: Message, seconds: float) -> None:
        number: int = message["id"]
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        try:
            await self.channel.send(message)
            async with asyncio.timeout(seconds):
                result = await future
        except LostError as error:
            raise NodeError(f"{self.node}: {error}") from None
        except TimeoutError:
            raise NodeError(f"{self.node}: no answer to '{message['type']}'") from None
        finally:
            self._pending.pop(number, None)
        if result.get("ok") is not True:
            raise NodeError(f"{self.node}: {str(result.get('reason'))[:1000]}")


@dataclass(slots=True)
class Hub:
    """Listens for workers and keeps one link to each.

    ``workers`` maps names to management addresses. ``on_trouble(node, down)`` is called
    when a worker is lost or leaves, or its rank goes down.
    """

    me: Identity
    workers: dict[str, str]
    timing: Timing
    journal: Journal
    on_trouble: Callable[[str, Down], None]
    on_change: Callable[[], None]
    links: dict[str, Link] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _server: asyncio.Server | None = None
    _handlers: set[asyncio.Task[None]] = field(default_factory=set)
    _logged: set[tuple[str, str]] = field(default_factory=set)

    @property
    def missing(self) -> list[str]:
        """Names of workers that are not connected."""
        return [name for name in self.workers if name not in self.links]

    async def listen(self, address: str, port: int) -> None:
        """Open the port.

        Raises:
            NodeError: when it cannot be opened.
        """
        try:
            self._server = await asyncio.start_server(
                self._accept, address, port, limit=MAX_LINE, family=socket.AF_INET
            )
        except OSError as error:
            raise NodeError(
                f"cannot listen on {address} port {port}: {error.strerror or error}"
            ) from None

    async def change(self) -> None:
        """Wait until a worker connects."""
        self._changed.clear()
        await self._changed.wait()

    async def broadcast(self, message: Message) -> None:
        """Send to every worker."""
        await asyncio.gather(*(link.tell(message) for link in list(self.links.values())))

    async def close(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            self._server.close()
        for handler in list(self._handlers):
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._handlers.add(task)
            task.add_done_callback(self._handlers.discard)
        peer = writer.get_extra_info("peername")
        address = str(peer[0]) if peer else "?"
        channel = Channel(reader, writer)
        try:
            await self._serve(channel, address)
        except (LostError, ProtocolError, RefusedError) as error:
            self._log_once(address, str(error))
        except asyncio.CancelledError:
            pass  # the hub closes
        finally:
            await channel.close()

    async def _serve(self, channel: Channel, address: str) -> None:
        names = await self._names_at(address)
        if not names:
            raise RefusedError("a stranger: its address is no worker's of the plan")
        try:
            async with asyncio.timeout(self.timing.handshake):
                node = await admit(channel, self.me, self.timing.handshake)
        except TimeoutError:
            raise LostError("no handshake in time") from None
        if node not in names:
            await refuse(channel, f"{node!r} may not come from {address}")
        old = self.links.get(node)
        if old is not None:
            # the worker came back before its old connection was missed
            await old.channel.close()
            self._drop(old, "connected again", orderly=False)
        link = Link(node, channel)
        self.links[node] = link
        self._forget(address)
        self.journal.notice(f"{node} is connected")
        self.on_change()
        self._changed.set()
        pulse = asyncio.create_task(beat(channel, self.timing))
        reason, orderly = "", False
        try:
            reason, orderly = await self._read(link)
        except (LostError, ProtocolError) as error:
            reason = str(error)
        except asyncio.CancelledError:
            reason, orderly = "the supervisor stops", True
            raise
        finally:
            pulse.cancel()
            self._drop(link, reason, orderly=orderly)

    async def _read(self, link: Link) -> tuple[str, bool]:
        while True:
            message = await link.channel.receive(self.timing.deadline)
            kind = message["type"]
            if kind == "result":
                link.answer(message)
            elif kind == "down":
                if link.current_start and message.get("id") == link.current_start:
                    reason, killed = str(message.get("reason"))[:1000], message.get("killed")
                    self.on_trouble(link.node, Down(reason, killed=killed is True))
            elif kind == "leaving":
                return str(message.get("reason"))[:200], True
            elif kind != "heartbeat":
                raise ProtocolError(f"an unknown message {kind[:40]!r}")

    def _drop(self, link: Link, reason: str, *, orderly: bool) -> None:
        if self.links.get(link.node) is not link:
            return
        del self.links[link.node]
        link.lost(reason)
        self.on_change()
        said = reason if orderly else f"supervisor lost: {reason}"
        self.on_trouble(link.node, Down(said, orderly=orderly))

    async def _names_at(self, address: str) -> set[str]:
        names = set()
        for name, host in self.workers.items():
            if address in await resolve(host):
                names.add(name)
        return names

    def _log_once(self, address: str, text: str) -> None:
        if (address, text) in self._logged:
            return
        if len(self._logged) >= REMEMBERED:
            self._logged.clear()
        self._logged.add((address, text))
        self.journal.warning(f"refused {address}: {text}")

    def _forget(self, address: str) -> None:
        self._logged = {entry for entry in self._logged if entry[0] != address}


async def resolve(host: str) -> set[str]:
    """Return the IPv4 addresses of a host, none when it cannot be resolved."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, None, family=socket.AF_INET, type=socket.SOCK_STREAM
        )
    except OSError:
        return set()
    return {str(entry[4][0]) for entry in found}
