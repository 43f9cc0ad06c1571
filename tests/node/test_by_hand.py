"""The node programs with the plans that the NixOS modules make of hand-written options.

The plans are committed (``tests/nix/by_hand.py``), so that this needs no Nix.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spark_appliance.node.errors import NodeError
from spark_appliance.node.execute import engine_command, engine_environment
from spark_appliance.node.fabric import Fabric, read_environment
from spark_appliance.node.guard import Guard, Killer
from spark_appliance.node.notify import Notifier
from spark_appliance.node.plan import NodeContext, read_context
from spark_appliance.node.prepare import Owner, Preparation
from spark_appliance.node.rails import rails_of
from spark_appliance.node.ready import probe_of
from spark_appliance.node.report import report
from spark_appliance.node.router import router_argv
from spark_appliance.node.supervisor.service import run_head
from spark_appliance.node.supervisor.state import State
from spark_appliance.node.systemctl import UnitState

from .conftest import FakeClock, FakeRunner, Log, Sysfs, write
from .test_prepare import shard
from .test_supervisor import TIMING, FakeUnits, RecordingNotifier, System

PLANS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "nix/by_hand_plans.json").read_text(encoding="utf-8")
)
NODE = "spark9"


def having(unit: str) -> list[str]:
    """Return the plans with a unit."""
    return [
        name
        for name, plan in PLANS.items()
        if unit in [found["name"] for found in plan["nodes"][0]["units"]]
    ]


ENGINES = having("spark-engine.service")


def context_of(root: Path, name: str) -> NodeContext:
    file = root / "etc/spark/plan.json"
    write(file, json.dumps(PLANS[name]))
    return read_context(file, NODE, root)


def disk(root: Path, node: dict[str, Any]) -> None:
    """Make the files that a plan's node needs before a start."""
    shard_file = root / "models/small/model.safetensors"
    shard_file.parent.mkdir(parents=True)
    shard(shard_file)
    for name in ("drop_caches", "compact_memory"):
        write(root / "proc/sys/vm" / name, "0")
    write(root / "credentials/api-key", "sk-s3cret\n")
    if node["engram"] is not None:
        folder = root / node["engram"]["directory"][1:]
        for file in node["engram"]["files"]:
            write(folder / file["name"], "\0" * file["bytes"])
            receipt = {"file": file["name"], "file_bytes": file["bytes"]}
            write(folder / f"{file['name']}.receipt.json", json.dumps(receipt))


def bring_up(context: NodeContext, log: Log) -> None:
    """Run ``spark-node fabric`` on a node whose rails are in order."""
    sysfs = Sysfs(context.root, context.node.data)
    sysfs.build()

    def answer(argv: Sequence[str]) -> tuple[int, str]:
        return 0, sysfs.ip_json() if argv[0] == "ip" else ""

    Fabric(context, FakeRunner(answer), FakeClock(), log.journal, 30).run()


def test_the_plans_are_of_every_kind() -> None:
    assert having("spark-fabric.service") == ["engine-everything", "engine-fabric", "fabric"]
    assert ENGINES == ["engine", "engine-everything", "engine-fabric", "engine-weights"]
    assert having("spark-router.service") == ["engine-everything", "router"]
    assert having("spark-engram-pack.service") == ["engine-everything", "engram"]
    assert "guard" in having("spark-guard.service")


@pytest.mark.parametrize("name", PLANS)
def test_every_command_line_is_filled_in(name: str) -> None:
    for unit in PLANS[name]["nodes"][0]["units"]:
        assert re.findall(r"<[A-Z-]+>", json.dumps(unit)) == [], unit["name"]


@pytest.mark.parametrize("name", having("spark-fabric.service"))
def test_fabric(root: Path, log: Log, name: str) -> None:
    context = context_of(root, name)
    (rail,) = rails_of(context)
    assert str(rail) == "rail enp1s0f0np0 (cage spark9.p0)"
    bring_up(context, log)
    assert read_environment(root / "run/spark/fabric.env") == {"NCCL_IB_GID_INDEX": "3"}


@pytest.mark.parametrize("name", ENGINES)
def test_prepare_and_exec(root: Path, log: Log, name: str) -> None:
    context = context_of(root, name)
    node = context.node.data
    disk(root, node)
    owner = Owner("spark", os.getuid(), os.getgid())
    keys = {"CREDENTIALS_DIRECTORY": str(root / "credentials")}
    Preparation(context, log.journal, owner, keys).run()
    assert log.lines == []
    assert (root / node["cache_directory"][1:]).is_dir()
    assert (root / "run/spark-engine/config.yaml").exists() == (name == "engine-everything")
    if node["rails"]:
        bring_up(context, log)
    environment = engine_environment(context, {"PATH": "/bin"})
    assert environment["HOME"] == node["cache_directory"]
    assert node["env"].items() <= environment.items()
    assert engine_command(context, "/env/bin/python3") == ["/env/bin/python3", *node["argv"][1:]]


