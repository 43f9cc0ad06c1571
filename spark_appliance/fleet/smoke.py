"""Ask the endpoint a few things whose right answers are known.

Texts of two runs are never compared: greedy output is not bit-identical (field notes 6.5).
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import re
import secrets
import struct
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from spark_appliance.errors import OperationError
from spark_appliance.fleet.exchange import Exchange

MAX_TOKENS: Final = 4096
"""Room for a reasoning model to think before it answers."""

SECONDS: Final = 300.0
LONG_SECONDS: Final = 900.0
"""A million tokens were seen to take 324 s (knapcio)."""

MAX_BODY: Final = 16 * 2**20

Outcome = Literal["ok", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Result:
    """What a test found: expected, seen, seconds."""

    name: str
    outcome: Outcome
    expected: str
    seen: str
    seconds: float


class AnswerError(OperationError):
    """The endpoint answered something else than a completion."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(f"HTTP {status}: {text[:200]}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI endpoint: ``url`` ends in /v1; the key travels in a header only.

    ``seconds`` is the deadline of each request as a whole.
    """

    url: str
    model: str
    key: str | None = field(default=None, repr=False)
    seconds: float = SECONDS

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object of a GET.

        Raises:
            OperationError: without a connection, after the deadline, or for another answer than
                200 with a JSON object.
        """
        raw = self._ask(path, None, self.seconds)
        try:
            return dict(json.loads(raw))
        except (ValueError, TypeError):
            raise AnswerError(200, f"no JSON object: {raw[:200]!r}") from None

    def chat(self, content: Any, *, seconds: float | None = None, **more: Any) -> dict[str, Any]:
        """Return the first choice of a chat completion.

        Raises:
            OperationError: as ``get``, and for an answer that is no completion.
        """
        body = self.body(content, **more)
        raw = self._ask("/chat/completions", body, seconds or self.seconds)
        try:
            choice = json.loads(raw)["choices"][0]
        except (ValueError, LookupError, TypeError):
            raise AnswerError(200, f"no completion: {raw[:200]!r}") from None
        return dict(choice)

    def body(self, content: Any, **more: Any) -> dict[str, Any]:
        """Return the request of a chat completion."""
        messages = content if isinstance(content, list) and _are_messages(content) else None
        return {
            "model": self.model,
            "messages": messages or [{"role": "user", "content": content}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            **more,
        }

    def stream(self, content: Any) -> Iterator[tuple[float, str]]:
        """Yield the data of a streamed completion's events with their times.

        Raises:
            OperationError: as ``get``.
        """
        body = self.body(content, stream=True, stream_options={"include_usage": True})
        with self._answer("/chat/completions", body, self.seconds) as answer:
            for line in answer.lines():
                if line.startswith(b"data:"):
                    yield time.monotonic(), line[5:].decode(errors="replace").strip()

    def _ask(self, path: str, body: dict[str, Any] | None, seconds: float) -> bytes:
        with self._answer(path, body, seconds) as answer:
            return _whole(answer)

    @contextlib.contextmanager
    def _answer(self, path: str, body: dict[str, Any] | None, seconds: float) -> Iterator[Exchange]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url.rstrip("/") + path, data=data)  # noqa: S310
        if data is not None:
            request.add_header("Content-Type", "application/json")
        if self.key is not None:
            request.add_header("Authorization", f"Bearer {self.key}")
        try:
            with Exchange(request, seconds) as answer:
                status = answer.status()
                if status != 200:
                    raise AnswerError(status, _text(_whole(answer)))
                yield answer
        except (OSError, http.client.HTTPException) as error:
            raise OperationError(f"no answer from {self.url}: {_why(error)}") from None


Test = Callable[[Endpoint], tuple[Outcome, str]]


@dataclass(frozen=True, slots=True)
class Case:
    """A test with what is expected."""

    name: str
    expected: str
    run: Test


