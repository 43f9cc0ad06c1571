"""The node's part of ``status``: gauges, the key that stays, shards seen in /proc."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fleet_world import make_plan

from spark_appliance import lockfile
from spark_appliance.node.engine_facts import (
    engine_facts,
    loading,
    parse_metrics,
    pick_server_info,
)
from spark_appliance.node.generations.bundle import read_bundle
from spark_appliance.node.generations.store import Store
from spark_appliance.node.generations.switch import confirm, switch
from spark_appliance.node.plan import NodeContext, read_context
from spark_appliance.node.process import Completed
from spark_appliance.node.report import report

KEY = "s3cret"
METRICS = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",tp_rank="0"} 2.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 3.0
sglang:gen_throughput{model_name="m",tp_rank="0"} 71.25
sglang:token_usage{model_name="m",tp_rank="0"} 0.25
sglang:spec_accept_length{model_name="m",tp_rank="0"} NaN
sglang:num_running_reqs{model_name="m",tp_rank="1"} 0.0
sglang:other 9.0
"""
INFO = {"version": "0.5.23", "tp_size": 3, "api_key": KEY, "launch_command": f"--api-key {KEY}"}


@pytest.fixture
def port() -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            known = self.headers.get("Authorization") == f"Bearer {KEY}"
            status, text = {
                "/ready": (200, ""),
                "/health": (200, ""),
                "/metrics": (200, METRICS),
                "/server_info": (200, json.dumps(INFO)) if known else (401, ""),
            }.get(self.path, (404, ""))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def context_of(root: Path, node: str, port: int) -> NodeContext:
    plan = make_plan(api={"port": port, "key_file": "/etc/spark/api-key"})
    path = root / "etc/spark/plan.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(lockfile.dump_own(plan, node))
    (root / "etc/spark/api-key").write_text(KEY + "\n")
    return read_context(path, node, root)


def test_gauges_of_several_ranks_and_without_value() -> None:
    assert parse_metrics(METRICS) == {
        "running": 2.0,
        "waiting": 3.0,
        "tokens_per_second": 71.25,
        "kv_use": 0.25,
    }


def test_the_key_opens_server_info_and_stays_on_the_node(tmp_path: Path, port: int) -> None:
    facts = engine_facts(context_of(tmp_path, "spark1", port))
    assert facts["health"] == 200
    assert facts["server"] == {"version": "0.5.23", "tp_size": 3}
    assert KEY not in json.dumps(facts)


def test_a_refused_key_is_said(tmp_path: Path, port: int) -> None:
    context = context_of(tmp_path, "spark1", port)
    (tmp_path / "etc/spark/api-key").unlink()
    assert engine_facts(context)["server"] == {"refused": 401}


def test_a_worker_is_only_asked_whether_it_lives(tmp_path: Path, port: int) -> None:
    assert engine_facts(context_of(tmp_path, "spark2", port)) == {
        "health": 200,
        "metrics": {},
        "server": {},
    }


def test_an_engine_that_is_down_is_no_error(tmp_path: Path) -> None:
    assert engine_facts(context_of(tmp_path, "spark1", 9))["health"] is None


@pytest.mark.parametrize("raw", [b"", b"{", b"null", b"[]"])
def test_damaged_server_info_is_nothing(raw: bytes) -> None:
    assert pick_server_info(raw) == {}


def process(root: Path, pid: int, *, maps: str = "", links: tuple[str, ...] = ()) -> None:
    folder = root / f"proc/{pid}"
    (folder / "fd").mkdir(parents=True)
    (folder / "maps").write_text(maps)
    for number, target in enumerate(links):
        (folder / f"fd/{number}").symlink_to(target)


def test_the_shard_is_seen_in_the_processes_of_the_unit_and_of_the_container(
    tmp_path: Path,
) -> None:
    context = context_of(tmp_path, "spark2", 9)
    groups = (
        "/sys/fs/cgroup/system.slice/spark-engine.service",
        "/sys/fs/cgroup/sparkengine.slice",
    )
    assert loading(context, groups) is None
    for group, pids in (
        (groups[0], "11\n"),
        (f"{groups[1]}/docker-abc.scope", "12\n13\n"),
    ):
        path = tmp_path / group.lstrip("/") / "cgroup.procs"
        path.parent.mkdir(parents=True)
        path.write_text(pids)
    model = "/models/DeepSeek-V4.1-Flash"
    line = "7f00-7f01 r--p 0 0:0 0   {}/model-{:05d}-of-00048.safetensors\n"
    process(tmp_path, 11, maps="7f00-7f01 r-xp 0 0:0 0 /usr/bin/docker\n")
    process(tmp_path, 12, maps=line.format(model, 7) + line.format("/other", 30))
    process(tmp_path, 13, links=(f"{model}/model-00009-of-00048.safetensors", "/dev/null"))
    assert loading(context, groups) == {"processes": 3, "shard": 9, "of": 48}


