from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from spark_appliance.node.errors import NodeError
from spark_appliance.node.notify import Notifier
from spark_appliance.node.plan import NodeContext
from spark_appliance.node.ready import Kind, Probe, Readiness, probe_of

from .conftest import FakeClock, Log


class Engine:
    """An engine's HTTP routes; a test says how they behave."""

    def __init__(self) -> None:
        self.live = 200
        self.status = 200
        self.content: Any = "42"
        self.raw: bytes | None = None
        self.hang = threading.Event()
        self.hang.set()
        self.mute = False
        self.metrics: str | None = None
        self.requests: list[tuple[str, str | None, Any]] = []
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                engine.requests.append((self.path, self.headers.get("Authorization"), None))
                if self.path == "/metrics":
                    found = engine.metrics is not None
                    self.reply(200 if found else 404, (engine.metrics or "").encode())
                else:
                    self.reply(engine.live, b"")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                engine.requests.append((self.path, self.headers.get("Authorization"), body))
                engine.hang.wait(30)
                if engine.mute:  # the connection ends without an answer
                    return
                answer = {"choices": [{"message": {"content": engine.content}}]}
                raw = engine.raw if engine.raw is not None else json.dumps(answer).encode()
                self.reply(engine.status, raw)

            def reply(self, status: int, body: bytes) -> None:
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                except OSError:
                    pass  # the probe has given up

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}
        )
        self.thread.start()

    def close(self) -> None:
        self.hang.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


def probe(engine: Engine, timeout: float = 10, key: str | None = "sk-1") -> Probe:
    base = f"http://127.0.0.1:{engine.port}"
    return Probe(
        f"{base}/health", f"{base}/v1/chat/completions", {"model": "m"}, "42", timeout, key
    )


class Run:
    """A readiness run whose waits are the steps of a script."""

    def __init__(
        self, engine: Engine, context: NodeContext, clock: FakeClock, log: Log, timeout: float
    ) -> None:
        self.context, self.clock, self.log = context, clock, log
        self.flag = context.path("/run/spark/ready")
        self.waits: list[float] = []
        self.steps: list[Callable[[], None]] = []
        self.readiness = Readiness(
            context,
            probe(engine, timeout),
            clock,
            self.wait,
            log.journal,
            Notifier({}),
            10,
            60,
            3600,
        )

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.clock.time += seconds
        if not self.steps:
            return True
        self.steps.pop(0)()
        return False

    def script(self, *steps: Callable[[], None]) -> None:
        self.steps = list(steps)
        self.readiness.run()


@pytest.fixture
def run(
    engine: Engine,
    plan: dict[str, Any],
    context_of: Callable[..., NodeContext],
    clock: FakeClock,
    log: Log,
) -> Run:
    return Run(engine, context_of(plan), clock, log, timeout=20)


def nothing() -> None:
    pass


@pytest.mark.parametrize(
    ("status", "content", "kind"),
    [
        (200, "42", Kind.GOOD),
        (200, "The answer is **42**.", Kind.GOOD),
        (200, "43", Kind.WRONG),
        (200, "142", Kind.WRONG),
        (200, "421", Kind.WRONG),
        (200, "", Kind.WRONG),
        (200, None, Kind.WRONG),
        (401, "", Kind.REFUSED),
        (403, "", Kind.REFUSED),
        (404, "", Kind.WRONG),
        (429, "", Kind.BUSY),
        (503, "", Kind.BUSY),
        (500, "", Kind.WRONG),
    ],
)
def test_judges_a_generation(engine: Engine, status: int, content: Any, kind: Kind) -> None:
    engine.status, engine.content = status, content
    assert probe(engine).generate().kind is kind


@pytest.mark.parametrize("raw", [b"", b"nope", b"[]", b'{"choices": []}', b"[" * 10_000, b"\xff"])
def test_an_answer_that_is_none(engine: Engine, raw: bytes) -> None:
    engine.raw = raw
    assert probe(engine).generate().kind is Kind.WRONG


def test_thoughts_count_when_the_answer_is_cut_off(engine: Engine) -> None:
    message = {"content": None, "reasoning_content": "19 + 23 = 42, so"}
    engine.raw = json.dumps({"choices": [{"message": message}]}).encode()
    assert probe(engine).generate().kind is Kind.GOOD


