from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spark_appliance.node.errors import NodeError
from spark_appliance.node.supervisor.protocol import (
    MAX_LINE,
    Channel,
    Identity,
    LostError,
    ProtocolError,
    RefusedError,
    admit,
    join,
    read_key,
)
from spark_appliance.node.supervisor.restarts import Restarts

KEY = b"0123456789abcdef0123456789abcdef"
HEAD = Identity("spark1", "plan", KEY)
WORKER = Identity("spark2", "plan", KEY)


@asynccontextmanager
async def wire() -> AsyncIterator[tuple[Channel, Channel, asyncio.StreamWriter]]:
    """Two ends of a connection, and the raw writer of the second."""
    left, right = socket.socketpair()
    one = await asyncio.open_connection(sock=left, limit=MAX_LINE)
    two = await asyncio.open_connection(sock=right, limit=MAX_LINE)
    try:
        yield Channel(*one), Channel(*two), two[1]
    finally:
        for _, writer in (one, two):
            writer.close()


async def meet(head: Identity, worker: Identity) -> tuple[Any, Any]:
    async with wire() as (left, right, _):
        return tuple(
            await asyncio.gather(
                admit(left, head, 5), join(right, worker, "spark1", 5), return_exceptions=True
            )
        )


def run(make: Callable[[], Awaitable[Any]]) -> Any:
    async def body() -> Any:
        async with asyncio.timeout(20):
            return await make()

    return asyncio.run(body())


@pytest.mark.parametrize("key", [KEY, None])
def test_both_sides_agree(key: bytes | None) -> None:
    async def body() -> None:
        async with wire() as (left, right, _):
            name, _ = await asyncio.gather(
                admit(left, Identity("spark1", "plan", key), 5),
                join(right, Identity("spark2", "plan", key), "spark1", 5),
            )
            assert name == "spark2"
            await left.send({"type": "start", "id": 1})
            await left.send({"type": "stop", "id": 2})
            assert await right.receive(5) == {"type": "start", "id": 1}
            assert await right.receive(5) == {"type": "stop", "id": 2}
            await right.send({"type": "heartbeat"})
            assert await left.receive(5) == {"type": "heartbeat"}

    run(body)


def test_another_key_is_refused_on_both_sides() -> None:
    other = Identity("spark2", "plan", b"x" * 32)
    head, worker = run(lambda: meet(HEAD, other))
    assert isinstance(head, RefusedError)
    assert isinstance(worker, RefusedError)
    assert "the cluster keys differ" in str(head)
    assert str(worker) == f"spark1 refuses: {head}"


@pytest.mark.parametrize(("one", "two"), [(KEY, None), (None, KEY)])
def test_a_key_on_one_side_only_is_refused(one: bytes | None, two: bytes | None) -> None:
    head, worker = run(lambda: meet(Identity("spark1", "p", one), Identity("spark2", "p", two)))
    assert isinstance(head, RefusedError)
    assert isinstance(worker, RefusedError)
    assert "copy the same key to every node, or to none" in str(worker)


def test_another_plan_is_refused() -> None:
    head, worker = run(lambda: meet(HEAD, Identity("spark2", "old plan", KEY)))
    assert isinstance(head, RefusedError)
    assert "the plans differ: install the same plan on every node" in str(worker)


def test_a_head_without_the_key_is_not_obeyed() -> None:
    """Somebody who took the head's address: relays a challenge, but cannot prove the key."""

    async def body() -> None:
        async with wire() as (left, right, _):
            joining = asyncio.create_task(join(right, WORKER, "spark1", 5))
            challenge = {"type": "challenge", "nonce": "00", "authentication": "hmac-sha256"}
            await left.send(challenge)
            hello = await left.receive(5)
            await left.send({"type": "welcome", "node": "spark1", "mac": hello["mac"]})
            with pytest.raises(RefusedError, match="does not hold the cluster key"):
                await joining

    run(body)


def test_a_recorded_hello_is_worth_nothing() -> None:
    async def record() -> dict[str, Any]:
        async with wire() as (left, right, _):
            joining = asyncio.create_task(join(right, WORKER, "spark1", 5))
            challenge = {"type": "challenge", "nonce": "00", "authentication": "hmac-sha256"}
            await left.send(challenge)
            hello = await left.receive(5)
            joining.cancel()
            return hello

    async def replay(hello: dict[str, Any]) -> None:
        async with wire() as (left, right, _):
            admitting = asyncio.create_task(admit(left, HEAD, 5))
            await right.receive(5)
            await right.send(hello)
            with pytest.raises(RefusedError, match="keys differ"):
                await admitting

    hello = run(record)
    run(lambda: replay(hello))


