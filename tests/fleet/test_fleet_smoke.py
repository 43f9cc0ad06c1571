"""Smoke tests against a small server that answers like a model, well or badly."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from spark_appliance.fleet.smoke import Endpoint, Result, cases, png, smoke

KEY = "s3cret"


class Model:
    """Answers; tests change one behaviour at a time."""

    def __init__(self) -> None:
        self.sum: Callable[[int, int], str] = lambda a, b: f"The answer is {a + b:,}."
        self.json = '{"city": "Lisbon", "population": 545796}'
        self.tool_arguments = '{"city": "Lisbon"}'
        self.images = True
        self.models: Any = {"data": [{"id": "the-model"}]}
        self.events = 12
        self.done = True
        self.needle = True
        self.requests: list[dict[str, Any]] = []

    def message(self, body: dict[str, Any]) -> dict[str, Any]:
        content = body["messages"][0]["content"]
        if body.get("tools"):
            if body["messages"][-1]["role"] == "tool":
                return {"content": "It is 17 degrees in Lisbon."}
            call = {
                "id": "call-1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": self.tool_arguments},
            }
            return {"content": None, "tool_calls": [call]}
        if isinstance(content, list):
            return {"content": "Red."}
        if body.get("response_format"):
            return {"content": self.json}
        if found := re.match(r"What is (\d+) \+ (\d+)\?", content):
            return {"content": self.sum(int(found[1]), int(found[2]))}
        found = re.search(r"harbour office is (\d+)", content)
        assert found is not None
        return {"content": found[1] if self.needle else "I do not know."}


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def endpoint(model: Model) -> Iterator[Endpoint]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def answer(self, status: int, data: Any) -> None:
            raw = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def do_GET(self) -> None:
            if self.headers.get("Authorization") != f"Bearer {KEY}":
                self.answer(401, {"error": "no key"})
                return
            self.answer(200, model.models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            model.requests.append(body)
            content = body["messages"][0]["content"]
            if self.headers.get("Authorization") != f"Bearer {KEY}":
                self.answer(401, {"error": "no key"})
            elif isinstance(content, list) and not model.images:
                self.answer(400, {"error": "not a multimodal model"})
            elif body.get("stream"):
                self.stream()
            else:
                choice = {"message": model.message(body), "finish_reason": "stop"}
                self.answer(200, {"choices": [choice]})

        def stream(self) -> None:
            self.send_response(200)
            self.end_headers()
            events = [{"choices": [{"delta": {"content": f"{n}\n"}}]} for n in range(model.events)]
            events.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
            events.append({"choices": [], "usage": {"completion_tokens": 30}})
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            lines += ["data: [DONE]\n\n"] if model.done else []
            self.wfile.write("".join(lines).encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Endpoint(f"http://127.0.0.1:{server.server_port}/v1", "the-model", KEY, 20)
    server.shutdown()
    server.server_close()
    thread.join()


def run(endpoint: Endpoint, *names: str) -> dict[str, Result]:
    chosen = [c for c in cases(streams=4, words=500) if not names or c.name in names]
    return {result.name: result for result in smoke(endpoint, chosen)}


def test_a_good_model_passes_everything(endpoint: Endpoint) -> None:
    results = run(endpoint)
    assert {name: r.outcome for name, r in results.items()} == dict.fromkeys(
        [
            "models",
            "arithmetic",
            "json-schema",
            "tool-call",
            "streaming",
            "concurrent",
            "needle",
            "image",
        ],
        "ok",
    )
    assert all(r.expected and r.seen for r in results.values())


def test_every_request_is_greedy_and_bounded(endpoint: Endpoint, model: Model) -> None:
    run(endpoint)
    assert all(r["temperature"] == 0 and r["max_tokens"] > 0 for r in model.requests)
    assert all(r["model"] == "the-model" for r in model.requests)


@pytest.mark.parametrize(
    ("name", "change", "seen"),
    [
        ("models", {"models": "<html>"}, "no JSON object"),
        ("arithmetic", {"sum": lambda a, b: f"{a}{b}"}, "1923"),
        ("arithmetic", {"sum": lambda a, b: f"1{a + b}7"}, "1427"),
        ("concurrent", {"sum": lambda a, b: str(a + b + (a == 21))}, "1 of 4 wrong"),
        ("json-schema", {"json": "```json\n{}\n```"}, "no JSON"),
        ("json-schema", {"json": '{"city": "Lisbon", "population": "many"}'}, "many"),
        ("tool-call", {"tool_arguments": "{"}, "no JSON"),
        ("tool-call", {"tool_arguments": '{"city": "Porto"}'}, "Porto"),
        ("streaming", {"events": 1}, "1 pieces"),
        ("streaming", {"done": False}, "no [DONE]"),
        ("needle", {"needle": False}, "I do not know"),
    ],
)
def test_a_wrong_answer_fails_its_test_alone(
    endpoint: Endpoint, model: Model, name: str, change: dict[str, Any], seen: str
) -> None:
    for key, value in change.items():
        setattr(model, key, value)
    result = run(endpoint, name)[name]
    assert result.outcome == "fail"
    assert seen in result.seen


def test_a_model_without_images_skips_that_test(endpoint: Endpoint, model: Model) -> None:
    model.images = False
    result = run(endpoint, "image")["image"]
    assert result.outcome == "skip"
    assert "takes no images" in result.seen


def test_a_wrong_key_and_a_closed_port_are_named(endpoint: Endpoint) -> None:
    wrong = Endpoint(endpoint.url, "the-model", "other", 20)
    results = run(wrong)
    assert {r.outcome for r in results.values()} == {"fail"}
    assert "HTTP 401" in results["models"].seen
    closed = Endpoint("http://127.0.0.1:9/v1", "the-model", None, 5)
    assert "no answer from http://127.0.0.1:9/v1" in run(closed, "arithmetic")["arithmetic"].seen
    assert KEY not in repr(endpoint)


@pytest.fixture
def dripping(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server that goes on sending a byte now and then, after the given beginning."""
    over = threading.Event()
    beginning: bytes = request.param

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.wfile.write(beginning)
            for _ in range(1000):  # an end, so that a client without a deadline fails, not hangs
                if over.wait(0.05):
                    return
                try:
                    self.wfile.write(b"x")
                except OSError:
                    return

        def do_POST(self) -> None:
            self.do_GET()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    over.set()
    server.shutdown()
    server.server_close()
    thread.join()


