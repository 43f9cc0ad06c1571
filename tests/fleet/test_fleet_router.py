"""Several clusters behind sglang-router: plan, unit, launcher, and the real router."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fleet_world import make_plan, make_world

from spark_appliance import lockfile
from spark_appliance.dgxos.render import node_files
from spark_appliance.fleet.install import Installer
from spark_appliance.fleet.remote import Rehearsal
from spark_appliance.node.engine_facts import router_facts
from spark_appliance.node.errors import PlanError
from spark_appliance.node.plan import read_context
from spark_appliance.node.router import LAUNCH, router_argv

KEY = "s3cret"
ROUTER = {"port": 8000, "replicas": [{"name": "east", "url": "http://192.168.1.21:8888"}]}


def test_the_plan_has_the_router_on_the_head_alone() -> None:
    plan = make_plan(router=ROUTER)
    assert plan.router is not None
    assert plan.router.url == "http://192.168.1.11:8000/v1"
    assert [(r.name, r.url) for r in plan.router.replicas] == [
        ("triangle", "http://127.0.0.1:8888"),
        ("east", "http://192.168.1.21:8888"),
    ]
    assert plan.router.argv == [
        *("--host", "0.0.0.0", "--port", "8000", "--policy", "cache_aware"),
        *("--worker-urls", "http://127.0.0.1:8888", "http://192.168.1.21:8888"),
        *("--health-check-interval-secs", "5", "--health-failure-threshold", "2"),
        *("--health-check-timeout-secs", "30", "--request-timeout-secs", "3600"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", "29001"),
    ]
    names = [[unit.name for unit in node.units] for node in plan.nodes]
    assert ["spark-router.service" in units for units in names] == [True, False, False]
    unit = next(u for u in plan.nodes[0].units if u.name == "spark-router.service")
    # stopping this cluster leaves the other replicas reachable
    assert (unit.started_by, unit.part_of) == ("boot", [])
    assert unit.settings["LoadCredential"] == "api-key:/etc/spark/api-key"


def test_no_router_without_one_in_the_cluster_file() -> None:
    plan = make_plan()
    assert plan.router is None
    assert "spark-router.service" not in [u.name for u in plan.nodes[0].units]


def test_the_unit_on_dgx_os() -> None:
    plan = make_plan(router=ROUTER)
    files = {file.path: file for file in node_files(plan, plan.nodes[0], b"x")}
    text = files["/etc/systemd/system/spark-router.service"].text
    assert (
        "ExecStart=/usr/local/sbin/spark-node --plan /etc/spark/plan.json --node spark1 router "
        "--python /usr/local/lib/spark/router/bin/python3\n"
    ) in text
    assert "/etc/systemd/system/multi-user.target.wants/spark-router.service" in files


def test_install_makes_its_environment_on_the_head_alone(tmp_path: Path) -> None:
    world = make_world(tmp_path / "fleet", make_plan(router=ROUTER))
    rehearsal = Rehearsal()
    Installer(world.crew(rehearsal=rehearsal)).install()
    made = [
        (n, argv[-1]) for n, step, argv, _ in rehearsal.commands if step == "install the router"
    ]
    assert len(made) == 1
    assert made[0][0] == "spark1"
    assert made[0][1].endswith("sh -s -- /usr/local/lib/spark/router sglang-router 0.3.2")


def test_only_the_head_becomes_the_router(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = make_plan(router=ROUTER)
    path.write_text(lockfile.dump(plan))
    assert plan.router is not None
    argv = router_argv(read_context(path, "spark1", tmp_path), "/python")
    assert argv == ["/python", "-c", LAUNCH, *plan.router.argv]
    with pytest.raises(PlanError, match="spark2: the plan has no router"):
        router_argv(read_context(path, "spark2", tmp_path), "/python")


@pytest.mark.parametrize("key", ["k-1", "-k", "--port=1"])
def test_the_key_is_one_word_with_its_option(tmp_path: Path, key: str) -> None:
    package = tmp_path / "sglang_router"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_router.py").write_text(
        "import argparse\n"
        "def parse_router_args(words):\n"
        "    parser = argparse.ArgumentParser()\n"
        "    parser.add_argument('--api-key')\n"
        "    parser.add_argument('--port')\n"
        "    return parser.parse_args(words)\n"
        "def launch_router(args):\n"
        "    print([args.port, args.api_key])\n"
    )
    (tmp_path / "api-key").write_text(key + "\n")
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, "--port", "30000"],
        env={"PYTHONPATH": str(tmp_path), "CREDENTIALS_DIRECTORY": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == f"{['30000', key]}\n"


# -- the real router ---------------------------------------------------------------------------


def router_python() -> str:
    named = os.environ.get("SPARK_TEST_ROUTER_PYTHON")
    if named:
        return named
    if importlib.util.find_spec("sglang_router") is None:
        pytest.skip("needs sglang-router 0.3.2 here or at SPARK_TEST_ROUTER_PYTHON")
    return sys.executable


class Engine(BaseHTTPRequestHandler):
    """As much of an engine as the router asks for."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, data: Any, status: int = 200) -> None:
        raw = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self) -> None:
        known = {
            "/health": {},
            "/server_info": {"model_path": "/m", "served_model_name": "m", "tp_size": 3},
            "/model_info": {"model_path": "/m", "is_generation": True},
        }
        self.answer(known.get(self.path, {}), 200 if self.path in known else 404)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        good = self.headers.get("Authorization") == f"Bearer {KEY}"
        message = {"role": "assistant", "content": str(self.server.server_address[1])}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = {"id": "x", "object": "chat.completion", "created": 0, "model": "m"}
        self.answer({**body, "choices": [choice]}, 200 if good else 401)