def test_prepare_misses_what_the_options_name(root: Path, log: Log) -> None:
    context = context_of(root, "engine-everything")
    owner = Owner("spark", os.getuid(), os.getgid())
    with pytest.raises(NodeError) as caught:
        Preparation(context, log.journal, owner, {}).run()
    assert "/models/small: no such directory; copy the checkpoint there" in str(caught.value)
    assert "/var/lib/spark/engram/engram-l2-rows-0-2.bin: No such file" in str(caught.value)


@pytest.mark.parametrize("name", ENGINES)
def test_the_probe_asks_where_argv_serves(root: Path, name: str) -> None:
    context = context_of(root, name)
    probe = probe_of(context, None)
    assert probe.live_url == "http://127.0.0.1:8888/health"
    assert probe.generate_url == "http://127.0.0.1:8888/v1/chat/completions"
    assert probe.body["model"] == "/models/small"
    health = context.plan.view("health")
    interval, steady, ready = map(health.integer, ("interval", "steady_interval", "ready_timeout"))
    assert (interval, steady, ready) == (5 if name == "engine-everything" else 10, 60, 3600)
    # the key is a credential of the unit exactly where the program asks for it
    (unit,) = (u for u in context.node.data["units"] if u["name"] == "spark-ready.service")
    key = context.plan.view("api").optional_text("key_file")
    assert unit["settings"].get("LoadCredential") == (None if key is None else f"api-key:{key}")


@pytest.mark.parametrize("name", ENGINES)
def test_the_supervisor_of_one_rank_serves(root: Path, log: Log, name: str) -> None:
    async def serve() -> list[str]:
        context, system, stop = context_of(root, name), System(), asyncio.Event()
        notifier, units = RecordingNotifier(NODE, system), FakeUnits(NODE, system)
        state = State(context, log.journal, notifier)
        task = asyncio.create_task(
            run_head(context, units, log.journal, notifier, TIMING, state, stop)
        )
        serving = asyncio.create_task(system.until(system.phase(NODE, "serving")))
        await asyncio.wait([task, serving], return_when=asyncio.FIRST_COMPLETED)
        stop.set()
        await asyncio.gather(task, serving)
        return system.events

    assert asyncio.run(serve()) == [
        "spark9 start spark-engine",
        "spark9 start spark-ready",
        "spark9 stop spark-ready",
        "spark9 stop spark-engine",
    ]


@pytest.mark.parametrize("name", having("spark-guard.service"))
def test_guard(root: Path, log: Log, name: str) -> None:
    context = context_of(root, name)
    figures = {"MemTotal": 120 << 20, "MemFree": 90 << 20, "MemAvailable": 90 << 20}
    write(root / "proc/meminfo", "".join(f"{k}: {v} kB\n" for k, v in figures.items()))
    killer = Killer(context, FakeRunner(lambda _: (0, "")), None, "docker")
    Guard(context, killer, log.journal, Notifier({}), lambda _: True).run()
    assert log.lines == ["<5>armed: MemAvailable 90.00 GiB, threshold 5.00 GiB"]


@pytest.mark.parametrize("name", having("spark-router.service"))
def test_router(root: Path, name: str) -> None:
    argv = router_argv(context_of(root, name), sys.executable)
    assert argv[3:] == PLANS[name]["router"]["argv"]
    assert PLANS[name]["router"]["readiness_url"] == "http://127.0.0.1:8000/readiness"
    assert [replica["url"] for replica in PLANS[name]["router"]["replicas"]] == argv[6:8]


@pytest.mark.parametrize("name", PLANS)
def test_report(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_appliance.node.engine_facts._ask", lambda *_: (None, b""))
    monkeypatch.setattr(
        "spark_appliance.node.status.show",
        lambda _, names: {unit: UnitState(unit, "active") for unit in names},
    )
    found = report(context_of(root, name), FakeRunner(lambda _: (0, "[]")), gpu=False)
    # only a fabric that was not brought up is a problem here
    problems = [text for text in found["status"]["problems"] if "fabric.env" not in text]
    assert problems == []
    assert (found["engine"] is not None) == (name in ENGINES)
    assert (found["router"] is not None) == (name in having("spark-router.service"))
