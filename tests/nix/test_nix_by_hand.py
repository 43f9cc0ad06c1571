"""Nodes with hand-written options: their plans and command lines are complete."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from by_hand import PATH, evaluated, text
from nixtool import Nix
from nixunits import sections, words

pytestmark = pytest.mark.nix

NAMES = sorted(json.loads(PATH.read_text(encoding="utf-8")))
NODE = ["@spark-node@", "--plan", "/etc/spark/plan.json", "--node", "spark9"]


@pytest.fixture(scope="module")
def nodes(nix: Nix) -> dict[str, Any]:
    return evaluated(nix)


def before(node: Any) -> list[list[str]]:
    """Return the commands before a start of the engine."""
    service = sections(node["units"]["spark-engine.service"])["Service"]
    return [words(line) for line in service["ExecStartPre"]]


def test_committed_plans_are_the_modules(nodes: dict[str, Any]) -> None:
    # tests/node/test_by_hand.py gives them to the node programs
    assert PATH.read_text(encoding="utf-8") == text(nodes), "run: python tests/nix/by_hand.py"


@pytest.mark.parametrize("name", NAMES)
def test_no_word_of_a_unit_stays_open(nodes: dict[str, Any], name: str) -> None:
    node = nodes[name]
    assert node["messages"] == []
    services = [unit for unit in node["plan"]["nodes"][0]["units"] if unit["exec_start"]]
    assert services
    for unit in services:
        text = node["units"][unit["name"]]
        assert "\nExecStart=" in text
        assert re.findall(r"<[A-Z-]+>", text) == []


def test_the_engine_waits_only_for_what_is_there(nodes: dict[str, Any]) -> None:
    prepare = ["+@spark-node@", *NODE[1:], "prepare", "--user", "spark"]
    fabric = ["+@spark-node@", *NODE[1:], "fabric", "--deadline", "120"]
    check = [*NODE, "exec", "--", "@spark-engram@", "plugin-check", "--tp", "1", "--rank", "0"]
    assert before(nodes["engine"]) == before(nodes["engine-weights"]) == [prepare]
    assert before(nodes["engine-fabric"]) == [fabric, prepare]
    assert before(nodes["engine-everything"]) == [
        fabric,
        prepare,
        [*check, "--checkpoint", "/models/small"],
    ]


def test_another_cache_directory_can_be_written_to(nodes: dict[str, Any]) -> None:
    service = sections(nodes["engine-everything"]["units"]["spark-engine.service"])["Service"]
    assert service["WorkingDirectory"] == service["ReadWritePaths"] == ["/srv/spark-engine"]
    service = sections(nodes["engine"]["units"]["spark-engine.service"])["Service"]
    assert service["WorkingDirectory"] == ["/var/cache/spark-engine"]
    assert service["ReadWritePaths"] == []