async def secured(left: Channel, right: Channel) -> None:
    await asyncio.gather(admit(left, HEAD, 5), join(right, WORKER, "spark1", 5))


@pytest.mark.parametrize(
    "line",
    [
        {"type": "leaving"},
        {"type": "leaving", "seq": 0, "mac": "0" * 64},
        {"type": "leaving", "seq": 0, "mac": 1},
        {"type": "leaving", "seq": 0, "mac": "\u00e9"},
    ],
)
def test_a_line_put_in_by_somebody_else_ends_the_connection(line: dict[str, Any]) -> None:
    async def body() -> None:
        async with wire() as (left, right, raw):
            await secured(left, right)
            raw.write(json.dumps(line).encode() + b"\n")
            with pytest.raises(ProtocolError, match="wrong code"):
                await left.receive(5)

    run(body)


def test_lines_cannot_be_repeated_or_sent_back() -> None:
    async def body() -> None:
        sent: list[bytes] = []
        async with wire() as (left, right, raw):
            await secured(left, right)
            write = raw.write

            def keep(data: bytes) -> None:
                sent.append(data)
                write(data)

            raw.write = keep  # type: ignore[method-assign]
            await right.send({"type": "heartbeat"})
            assert await left.receive(5) == {"type": "heartbeat"}
            write(sent[0])
            with pytest.raises(ProtocolError, match="out of order"):
                await left.receive(5)
        async with wire() as (left, right, raw):
            await secured(left, right)
            # what the head says, played back to the head
            right_session = right._session
            right.secure(right_session or b"", "head", "head")
            await right.send({"type": "leaving"})
            with pytest.raises(ProtocolError, match="wrong code"):
                await left.receive(5)

    run(body)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(garbage=st.binary(max_size=300) | st.text(max_size=200).map(str.encode))
def test_garbage_ends_in_typed_errors(garbage: bytes) -> None:
    async def body() -> None:
        for side in ("head", "worker"):
            async with wire() as (left, _, raw):
                step = admit(left, HEAD, 5) if side == "head" else join(left, WORKER, "spark1", 5)
                raw.write(garbage + b"\n")
                raw.write_eof()
                with pytest.raises((ProtocolError, LostError, RefusedError)):
                    await step

    run(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    fields=st.dictionaries(
        st.sampled_from(["type", "node", "nonce", "plan", "mac", "version", "reason", "x"]),
        JSON | st.sampled_from(["hello", "challenge", "refused", "hmac-sha256"]),
    )
)
def test_any_message_instead_of_a_handshake_ends_in_typed_errors(fields: dict[str, Any]) -> None:
    test_garbage_ends_in_typed_errors.hypothesis.inner_test(json.dumps(fields).encode())  # type: ignore[attr-defined]


def test_an_endless_line_is_cut_off() -> None:
    async def body() -> None:
        async with wire() as (left, _, raw):
            raw.write(b"x" * (MAX_LINE * 2))
            with pytest.raises(ProtocolError, match="more than 65536 bytes"):
                await left.receive(5)

    run(body)


def test_silence_is_a_loss() -> None:
    async def body() -> None:
        async with wire() as (left, _, _):
            with pytest.raises(LostError, match=r"silent for 0\.05 s"):
                await left.receive(0.05)

    run(body)


def test_cluster_key_files(tmp_path: Path) -> None:
    path = tmp_path / "cluster-key"
    assert read_key(path) is None
    path.write_bytes(b"0123456789abcdef\n")
    path.chmod(0o640)
    with pytest.raises(NodeError, match=rf"mode 0640\): chmod 600 {path}"):
        read_key(path)
    path.chmod(0o600)
    assert read_key(path) == b"0123456789abcdef"
    path.write_bytes(b"short\n")
    with pytest.raises(NodeError, match="shorter than 16 bytes"):
        read_key(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(NodeError, match="cannot read"):
        read_key(path)


def test_restarts_back_off_and_end() -> None:
    restarts = Restarts(3, 3600, (10, 60, 300))
    assert [restarts.next(now) for now in (0, 100, 200, 300)] == [10, 60, 300, None]
    # the window slides
    assert restarts.next(3600) == 300
    assert restarts.next(3650) is None
    assert restarts.next(10_000) == 10


@given(
    limit=st.integers(0, 5),
    window=st.integers(1, 100),
    steps=st.lists(st.floats(0, 50), max_size=40),
)
def test_never_more_restarts_than_the_limit_in_any_window(
    limit: int, window: int, steps: list[float]
) -> None:
    restarts = Restarts(limit, window, (1,))
    now, granted = 0.0, []
    for step in steps:
        now += step
        if restarts.next(now) is not None:
            granted.append(now)
    for moment in granted:
        assert sum(moment <= other < moment + window for other in granted) <= limit
