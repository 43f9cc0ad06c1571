"""Nix and Python agree on a node's own plan, and a change rebuilds only the nodes it concerns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nixplans import EXAMPLES, nixos_plan
from nixtool import REPOSITORY, Nix

from spark_appliance.node.projection import node_plan

pytestmark = pytest.mark.nix

EXAMPLE = EXAMPLES / "three-spark-triangle"
PROFILE = REPOSITORY / "spark_appliance" / "profiles" / "data" / "stable-tp3.yaml"
NODES = {"spark1", "spark2", "spark3"}


def test_nix_and_python_project_the_same(nix: Nix, plans: dict[str, str]) -> None:
    found = nix.evaluate("nodeplans.nix", {"locks": json.dumps(plans)})
    for name, lock in plans.items():
        plan = json.loads((nix.root / lock.lstrip("/")).read_text())
        own = {node["name"]: node_plan(plan, node["name"]) for node in plan["nodes"]}
        assert found[name] == {node: {"own": value, "again": value} for node, value in own.items()}


def test_a_comment_leaves_the_plan_as_it_was(tmp_path: Path) -> None:
    text = (EXAMPLE / "cluster.yaml").read_text()
    commented = "# a comment\n" + text.replace("nodes:", "nodes: # another")
    (tmp_path / "cluster.yaml").write_text(commented)
    assert nixos_plan(tmp_path) == nixos_plan(EXAMPLE)


def _disk(data: Any) -> None:
    data["nodes"][1]["engram"] = {"device": "/dev/disk/by-id/nvme-new"}


@pytest.fixture(scope="module")
def systems(nix: Nix) -> Callable[[str], dict[str, str]]:
    """Evaluate the derivations of a plan's systems, each plan once."""
    known: dict[str, dict[str, str]] = {}

    def evaluate(text: str) -> dict[str, str]:
        if text not in known:
            path: Path = nix.source.parent / "plans" / f"drv{len(known)}" / "cluster.lock.json"
            path.parent.mkdir(parents=True)
            path.write_text(text, encoding="utf-8")
            # a process each: Nix keeps every system that it evaluated in memory
            known[text] = nix.evaluate("toplevels.nix", {"lock": nix.inside(path)})
        return known[text]

    return evaluate


def test_another_disk_of_a_node_rebuilds_that_node_alone(
    systems: Callable[[str], dict[str, str]],
) -> None:
    before, after = (json.loads(nixos_plan(EXAMPLE, change)) for change in (None, _disk))
    assert before["source"] != after["source"]
    old, new = systems(nixos_plan(EXAMPLE)), systems(nixos_plan(EXAMPLE, _disk))
    assert set(old) == set(new) == NODES
    assert {node for node in NODES if old[node] != new[node]} == {"spark2"}


def test_a_value_of_the_profile_rebuilds_every_node(
    systems: Callable[[str], dict[str, str]], tmp_path: Path
) -> None:
    profile = PROFILE.read_text()
    for before, after in (("name: stable-tp3\n", "name: mine\n"), ("seed: 0\n", "seed: 1\n")):
        assert profile.count(before) == 1
        profile = profile.replace(before, after)
    (tmp_path / "mine.yaml").write_text(profile)

    def with_profile(data: Any) -> None:
        data["profile"] = str(tmp_path / "mine.yaml")

    old, new = systems(nixos_plan(EXAMPLE)), systems(nixos_plan(EXAMPLE, with_profile))
    assert {node for node in NODES if old[node] != new[node]} == NODES
