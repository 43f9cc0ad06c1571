"""A small OpenAI-compatible streaming server, run as its own process, whose true rates are known.

It generates nothing: it sends words at a set pace and writes down, for every request, what it
sent and when (CLOCK_MONOTONIC, which all processes of a machine share). A test can therefore
hold the client against what really happened instead of against the setting, and a loaded
machine makes no test fail.

It speaks HTTP by hand on asyncio streams, so that it can also misbehave exactly as told.

    python bench_server.py --port 0 --truth FILE --rate 200 --chunk 3 ...

prints ``listening PORT`` when it is ready. Faults are chosen per request by the model's name
(``fault:cut``) or for all requests with ``--fault``.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

WORDS = [
    "the",
    "keeper",
    "wound",
    "every",
    "clock",
    "before",
    "dawn",
    "and",
    "listened",
    "to",
    "the",
    "slow",
    "sea",
    "below",
]


@dataclass
class State:
    options: argparse.Namespace
    running: int = 0
    served: int = 0
    first_pages: set[str] = field(default_factory=set)
    drafts: int = 0
    proposed: int = 0
    accepted: int = 0
    stop: asyncio.Event = field(default_factory=asyncio.Event)


def tokens_of(text: str) -> int:
    """The server's tokenizer: four characters are a token, rounded up."""
    return -(-len(text) // 4)


class Connection:
    def __init__(self, state: State, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.state = state
        self.options = state.options
        self.reader = reader
        self.writer = writer
        self.asked: dict[str, object] = {}

    async def serve(self) -> None:
        try:
            while await self.request():
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.writer.close()

    async def request(self) -> bool:
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return False
        lines = head.decode("latin-1").split("\r\n")
        method, path, _ = lines[0].split(" ", 2)
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
        length = int(headers.get("content-length", 0))
        body = await self.reader.readexactly(length) if length else b""
        self.authorization = next(
            (line.split(": ", 1)[1] for line in lines if line.lower().startswith("authorization:")),
            "",
        )
        await self.route(method, path.split("?")[0], body)
        return headers.get("connection") != "close"

    # ------------------------------------------------------------------ routes

    async def route(self, method: str, path: str, body: bytes) -> None:
        options = self.options
        if path == "/health":
            return await self.send(200 if not options.loading else 503, b"", "text/plain")
        if options.loading:
            return await self.error(503, "The server is starting")
        if options.key and self.authorization != f"Bearer {options.key}":
            return await self.error(401, "Unauthorized")
        if method == "POST" and path == "/v1/chat/completions":
            return await self.chat(json.loads(body))
        if path == "/v1/models":
            return await self.models()
        if path in ("/server_info", "/get_server_info") and options.engine == "sglang":
            return await self.json(self.server_info())
        if path == "/v1/loads" and options.engine == "sglang":
            return await self.json({"loads": [self.load()]})
        if path == "/metrics" and options.engine == "vllm":
            return await self.send(200, self.metrics().encode(), "text/plain; version=0.0.4")
        if path == "/version" and options.engine == "vllm":
            return await self.json({"version": "0.11.0"})
        return await self.error(404, "Not Found")

    async def models(self) -> None:
        card = {"id": self.options.model, "object": "model", "owned_by": self.options.engine,
                "max_model_len": self.options.context}  # fmt: skip
        await self.json({"object": "list", "data": [card]})

    def server_info(self) -> dict[str, object]:
        return {
            "version": "0.5.23",
            "launch_command": f"sglang serve --api-key {self.options.key or 'unset-key'} --tp 4",
            "api_key": self.options.key,
            "tp_size": 4,
            "mem_fraction_static": 0.9,
            "chunked_prefill_size": 2048,
            "disable_radix_cache": False,
            "kv_cache_dtype": "fp8_e4m3",
            "max_running_requests": 32,
            "speculative_num_draft_tokens": 6,
            "internal_states": [{"avg_spec_accept_length": 2.27}],
        }

    def load(self) -> dict[str, object]:
        return {
            "dp_rank": 0,
            "num_running_reqs": self.state.running + self.options.strangers,
            "num_waiting_reqs": 0,
        }

    def metrics(self) -> str:
        state = self.state
        label = '{engine="0",model_name="m"}'
        return (
            "# TYPE vllm:num_requests_running gauge\n"
            f"vllm:num_requests_running{label} {state.running + self.options.strangers}.0\n"
            f"vllm:num_requests_waiting{label} 0.0\n"
            f"vllm:spec_decode_num_drafts_total{label} {state.drafts}.0\n"
            f"vllm:spec_decode_num_draft_tokens_total{label} {state.proposed}.0\n"
            f"vllm:spec_decode_num_accepted_tokens_total{label} {state.accepted}.0\n"
        )

    # ------------------------------------------------------------------ chat

    async def chat(self, request: dict) -> None:
        options = self.options
        state = self.state
        state.served += 1
        fault = options.fault if state.served > options.fault_after else ""
        if request["model"].startswith("fault:"):
            fault = request["model"].removeprefix("fault:")
        prompt = request["messages"][0]["content"]
        nonce, _, text = prompt.partition("\n\n")
        self.asked = {
            **request,
            "messages": len(request["messages"]),
            "nonce": nonce,
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        }
        if tokens_of(prompt) + request["max_tokens"] > options.context:
            return await self.error(400, "The input is longer than the context length")
        if fault in ("500", "429", "404", "400"):
            return await self.error(int(fault), f"made to fail with {fault}")
        if fault == "html":
            return await self.send(200, b"<html><body>It works!</body></html>", "text/html")
        if fault == "plain-json":
            whole = {"choices": [{"message": {"content": "hello"}}], "usage": {}}
            return await self.json(whole)
        if fault == "redirect":
            return await self.send(307, b"", "text/plain", "Location: http://elsewhere/v1\r\n")
        if fault == "hang-up":
            self.writer.close()
            raise ConnectionError
        state.running += 1
        try:
            await self.stream(request, prompt, fault)
        finally:
            state.running -= 1

    async def stream(self, request: dict, prompt: str, fault: str) -> None:
        options = self.options
        received = time.monotonic()
        count = min(request["max_tokens"], options.tokens or request["max_tokens"])
        answer = self.answer(prompt, count)
        prompt_tokens = tokens_of(prompt)
        ttft = options.ttft + prompt_tokens / options.prefill if options.prefill else options.ttft
        if fault == "silent":
            await self.state.stop.wait()
        await asyncio.sleep(ttft)
        self.begin()
        self.event(self.delta({"role": "assistant", "content": ""}))
        first = last = time.monotonic()
        sent = events = 0
        while sent < count:
            # The first token comes alone, out of the prefill; then a step may accept several.
            size = 1 if sent == 0 else min(options.chunk, count - sent)
            due = first + (sent + size - 1) / options.rate
            delay = due - time.monotonic()
            if delay > 0:
                await asyncio.sleep(delay)
            text = "".join(answer[sent : sent + size])
            name = "reasoning_content" if sent < options.reasoning else "content"
            last = time.monotonic()
            self.event(self.delta({name: text}))
            if sent == 0:
                first = last
            sent += size
            events += 1
            if await self.misbehave(fault, events):
                self.note(received, first, last, prompt_tokens, sent, events, "cut")
                return
        if fault == "endless":
            while True:
                self.event(self.delta({"content": " and"}))
                await self.writer.drain()
        self.state.drafts += events - 1
        self.state.proposed += (events - 1) * 5
        self.state.accepted += count - events
        self.event(self.delta({}, "stop" if options.tokens else "length"))
        if request.get("return_spec_tokens_details") and options.engine == "sglang":
            self.event({"choices": [], "sglext": {"spec_tokens_details": {
                "spec_accept_rate": (count - events) / max(1, (events - 1) * 5),
                "spec_accept_length": count / max(1, events - 1),
                "spec_verify_ct": events - 1,
            }}})  # fmt: skip
        if fault != "no-usage" and request.get("stream_options", {}).get("include_usage"):
            self.event({"choices": [], "usage": self.usage(prompt, prompt_tokens, count)})
        if fault == "never-closes":
            self.data(b": no more\n\n")
            await self.state.stop.wait()
        # Before the end of the answer: a test reads the notes as soon as the client is done.
        self.note(received, first, last, prompt_tokens, count, events, "ok")
        self.data(b"data: [DONE]\n\n")
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    async def misbehave(self, fault: str, events: int) -> bool:
        """Return True when the stream has been ended."""
        if events != 5:
            return False
        if fault == "cut":
            await self.writer.drain()
            transport = self.writer.transport
            transport.abort()
            raise ConnectionError
        if fault == "short":  # a well-formed body, but the answer is not finished
            self.writer.write(b"0\r\n\r\n")
            await self.writer.drain()
            return True
        if fault == "stall":
            await self.writer.drain()
            await self.state.stop.wait()
        if fault == "engine-error":
            self.event({"error": {"message": "a rank died", "code": 500}})
            self.data(b"data: [DONE]\n\n")
            self.writer.write(b"0\r\n\r\n")
            return True
        if fault == "malformed":
            self.data(b"data: {not json\n\n")
        return False

    def answer(self, prompt: str, count: int) -> list[str]:
        """Words; the first ones are the access code, if the prompt has one and we may see it."""
        words = [" " + WORDS[i % len(WORDS)] for i in range(count)]
        code = re.search(r"access code of the harbour office is (\d+)", prompt)
        if code and not self.options.forgetful:
            words[1 if count > 1 else 0] = f" {code[1]}"
        return words

    def usage(self, prompt: str, prompt_tokens: int, count: int) -> dict[str, object]:
        usage: dict[str, object] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": count,
            "total_tokens": prompt_tokens + count,
        }
        if self.options.reasoning:
            usage["reasoning_tokens"] = min(count, self.options.reasoning)
        if self.options.cache_report:
            # A prefix cache of 8-token pages: known pages from the start of the prompt count.
            pages = [prompt[i : i + 32] for i in range(0, len(prompt) - 31, 32)]
            known = 0
            for page in pages:
                if page not in self.state.first_pages:
                    break
                known += 1
            self.state.first_pages.update(pages[:1])
            cached = self.options.cached or min(known, 1) * 8
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage

    def note(
        self, received: float, first: float, last: float, prompt: int, count: int, events: int,
        end: str,
    ) -> None:  # fmt: skip
        """Write down what was truly sent."""
        record = {
            "received": received, "first": first, "last": last, "prompt_tokens": prompt,
            "completion_tokens": count, "events": events, "end": end, "request": self.asked,
        }  # fmt: skip
        if self.options.truth:
            with Path(self.options.truth).open("a") as file:
                file.write(json.dumps(record) + "\n")

    # ------------------------------------------------------------------ http

    def delta(self, delta: dict[str, str], finish: str | None = None) -> dict[str, object]:
        return {
            "id": "c" * 32, "object": "chat.completion.chunk", "created": 1,
            "model": self.options.model,
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish,
                         "matched_stop": None}],
        }  # fmt: skip

    def begin(self) -> None:
        self.writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )

    def event(self, value: dict) -> None:
        self.data(b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n")

    def data(self, block: bytes) -> None:
        self.writer.write(b"%x\r\n%s\r\n" % (len(block), block))

    async def json(self, value: object) -> None:
        await self.send(200, json.dumps(value).encode(), "application/json")

    async def error(self, status: int, message: str) -> None:
        await self.send(
            status, json.dumps({"error": {"message": message}}).encode(), "application/json"
        )

    async def send(self, status: int, body: bytes, kind: str, extra: str = "") -> None:
        self.writer.write(
            f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\n{extra}"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await self.writer.drain()


def options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--truth", default="")
    parser.add_argument("--rate", type=float, default=200.0, help="tokens/s of one stream")
    parser.add_argument("--chunk", type=int, default=1, help="tokens of one event")
    parser.add_argument("--ttft", type=float, default=0.02)
    parser.add_argument("--prefill", type=float, default=0.0, help="tokens/s; adds to TTFT")
    parser.add_argument("--tokens", type=int, default=0, help="end after so many tokens")
    parser.add_argument("--reasoning", type=int, default=0)
    parser.add_argument("--context", type=int, default=1_000_000)
    parser.add_argument("--model", default="test-model")
    parser.add_argument("--engine", default="sglang", choices=["sglang", "vllm", "other"])
    parser.add_argument("--key", default="")
    parser.add_argument("--cache-report", type=int, default=1)
    parser.add_argument("--cached", type=int, default=0)
    parser.add_argument("--strangers", type=int, default=0)
    parser.add_argument("--loading", action="store_true")
    parser.add_argument("--forgetful", action="store_true")
    parser.add_argument("--fault", default="")
    parser.add_argument("--fault-after", type=int, default=0)
    return parser.parse_args(arguments)


async def main() -> None:
    state = State(options(sys.argv[1:]))
    server = await asyncio.start_server(
        lambda reader, writer: Connection(state, reader, writer).serve(),
        "127.0.0.1",
        state.options.port,
        limit=64 * 2**20,
    )
    print("listening", server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
