"""Lines of JSON between supervisors: framing, mutual authentication, heartbeats.

With a cluster key both sides prove that they hold it (HMAC-SHA256 over both nonces) and every
later line carries a sequence number and a code under a session key; nobody on the LAN can start,
stop or impersonate a rank. Without a key only the addresses of the plan protect it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from spark_appliance.node.errors import NodeError

PROTOCOL_VERSION: Final = 1

MAX_LINE: Final = 65536
"""Longest line, bytes."""

MIN_KEY: Final = 16
"""Shortest cluster key, bytes: 128 bits."""

Message = dict[str, Any]


class ProtocolError(Exception):
    """The other side sent something that is no line of this protocol; the connection ends."""


class RefusedError(Exception):
    """The other side may not take part; the text says why and what to do."""


class LostError(Exception):
    """The connection is gone or silent for too long."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. A peer that says nothing for ``deadline`` is lost.

    ``settle``: how long the head listens to the other ranks before it names the cause.
    """

    heartbeat: float = 2.0
    deadline: float = 10.0
    handshake: float = 10.0
    poll: float = 1.0
    reconnect: float = 5.0
    settle: float = 5.0


@dataclass(frozen=True, slots=True)
class Identity:
    """What this node brings to a handshake. ``key`` is None where the cluster has no key."""

    node: str
    plan: str
    key: bytes | None


def read_key(path: Path) -> bytes | None:
    """Return the cluster key, None when there is no file.

    Raises:
        NodeError: when it is too short, cannot be read or others may read it.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(path.stat().st_mode)
            key = file.read(MAX_LINE).strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NodeError(f"cannot read {path}: {error.strerror}") from None
    if mode & 0o077:
        raise NodeError(f"{path} may be read by others (mode {mode:04o}): chmod 600 {path}")
    if len(key) < MIN_KEY:
        raise NodeError(
            f"{path} is shorter than {MIN_KEY} bytes: write 'openssl rand -hex 32' into it, "
            "the same on every node"
        )
    return key