class Runner:
    def __init__(self, gpu: str | None) -> None:
        self.gpu = gpu
        self.programs: list[str] = []

    def __call__(self, argv: Any, *, seconds: float) -> Completed:
        assert seconds > 0
        self.programs.append(argv[0])
        if argv[0] == "nvidia-smi":
            return Completed(tuple(argv), 0 if self.gpu else 9, self.gpu or "", "")
        return Completed(tuple(argv), 0, "[]" if argv[0] == "ip" else "", "")


def test_one_document_with_counters_versions_and_the_gpu_only_when_asked(
    tmp_path: Path, port: int
) -> None:
    context = context_of(tmp_path, "spark1", port)
    base = tmp_path / "sys/class/infiniband/rocep1s0f0/ports/1"
    for name, value in (("counters/port_xmit_data", "12"), ("hw_counters/out_of_sequence", "3")):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(value + "\n")
    state = tmp_path / "var/lib/spark/generations/state.json"
    state.parent.mkdir(parents=True)
    state.write_text('{"current": 4, "confirmed": 3}')
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 50 kB\n")
    runner = Runner("61, 45.2, 2400, 8533, 97, 580.173.02\n")
    data = report(context, runner, gpu=True)
    json.dumps(data)
    assert data["gpu"] == {
        "temperature.gpu": "61",
        "power.draw": "45.2",
        "clocks.sm": "2400",
        "clocks.mem": "8533",
        "utilization.gpu": "97",
        "driver_version": "580.173.02",
    }
    assert data["counters"]["rocep1s0f0"] == {"port_xmit_data": 12, "out_of_sequence": 3}
    assert (data["versions"]["generation"], data["versions"]["confirmed"]) == (4, 3)
    assert data["status"]["memory"]["MemAvailable"] == 50 * 1024
    quiet = Runner(None)
    assert report(context, quiet, gpu=False)["gpu"] is None
    assert "nvidia-smi" not in quiet.programs
    assert report(context, Runner(None), gpu=True)["gpu"] is None


@pytest.mark.parametrize("node", ["spark1", "spark2"])
def test_a_whole_report_out_of_the_node_s_own_plan(tmp_path: Path, port: int, node: str) -> None:
    def runner(argv: Sequence[str], *, seconds: float) -> Completed:  # noqa: ARG001
        return Completed(tuple(argv), 1, "", "not here")

    found = report(context_of(tmp_path, node, port), runner, gpu=False)
    assert found["status"]["node"] == node
    assert found["router"] is None
    json.dumps(found)


def test_files_that_are_no_longer_as_installed_are_reported(tmp_path: Path, port: int) -> None:
    context = context_of(tmp_path, "spark1", port)
    assert report(context, Runner(None), gpu=False)["edited"] is None
    digest = hashlib.sha256(b"a\n").hexdigest()
    paths = ("/etc/spark-a", "/etc/spark-b", "/etc/spark-c")
    files = [
        {"path": path, "kind": "file", "sha256": digest, "mode": "0644", "owner": "root"}
        | {"group": "root"}
        for path in paths
    ]
    text = {"version": 1, "label": "a", "files": files, "actions": [], "watches": []}
    text["contents"] = {digest: base64.b64encode(b"a\n").decode()}
    store = Store(tmp_path)
    with store.locked():
        store.add(read_bundle(json.dumps(text)), store.state())
        switch(store, 1)
        confirm(store)
    assert report(context, Runner(None), gpu=False)["edited"] == []
    (tmp_path / "etc/spark-a").write_text("edited\n")
    (tmp_path / "etc/spark-b").unlink()
    assert report(context, Runner(None), gpu=False)["edited"] == [
        {"path": "/etc/spark-a", "change": "replace", "foreign": False},
        {"path": "/etc/spark-b", "change": "create", "foreign": False},
    ]
