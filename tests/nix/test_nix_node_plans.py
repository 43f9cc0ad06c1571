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


def _comment(text: str) -> str:
    return "# a comment\n" + text.replace("nodes:", "nodes: # another")


def _source(data: Any) -> None:
    data["management_network"] = "192.168.0.0/16"  # only used to check addresses


def _disk(data: Any) -> None:
    data["nodes"][1]["engram"] = {"device": "/dev/disk/by-id/nvme-new"}


def _key(data: Any) -> None:
    data["api"]["key_file"] = "/etc/spark/another-key"


CHANGES: dict[str, tuple[Callable[[Any], None], set[str]]] = {
    "the source alone": (_source, set()),
    "another disk of spark2": (_disk, {"spark2"}),
    "the head's key file": (_key, {"spark1"}),
}


@pytest.fixture(scope="module")
def systems(nix: Nix, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Derivations of the nodes' systems, before and after each change."""
    base = tmp_path_factory.mktemp("profile")
    profile = PROFILE.read_text()
    for old, new in (("name: stable-tp3\n", "name: mine\n"), ("seed: 0\n", "seed: 1\n")):
        assert profile.count(old) == 1
        profile = profile.replace(old, new)
    (base / "mine.yaml").write_text(profile)

    def with_profile(data: Any) -> None:
        data["profile"] = str(base / "mine.yaml")

    texts = {"before": nixos_plan(EXAMPLE)}
    commented = base / "cluster.yaml"
    commented.write_text(_comment((EXAMPLE / "cluster.yaml").read_text()))
    texts["a comment"] = nixos_plan(base)
    texts["a value of the profile"] = nixos_plan(EXAMPLE, with_profile)
    texts |= {name: nixos_plan(EXAMPLE, change) for name, (change, _) in CHANGES.items()}
    found: dict[str, dict[str, str]] = {}
    for number, (name, text) in enumerate(texts.items()):
        path: Path = nix.source.parent / "plans" / "drv" / str(number) / "cluster.lock.json"
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
        assert (text == texts["before"]) is (name in ("before", "a comment"))
        # a process each: Nix keeps every system that it evaluated in memory
        found[name] = nix.evaluate("toplevels.nix", {"lock": nix.inside(path)})
    assert set(found["before"]) == NODES
    return found


def _rebuilt(systems: dict[str, dict[str, str]], name: str) -> set[str]:
    return {node for node in NODES if systems[name][node] != systems["before"][node]}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_rebuilds_only_the_nodes_it_concerns(
    systems: dict[str, dict[str, str]], name: str
) -> None:
    assert _rebuilt(systems, name) == CHANGES[name][1]


def test_a_comment_rebuilds_nothing(systems: dict[str, dict[str, str]]) -> None:
    assert _rebuilt(systems, "a comment") == set()


def test_a_value_of_the_profile_rebuilds_every_node(systems: dict[str, dict[str, str]]) -> None:
    assert _rebuilt(systems, "a value of the profile") == NODES
