"""What the measuring client costs: processor time for 16 streams of 500 events a second.

The same server (its own process) sends the same events to each reader, one after another:

- ``socket``: the reference, asyncio streams that only read bytes and note the time;
- ``client``: the client of ``spark-appliance bench`` (aiohttp), including the decoding of every
  event after the round;
- ``httpx``: the same recording loop on httpx, if it is installed.

Printed is the share of one core while streaming, and each reader's processor time as a ratio to
the reference in the same run. On a loaded machine a reader wakes less often and gets more events
at once, which costs less: compare ratios at about one event a read.

    python benchmarks/bench_client.py [--streams 16] [--rate 500] [--seconds 10]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from spark_appliance.bench import sse, table
from spark_appliance.bench.client import Client
from spark_appliance.bench.endpoint import parse_url
from spark_appliance.bench.wire import ChatRequest

SERVER = Path(__file__).parents[1] / "tests" / "bench" / "bench_server.py"


@dataclass(frozen=True)
class Cost:
    """Processor and wall seconds of one reader, and what it read."""

    name: str
    cpu: float
    wall: float
    after: float  # processor seconds for decoding, after the streams ended
    events: int
    reads: int

    @property
    def share(self) -> float:
        """Processor time by wall time: 1.0 is a whole core."""
        return self.cpu / self.wall


def request(tokens: int) -> ChatRequest:
    return ChatRequest(model="test-model", prompt="0" * 32 + "\n\nhello", max_tokens=tokens)


async def measure(name: str, streams: int, read: Callable[[], Awaitable[tuple[int, int]]]) -> Cost:
    cpu, wall = time.process_time(), time.perf_counter()
    counts = await asyncio.gather(*(read() for _ in range(streams)))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    events, reads = (sum(column) for column in zip(*counts, strict=True))
    return Cost(name, cpu, wall, 0.0, events, reads)


async def with_sockets(url: str, streams: int, tokens: int) -> Cost:
    address = parse_url(url)
    body = json.dumps(request(tokens).body()).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.host}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()

    async def read() -> tuple[int, int]:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(head + body)
        reads: list[tuple[float, bytes]] = []
        while not reads or not reads[-1][1].endswith(b"0\r\n\r\n"):
            reads.append((time.perf_counter(), await reader.read(65536)))
        writer.close()
        return sum(block.count(b"data:") for _, block in reads), len(reads)

    return await measure("socket", streams, read)


async def with_client(url: str, streams: int, tokens: int) -> Cost:
    recordings = []
    async with Client(parse_url(url)) as client:

        async def read() -> tuple[int, int]:
            recording = await client.stream(request(tokens), lambda _: None)
            assert recording.failure is None, recording.failure
            recordings.append(recording)
            return recording.events, len(recording.reads)

        cost = await measure("client", streams, read)
    start = time.process_time()
    for recording in recordings:
        assert sse.parse(recording.reads).usage is not None
    return replace(cost, after=time.process_time() - start)


async def with_httpx(url: str, streams: int, tokens: int) -> Cost | None:
    try:
        import httpx
    except ImportError:
        return None
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:

        async def read() -> tuple[int, int]:
            count = 0
            reads: list[tuple[float, bytes]] = []
            target = parse_url(url).api + "/chat/completions"
            async with client.stream("POST", target, json=request(tokens).body()) as response:
                async for block in response.aiter_raw():
                    reads.append((time.perf_counter(), block))
                    count += block.count(b"data:")
            return count, len(reads)

        return await measure("httpx", streams, read)


async def compare(url: str, streams: int, tokens: int) -> list[Cost]:
    costs = [await with_sockets(url, streams, tokens), await with_client(url, streams, tokens)]
    other = await with_httpx(url, streams, tokens)
    return [*costs, other] if other else costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rate", type=int, default=500, help="events/s of one stream")
    parser.add_argument("--seconds", type=int, default=10)
    arguments = parser.parse_args()
    tokens = arguments.rate * arguments.seconds
    server = subprocess.Popen(
        [sys.executable, str(SERVER), "--rate", str(arguments.rate)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        match = re.match(r"listening (\d+)", server.stdout.readline())
        assert match
        url = f"http://127.0.0.1:{match[1]}"
        costs = asyncio.run(compare(url, arguments.streams, tokens))
    finally:
        server.kill()
        server.wait()
    reference = costs[0]
    print(f"{arguments.streams} streams x {arguments.rate} events/s, {arguments.seconds} s")
    head = ["reader", "events/s", "events a read", "share of a core", "ratio to socket",
            "us an event", "decoding after, s"]  # fmt: skip
    rows = [
        [
            cost.name,
            f"{cost.events / cost.wall:.0f}",
            f"{cost.events / cost.reads:.2f}",
            f"{cost.share:.3f}",
            f"{cost.cpu / reference.cpu:.2f}",
            f"{cost.cpu / cost.events * 1e6:.1f}",
            f"{cost.after:.2f}",
        ]
        for cost in costs
    ]
    print(table.markdown(head, rows, 1))


if __name__ == "__main__":
    main()
