from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from spark_appliance.node.plan import NodeContext
from spark_appliance.node.status import status

from .conftest import FakeRunner, Sysfs, write

SHOW = """\
Id=spark-engine.service
LoadState=loaded
ActiveState=active
SubState=running
Result=success
ExecMainStatus=0
StatusText=
ControlGroup=/system.slice/spark-engine.service
NRestarts=0

Id=spark-ready.service
LoadState=loaded
ActiveState=failed
SubState=failed
Result=exit-code
ExecMainStatus=1
StatusText=serving; last probe: a=b
ControlGroup=
NRestarts=2
"""


@pytest.fixture
def healthy(root: Path, plan: dict[str, Any], context_of: Callable[..., NodeContext]) -> Any:
    node = plan["nodes"][0]
    sysfs = Sysfs(root, node)
    sysfs.build()
    write(root / "proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 500 kB\nHugePages_Total: 0\n")
    write(root / "run/spark/fabric.env", "# x\nNCCL_IB_GID_INDEX=3\n")
    write(root / "run/spark/ready", "")
    write(root / "run/spark/supervisor.json", '{"phase": "serving"}')
    write(root / "run/spark/guard.json", "broken")
    for file in node["engram"]["files"]:
        file["bytes"] = 5
        write(root / "srv/engram" / file["name"], "12345")
        write(root / "srv/engram" / f"{file['name']}.receipt.json", "{}")
    return context_of(plan), sysfs


def answer(sysfs: Sysfs) -> Callable[[Sequence[str]], tuple[int, str]]:
    return lambda argv: (0, sysfs.ip_json() if argv[0] == "ip" else SHOW)


def test_says_everything_in_one_document(healthy: Any) -> None:
    context, sysfs = healthy
    runner = FakeRunner(answer(sysfs))
    document = status(context, runner)
    assert json.loads(json.dumps(document)) == document
    assert len(runner.calls) == 2  # one systemctl, one ip
    assert document["problems"] == []
    assert document["version"] == 1
    assert (document["node"], document["role"], document["rank"]) == ("spark1", "head", 0)
    assert document["plan"]["sha256"] == context.sha256
    assert document["ready"] is True
    assert document["supervisor"] == {"phase": "serving"}
    assert document["guard"] is None
    assert document["memory"]["MemAvailable"] == 512000
    assert document["memory"]["CmaFree"] is None
    assert document["fabric_env"] == {"NCCL_IB_GID_INDEX": "3"}
    assert document["units"]["spark-ready.service"] == {
        "load": "loaded",
        "active": "failed",
        "sub": "failed",
        "result": "exit-code",
        "text": "serving; last probe: a=b",
        "restarts": "2",
    }
    [rail, *_] = document["rails"]
    assert (rail["mtu"], rail["speed_mbps"], rail["gid_index"], rail["missing"]) == (
        *(9000, 200000, 3),
        [],
    )
    assert rail["gids"][-1]["type"] == "RoCE v2"
    assert all(file["good"] for file in document["engram"])


def test_what_is_missing_is_seen(healthy: Any) -> None:
    context, sysfs = healthy
    context.path("/run/spark/ready").unlink()
    context.path("/run/spark/fabric.env").unlink()
    name = context.node.data["engram"]["files"][0]["name"]
    context.path(f"/srv/engram/{name}").unlink()
    sysfs.net(sysfs.node["rails"][0], "operstate", "down")
    document = status(context, FakeRunner(answer(sysfs)))
    assert document["ready"] is False
    assert document["fabric_env"] is None
    assert "fabric.env" in document["problems"][0]
    assert (document["engram"][0]["bytes"], document["engram"][0]["good"]) == (None, False)
    assert "link is down" in document["rails"][0]["missing"][0]


def test_a_node_without_anything_still_answers(
    plan: dict[str, Any], context_of: Callable[..., NodeContext]
) -> None:
    document = status(context_of(plan), FakeRunner(lambda _: (1, "no")))
    assert document["units"] is None
    assert document["rails"] is None
    assert len(document["problems"]) == 3
    assert document["memory"]["MemTotal"] is None


def test_the_program_prints_it(
    root: Path, plan: dict[str, Any], context_of: Callable[..., NodeContext], tmp_path: Path
) -> None:
    context_of(plan, "spark2")
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool, text in (("systemctl", SHOW), ("ip", "[]")):
        write(tools / tool, f"#!/bin/sh\ncat <<'EOT'\n{text}\nEOT\n")
        (tools / tool).chmod(0o755)
    done = subprocess.run(
        [
            *[sys.executable, "-m", "spark_appliance.node", "--root", str(root)],
            *["--node", "spark2", "status"],
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
    )
    assert done.stdout.count("\n") == 1
    document = json.loads(done.stdout)
    assert document["units"]["spark-engine.service"]["active"] == "active"
    assert document["rank"] == 1
