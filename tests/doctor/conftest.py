from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fakeroot import FakeSpark
from fakessh import FakeSsh

from spark_appliance.doctor.document import Document, read_document
from spark_appliance.doctor.examine import base
from spark_appliance.doctor.program import PROBE_MODULES, program
from spark_appliance.doctor.registry import Answer, Facts
from spark_appliance.doctor.request import request
from spark_appliance.model.plan import NodePlan, Plan
from spark_appliance.workspace import open_cluster

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
GIB = 1 << 30


def run_probe(spark: FakeSpark, python: str = sys.executable, **extra: Any) -> str:
    """Run the real probe over a fake node and return what it prints."""
    asked = {**request(spark.plan, spark.node), "root": str(spark.root), **extra}
    environ = {**spark.environ, "LC_ALL": "C"}
    done = subprocess.run(
        [python, "-I", "-"],
        input=program(PROBE_MODULES, asked),
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def on_a_spark(document: Document) -> Document:
    """Put in what a fake tree cannot show: the machine, its user, its disks."""
    data = copy.deepcopy(document.data)
    sections = data["sections"]
    data["uid"] = 0
    sections["system"]["machine"] = "aarch64"
    sections["system"]["page_size"] = 4096
    for space in sections["disks"]["free"].values():
        space |= {"total": 3700 * GIB, "free": 900 * GIB}
    if "direct" in sections["engram"]:
        sections["engram"]["direct"] = "ok"
        sections["engram"]["errors"].pop("direct", None)
    # sparse files have no extents; ext4 writes large files in extents of 128 MiB
    sections["checkpoint"]["extents"] = {
        name: 1 + size // (128 << 20) for name, size in sections["checkpoint"]["files"].items()
    }
    sections["checkpoint"]["errors"].pop("extents", None)
    return Document(data)


def facts_of(plan: Plan, sparks: dict[str, FakeSpark]) -> Facts:
    answers = {}
    for name, spark in sparks.items():
        document = on_a_spark(read_document(run_probe(spark), name))
        started = document.data["started"]
        answers[name] = Answer(document, started - 0.3, document.data["ended"] + 0.1)
    return dataclasses.replace(base(plan), answers=answers)


def sparks_of(plan: Plan, folder: Path) -> dict[str, FakeSpark]:
    return {node.name: FakeSpark(folder / node.name, plan, node) for node in plan.nodes}


@pytest.fixture(scope="session")
def plan() -> Plan:
    opened = open_cluster(EXAMPLES / "three-spark-triangle" / "cluster.yaml")
    return opened.require_plan()


@pytest.fixture(scope="session")
def dgx_plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    text = (EXAMPLES / "three-spark-triangle" / "cluster.yaml").read_text()
    path = tmp_path_factory.mktemp("dgx") / "cluster.yaml"
    path.write_text(text.replace("system: nixos", "system: dgx-os"))
    return open_cluster(path).require_plan()


@pytest.fixture(scope="session")
def ring_plan() -> Plan:
    return open_cluster(EXAMPLES / "four-spark-ring" / "cluster.yaml").require_plan()


@pytest.fixture(scope="session")
def good(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """Facts of three healthy NixOS nodes, as the real probe tells them."""
    return facts_of(plan, sparks_of(plan, tmp_path_factory.mktemp("nixos")))


@pytest.fixture(scope="session")
def good_dgx(dgx_plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """Facts of three healthy DGX OS nodes with docker."""
    sparks = sparks_of(dgx_plan, tmp_path_factory.mktemp("dgx-nodes"))
    for spark in sparks.values():
        spark.docker()
    return facts_of(dgx_plan, sparks)


@pytest.fixture
def spark(plan: Plan, tmp_path: Path) -> FakeSpark:
    """One worker's tree, to be spoiled by a test."""
    return FakeSpark(tmp_path / "spark2", plan, plan.nodes[1])


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSsh:
    """A fake ssh on PATH; every destination has to be told what it does."""
    fake = FakeSsh(tmp_path / "ssh", os.environ["PATH"])
    for name, value in fake.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return fake


def node_of(plan: Plan, name: str) -> NodePlan:
    node = plan.node(name)
    assert node is not None
    return node


def dump(document: Document) -> str:
    return json.dumps(document.data)


os.environ.setdefault("NO_COLOR", "1")