DATA = b"HTTP/1.0 200 OK\r\n\r\n"


@pytest.mark.parametrize(
    ("dripping", "name"),
    [
        (b"HTTP/1.0 200 OK\r\nX-Slow: ", "models"),
        (DATA, "models"),
        (b"HTTP/1.0 500 Bad\r\n\r\n", "models"),
        (DATA, "arithmetic"),
        (DATA + b"data: {}\n\n", "streaming"),
        (DATA, "concurrent"),
    ],
    indirect=["dripping"],
)
def test_a_server_that_drips_is_left_at_the_deadline(dripping: str, name: str) -> None:
    result = run(Endpoint(dripping, "the-model", None, 0.5), name)[name]
    assert result.outcome == "fail"
    assert result.seen == f"no answer from {dripping}: not finished after 0.5 s"


def test_the_long_prompt_is_never_the_same_and_about_as_long_as_asked(
    endpoint: Endpoint, model: Model
) -> None:
    run(endpoint, "needle")
    run(endpoint, "needle")
    first, second = (r["messages"][0]["content"] for r in model.requests)
    assert first.split("\n")[0] != second.split("\n")[0]
    assert 450 < len(first.split()) < 650


def test_the_picture_is_a_png() -> None:
    raw = png(8, (255, 0, 0))
    assert raw.startswith(b"\x89PNG\r\n\x1a\n")
    assert raw.endswith(b"IEND\xaeB`\x82")