def test_sends_the_body_and_the_key(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be used
    assert probe(engine).generate().kind is Kind.GOOD
    assert engine.requests == [("/v1/chat/completions", "Bearer sk-1", {"model": "m"})]
    engine.requests.clear()
    assert probe(engine, key=None).live().kind is Kind.GOOD
    assert engine.requests == [("/health", None, None)]


def test_health_states(engine: Engine) -> None:
    one = probe(engine)
    engine.live = 503
    assert one.live().kind is Kind.LOADING
    engine.close()
    found = one.live()
    assert found.kind is Kind.DOWN
    assert "Connection refused" in found.text


def test_a_hanging_engine_times_out(engine: Engine) -> None:
    engine.hang.clear()
    found = probe(engine, timeout=0.2).generate()
    assert (found.kind, found.text.rsplit(": ", 1)[1]) == (Kind.SILENT, "timed out")


def test_counts_tokens_from_sglangs_metrics(engine: Engine) -> None:
    assert probe(engine).tokens() is None
    engine.metrics = (
        "# TYPE sglang:realtime_tokens_total counter\n"
        'sglang:realtime_tokens_total{mode="decode"} 100.0\n'
        'sglang:realtime_tokens_total{mode="prefill_compute"} 1e2\n'
        'sglang:prompt_tokens_total{model_name="m"} 7.0\n'
        'sglang:gen_throughput{model_name="m"} 9.0\n'
    )
    assert probe(engine).tokens() == 207.0


def test_ready_after_loading(run: Run, engine: Engine) -> None:
    engine.live = 503
    seen: list[bool] = []

    def up() -> None:
        engine.live = 200

    run.script(nothing, up, lambda: seen.append(run.flag.exists()))
    assert run.waits == [10, 10, 60, 60]
    assert seen == [True]
    assert not run.flag.exists()  # gone when the program ends
    assert "ready after 20 s: a generation gave the right answer" in run.log.lines[-1]


def test_a_stale_flag_is_removed_first(run: Run, engine: Engine) -> None:
    run.flag.parent.mkdir(parents=True)
    run.flag.touch()
    engine.live = 503
    seen: list[bool] = []
    run.script(lambda: seen.append(run.flag.exists()))
    assert seen == [False]


def test_gives_up_after_wrong_answers(run: Run, engine: Engine) -> None:
    engine.content = "banana"
    with pytest.raises(
        NodeError, match="3 wrong answers in a row; the answer lacks '42': 'banana'"
    ):
        run.script(*[nothing] * 10)
    assert not run.flag.exists()


def test_a_wrong_answer_between_loading_does_not_add_up(run: Run, engine: Engine) -> None:
    engine.content = "banana"

    def loading() -> None:
        engine.live = 503

    def answering() -> None:
        engine.live = 200

    def right() -> None:
        engine.live, engine.content = 200, "42"

    run.script(nothing, loading, answering, nothing, loading, right)


def test_gives_up_at_the_deadline(run: Run, engine: Engine) -> None:
    engine.live = 503
    with pytest.raises(NodeError, match=r"not ready after 3600 s; http.*/health answers 503"):
        run.script(*[nothing] * 1000)
    assert run.clock.time == 3600


def test_a_refused_key_ends_it_at_once(run: Run, engine: Engine) -> None:
    engine.status = 401
    with pytest.raises(NodeError, match="refuses the API key"):
        run.script(nothing)
    assert run.waits == []


def tokens(engine: Engine, count: int) -> Callable[[], None]:
    def step() -> None:
        engine.metrics = f"sglang:realtime_tokens_total {count}\n"

    return step


def silence(engine: Engine) -> Callable[[], None]:
    def step() -> None:
        engine.mute = True

    return step


def test_a_wedge_is_no_answer_and_no_progress(run: Run, engine: Engine) -> None:
    tokens(engine, 5)()
    with pytest.raises(NodeError, match="the engine is wedged: it generates nothing"):
        run.script(nothing, silence(engine), *[nothing] * 5)
    assert run.waits == [60, 60, 60]
    assert not run.flag.exists()


def test_a_busy_engine_is_no_wedge(run: Run, engine: Engine) -> None:
    tokens(engine, 5)()
    run.script(silence(engine), *[tokens(engine, count) for count in range(6, 12)])
    assert any("no generation from" in line for line in run.log.lines)


def test_full_queues_with_no_progress_are_a_wedge(run: Run, engine: Engine) -> None:
    tokens(engine, 5)()

    def full() -> None:
        engine.status = 429

    with pytest.raises(NodeError, match="wedged"):
        run.script(full, *[nothing] * 5)


def test_without_counters_the_health_route_buys_time(run: Run, engine: Engine) -> None:
    with pytest.raises(NodeError, match="wedged"):
        run.script(silence(engine), *[nothing] * 10)
    assert len(run.waits) == 5


def test_without_counters_and_health_it_is_a_wedge_soon(run: Run, engine: Engine) -> None:
    def wedge() -> None:
        engine.mute = True
        engine.live = 503

    with pytest.raises(NodeError, match="wedged"):
        run.script(wedge, *[nothing] * 10)
    assert len(run.waits) == 2


def test_wrong_answers_while_serving_end_it(run: Run, engine: Engine) -> None:
    def broken() -> None:
        engine.content = "!!!!"

    with pytest.raises(NodeError, match="3 wrong answers in a row"):
        run.script(broken, *[nothing] * 5)


def test_the_probe_is_the_plans(
    plan: dict[str, Any], context_of: Callable[..., NodeContext]
) -> None:
    found = probe_of(context_of(plan), "key")
    assert found.live_url == "http://127.0.0.1:8888/health"
    assert found.body["chat_template_kwargs"] == {"thinking": False}
    assert found.expect == "42"
    assert found.timeout == 120


def test_the_flag_cannot_be_written(run: Run, root: Path) -> None:
    (root / "run").write_text("no folder")
    with pytest.raises(NodeError):
        run.script(nothing)
