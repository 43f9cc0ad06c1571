from __future__ import annotations

import os
from pathlib import Path

import pytest
from doctor_nodes import EXAMPLES, facts_of, sparks_of
from doctor_root import FakeSpark
from doctor_ssh import FakeSsh

from spark_appliance.doctor.registry import Facts
from spark_appliance.model.plan import Plan
from spark_appliance.workspace import open_cluster


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