class Channel:
    """One connection. Lines are signed once a handshake has set a session key."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._session: bytes | None = None
        self._sent = 0
        self._received = 0
        self._outgoing = b""
        self._incoming = b""

    def secure(self, session: bytes, outgoing: str, incoming: str) -> None:
        """Sign from now on; the labels keep a line from being played back to its sender."""
        self._session = session
        self._outgoing, self._incoming = outgoing.encode(), incoming.encode()

    async def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            LostError: when the connection is gone.
        """
        line = dict(message)
        if self._session is not None:
            line["seq"] = self._sent
            line["mac"] = _code(self._session, self._outgoing, _canonical(line))
            self._sent += 1
        try:
            self._writer.write(_canonical(line) + b"\n")
            await self._writer.drain()
        except (OSError, RuntimeError) as error:
            raise LostError(f"connection lost: {error}") from None

    async def receive(self, seconds: float) -> Message:
        """Return the next message.

        Raises:
            LostError: when the connection ends or nothing comes within ``seconds``.
            ProtocolError: when it is no message, or not from who it should be.
        """
        try:
            async with asyncio.timeout(seconds):
                line = await self._reader.readline()
        except TimeoutError:
            raise LostError(f"silent for {seconds:g} s") from None
        except ValueError:
            raise ProtocolError(f"a line of more than {MAX_LINE} bytes") from None
        except OSError as error:
            raise LostError(f"connection lost: {error.strerror or error}") from None
        if not line.endswith(b"\n"):
            raise LostError("connection closed")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise ProtocolError("a line that is no JSON") from None
        if not isinstance(message, dict) or not isinstance(message.get("type"), str):
            raise ProtocolError("a line that is no message")
        if self._session is not None:
            self._verify(self._session, message)
        return message

    def _verify(self, session: bytes, message: Message) -> None:
        mac = message.pop("mac", None)
        expected = _code(session, self._incoming, _canonical(message))
        if not isinstance(mac, str) or not hmac.compare_digest(mac.encode(), expected.encode()):
            raise ProtocolError("a message with a wrong code")
        if message.pop("seq", None) != self._received:
            raise ProtocolError("a message out of order")
        self._received += 1

    async def close(self) -> None:
        """Close the connection; never waits long for the other side."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1):
                await self._writer.wait_closed()


async def admit(channel: Channel, me: Identity, seconds: float) -> str:
    """The head's side of the handshake: returns the name of the worker that was let in.

    The caller decides whether that name may come from that address, and then calls ``welcome``.

    Raises:
        RefusedError: after having told the other side why.
        LostError, ProtocolError: as ``Channel.receive``.
    """
    nonce = secrets.token_hex(32)
    scheme = "none" if me.key is None else "hmac-sha256"
    await channel.send(
        {
            "type": "challenge",
            "version": PROTOCOL_VERSION,
            "node": me.node,
            "nonce": nonce,
            "authentication": scheme,
        }
    )
    hello = await channel.receive(seconds)
    node, theirs = hello.get("node"), hello.get("nonce")
    if hello["type"] == "refused":
        raise RefusedError(f"the worker refuses: {_text(hello.get('reason'))}")
    if (
        hello["type"] != "hello"
        or not isinstance(node, str)
        or not isinstance(theirs, str)
        or len(theirs) > 128
    ):
        raise ProtocolError("no hello")
    if me.key is not None:
        plan = _text(hello.get("plan"))
        expected = _code(me.key, b"worker", _proof(nonce, theirs, node, me.node, plan))
        mac = hello.get("mac")
        if not isinstance(mac, str) or not hmac.compare_digest(mac.encode(), expected.encode()):
            await refuse(channel, "the cluster keys differ: copy the same key to every node")
    if hello.get("version") != PROTOCOL_VERSION:
        await refuse(channel, "spark-node has another version: install the same one everywhere")
    if hello.get("plan") != me.plan:
        await refuse(channel, "the plans differ: install the same plan on every node")
    channel_nonces = (nonce, theirs)
    await channel.send(_welcome(me, node, channel_nonces))
    if me.key is not None:
        channel.secure(_session(me.key, *channel_nonces), "head", "worker")
    return node


async def join(channel: Channel, me: Identity, head: str, seconds: float) -> None:
    """The worker's side of the handshake.

    Raises:
        RefusedError: when the head refuses, or is not who it should be.
        LostError, ProtocolError: as ``Channel.receive``.
    """
    challenge = await channel.receive(seconds)
    nonce = challenge.get("nonce")
    if challenge["type"] != "challenge" or not isinstance(nonce, str) or len(nonce) > 128:
        raise ProtocolError("no challenge")
    scheme = "none" if me.key is None else "hmac-sha256"
    if challenge.get("authentication") != scheme:
        here, there = ("no", "a") if me.key is None else ("a", "no")
        await refuse(
            channel,
            f"{me.node} has {here} cluster key, {head} has {there} one: copy the same key to "
            "every node, or to none",
        )
    mine = secrets.token_hex(32)
    hello: Message = {
        "type": "hello",
        "version": PROTOCOL_VERSION,
        "node": me.node,
        "nonce": mine,
        "plan": me.plan,
    }
    if me.key is not None:
        hello["mac"] = _code(me.key, b"worker", _proof(nonce, mine, me.node, head, me.plan))
    await channel.send(hello)
    answer = await channel.receive(seconds)
    if answer["type"] == "refused":
        raise RefusedError(f"{head} refuses: {_text(answer.get('reason'))}")
    if answer != _welcome(Identity(head, me.plan, me.key), me.node, (nonce, mine)):
        raise RefusedError(f"{head} does not hold the cluster key: nothing is accepted from it")
    if me.key is not None:
        channel.secure(_session(me.key, nonce, mine), "worker", "head")


async def refuse(channel: Channel, reason: str) -> None:
    """Tell the other side why and raise it.

    Raises:
        RefusedError: always.
    """
    with contextlib.suppress(LostError):
        await channel.send({"type": "refused", "reason": reason})
    raise RefusedError(reason)


async def beat(channel: Channel, timing: Timing) -> None:
    """Send heartbeats until the connection is lost."""
    with contextlib.suppress(LostError):
        while True:
            await channel.send({"type": "heartbeat"})
            await asyncio.sleep(timing.heartbeat)


def _welcome(me: Identity, node: str, nonces: tuple[str, str]) -> Message:
    message: Message = {"type": "welcome", "node": me.node}
    if me.key is not None:
        message["mac"] = _code(me.key, b"head", _proof(*nonces, node, me.node, me.plan))
    return message


def _proof(*parts: str) -> bytes:
    return _canonical({"parts": list(parts), "version": PROTOCOL_VERSION})


def _session(key: bytes, head_nonce: str, worker_nonce: str) -> bytes:
    return hmac.digest(key, b"session" + _proof(head_nonce, worker_nonce), "sha256")


def _code(key: bytes, label: bytes, content: bytes) -> str:
    return hmac.new(key, label + b"\0" + content, hashlib.sha256).hexdigest()


def _canonical(message: Message) -> bytes:
    return json.dumps(message, sort_keys=True, separators=(",", ":")).encode()


def _text(value: object) -> str:
    return value[:500] if isinstance(value, str) else ""