@contextmanager
def engine(port: int = 0) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", port), Engine)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def ask(port: int, method: str, path: str, key: str | None, body: Any = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"Content-Type": "application/json"}
    headers |= {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except OSError:
        return 0, b""
    finally:
        connection.close()


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.slow
def test_the_real_router_serves_two_replicas_and_outlives_one(tmp_path: Path) -> None:
    python = router_python()
    with engine() as first:
        stopped, port = free_port(), free_port()
        plan = make_plan(
            api={"bind": "127.0.0.1", "port": first, "key_file": "/etc/spark/api-key"},
            router={
                "bind": "127.0.0.1",
                "port": port,
                "replicas": [{"name": "east", "url": f"http://127.0.0.1:{stopped}"}],
            },
        )
        path = tmp_path / "etc/spark/plan.json"
        path.parent.mkdir(parents=True)
        path.write_text(lockfile.dump_own(plan, "spark1"))
        context = read_context(path, "spark1", tmp_path)
        (tmp_path / "credentials").mkdir()
        (tmp_path / "credentials/api-key").write_text(KEY + "\n")
        argv = router_argv(context, python)
        at = argv.index("--prometheus-port") + 1
        argv[at] = str(free_port())
        env = {**os.environ, "CREDENTIALS_DIRECTORY": str(tmp_path / "credentials")}
        log = (tmp_path / "log").open("wb")
        router = subprocess.Popen(argv, env=env, stdout=log, stderr=log)
        try:
            until(lambda: healthy(context) == 1)
            # one replica of two is down at the start: the router serves with the other
            status, raw = ask(port, "POST", "/v1/chat/completions", KEY, CHAT)
            assert (status, json.loads(raw)["choices"][0]["message"]["content"]) == (
                200,
                str(first),
            )
            assert ask(port, "POST", "/v1/chat/completions", None, CHAT)[0] == 401
            command = Path(f"/proc/{router.pid}/cmdline").read_bytes()
            assert KEY.encode() not in command
            with engine(stopped):
                until(lambda: healthy(context) == 2)
            until(lambda: healthy(context) == 1)
            assert ask(port, "POST", "/v1/chat/completions", KEY, CHAT)[0] == 200
        finally:
            router.terminate()
            router.wait(60)
            log.close()
        assert KEY not in (tmp_path / "log").read_text(errors="replace")


def healthy(context: Any) -> int:
    facts = router_facts(context)
    assert facts is not None
    return int(facts["healthy"])


def until(condition: Any) -> None:
    """Wait for what another program does by itself; it tells nobody."""
    deadline = time.monotonic() + 90
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        pause.wait(0.3)