def cases(*, streams: int, words: int) -> list[Case]:
    """Return the tests; ``words`` is the length of the long prompt."""
    return [
        Case("models", "the served name is listed", _models),
        Case("arithmetic", "19 + 23 = 42", _arithmetic),
        Case("json-schema", "an object of the given schema", _schema),
        Case("tool-call", "get_weather with the city Lisbon, then its result used", _tool),
        Case("streaming", "several events, a finish reason, usage, [DONE]", _streaming),
        Case(
            "concurrent",
            f"{streams} right sums at once",
            lambda endpoint: _concurrent(endpoint, streams),
        ),
        Case(
            "needle",
            f"a code found in {words:,} words",
            lambda endpoint: _needle(endpoint, words),
        ),
        Case("image", "a red square is called red", _image),
    ]


def smoke(
    endpoint: Endpoint, chosen: list[Case], tell: Callable[[Result], None] = lambda _: None
) -> list[Result]:
    """Run tests one after the other; a failure does not stop the rest."""
    results = []
    for case in chosen:
        began = time.monotonic()
        try:
            outcome, seen = case.run(endpoint)
        except OperationError as error:
            outcome, seen = "fail", str(error).splitlines()[0]
        result = Result(case.name, outcome, case.expected, seen, time.monotonic() - began)
        results.append(result)
        tell(result)
    return results


def _models(endpoint: Endpoint) -> tuple[Outcome, str]:
    names = [str(item.get("id")) for item in endpoint.get("/models").get("data", [])]
    return ("ok" if endpoint.model in names else "fail"), ", ".join(names) or "no model"


def _sum(endpoint: Endpoint, a: int, b: int) -> tuple[bool, str]:
    choice = endpoint.chat(f"What is {a} + {b}? Answer with the number.")
    text = _content(choice)
    return _has(text, str(a + b)), text.strip()[:80] or f"nothing ({choice.get('finish_reason')})"


def _arithmetic(endpoint: Endpoint) -> tuple[Outcome, str]:
    good, seen = _sum(endpoint, 19, 23)
    return ("ok" if good else "fail"), seen


def _concurrent(endpoint: Endpoint, streams: int) -> tuple[Outcome, str]:
    with ThreadPoolExecutor(max_workers=streams) as pool:
        answers = list(pool.map(lambda n: _sum(endpoint, 19 + n, 23 + 2 * n), range(streams)))
    wrong = [seen for good, seen in answers if not good]
    if wrong:
        return "fail", f"{len(wrong)} of {streams} wrong, the first: {wrong[0]}"
    return "ok", f"{streams} right"


_SCHEMA: Final = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "population": {"type": "integer"}},
    "required": ["city", "population"],
    "additionalProperties": False,
}


def _schema(endpoint: Endpoint) -> tuple[Outcome, str]:
    wanted = {"name": "city", "schema": _SCHEMA, "strict": True}
    choice = endpoint.chat(
        "Name the capital of Portugal and its population.",
        response_format={"type": "json_schema", "json_schema": wanted},
    )
    text = _content(choice)
    try:
        data = json.loads(text)
    except ValueError:
        return "fail", f"no JSON: {text[:80]!r}"
    good = (
        isinstance(data, dict)
        and set(data) == {"city", "population"}
        and isinstance(data["city"], str)
        and type(data["population"]) is int
    )
    return ("ok" if good else "fail"), text[:120]


_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def _tool(endpoint: Endpoint) -> tuple[Outcome, str]:
    question = {"role": "user", "content": "What is the weather in Lisbon? Use the tool."}
    choice = endpoint.chat([question], tools=[_TOOL], tool_choice="auto")
    calls = (choice.get("message") or {}).get("tool_calls") or []
    if not calls:
        return "fail", f"no tool call: {_content(choice)[:80]!r}"
    function = calls[0].get("function") or {}
    try:
        arguments = json.loads(function.get("arguments") or "")
    except ValueError:
        return "fail", f"arguments are no JSON: {str(function.get('arguments'))[:80]!r}"
    if function.get("name") != "get_weather" or "lisbon" not in str(arguments).lower():
        return "fail", f"{function.get('name')}({arguments})"
    answer = {
        "role": "tool",
        "tool_call_id": calls[0].get("id"),
        "content": '{"temperature_celsius": 17, "sky": "clear"}',
    }
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    text = _content(endpoint.chat([question, said, answer], tools=[_TOOL]))
    return ("ok" if _has(text, "17") else "fail"), text.strip()[:80]


def _streaming(endpoint: Endpoint) -> tuple[Outcome, str]:
    pieces: list[float] = []
    finish = usage = None
    done = False
    for when, data in endpoint.stream("Count from 1 to 30, one number a line."):
        if data == "[DONE]":
            done = True
            break
        try:
            event = json.loads(data)
        except ValueError:
            return "fail", f"an event is no JSON: {data[:80]!r}"
        usage = event.get("usage") or usage
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or {}
            if delta.get("content") or delta.get("reasoning_content"):
                pieces.append(when)
            finish = choice.get("finish_reason") or finish
    seen = f"{len(pieces)} pieces, finish {finish}, usage {'yes' if usage else 'no'}"
    seen += "" if done else ", no [DONE]"
    return ("ok" if done and len(pieces) > 1 and finish and usage else "fail"), seen


def _needle(endpoint: Endpoint, words: int) -> tuple[Outcome, str]:
    code = f"{secrets.randbelow(90_000_000) + 10_000_000}"
    line = f"The access code of the harbour office is {code}.\n"
    lines = [_filler(number) for number in range(max(1, words // 10))]
    lines.insert(round(len(lines) * 0.4), line)
    # the first line differs in every run, so that no cached prefix answers for the model
    text = f"Log {secrets.token_hex(8)}\n" + "".join(lines)
    question = "\nWhat is the access code of the harbour office? Answer with the code alone."
    found = _content(endpoint.chat(text + question, seconds=LONG_SECONDS))
    return ("ok" if code in found else "fail"), found.strip()[:80]


def _filler(number: int) -> str:
    return f"Entry {number}: ship {number * 7919 % 9973} passed the light at dusk, wind calm.\n"


def _image(endpoint: Endpoint) -> tuple[Outcome, str]:
    url = "data:image/png;base64," + base64.b64encode(png(64, (220, 20, 30))).decode()
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "Which colour is this square? Answer with one word."},
    ]
    try:
        text = _content(endpoint.chat(content))
    except AnswerError as error:
        if error.status in (400, 422, 501):
            return "skip", f"the model takes no images ({error})"
        raise
    return ("ok" if "red" in text.lower() else "fail"), text.strip()[:80]


def png(size: int, colour: tuple[int, int, int]) -> bytes:
    """Return a square PNG of one colour, ``size`` pixels wide (PNG: RGB, no filter)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    rows = (b"\0" + bytes(colour) * size) * size
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, data) for kind, data in parts)


def _are_messages(content: list[Any]) -> bool:
    return all(isinstance(item, dict) and "role" in item for item in content)


def _content(choice: dict[str, Any]) -> str:
    return str((choice.get("message") or {}).get("content") or "")


def _has(text: str, word: str) -> bool:
    plain = text.replace(",", "")
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", plain) is not None


def _whole(answer: Exchange) -> bytes:
    raw = b""
    for block in answer.blocks():
        raw += block
        if len(raw) >= MAX_BODY:
            break
    return raw[:MAX_BODY]


def _text(raw: bytes) -> str:
    return " ".join(raw.decode(errors="replace").split())


def _why(error: Exception) -> str:
    if isinstance(error, urllib.error.URLError) and error.reason is not None:
        return str(error.reason)
    return str(error) or type(error).__name__
