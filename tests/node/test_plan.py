from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_appliance.node.errors import PlanError
from spark_appliance.node.plan import View, read_context
from spark_appliance.node.projection import node_plan


def test_reads_a_node(context_of: Any, plan: dict[str, Any]) -> None:
    context = context_of(plan, "spark2")
    assert (context.name, context.is_head) == ("spark2", False)
    assert context.head.text("name") == "spark1"
    assert [view.text("name") for view in context.others] == ["spark1", "spark3"]


def test_the_same_plan_has_the_same_hash_however_it_is_written(
    tmp_path: Path, plan: dict[str, Any]
) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    one.write_text(json.dumps(plan, indent=4))
    two.write_text(json.dumps(dict(reversed(plan.items()))))
    first = read_context(one, "spark1", tmp_path).sha256
    assert read_context(two, "spark1", tmp_path).sha256 == first
    plan["name"] = "other"
    two.write_text(json.dumps(plan))
    assert read_context(two, "spark1", tmp_path).sha256 != first


def test_an_own_plan_says_the_same_as_the_whole(tmp_path: Path, plan: dict[str, Any]) -> None:
    whole, own = tmp_path / "whole.json", tmp_path / "own.json"
    whole.write_text(json.dumps(plan))
    own.write_text(json.dumps(node_plan(plan, "spark2")))
    one, two = (read_context(file, "spark2", tmp_path) for file in (whole, own))
    assert one.node.data == two.node.data
    assert one.shared_sha256 == two.shared_sha256
    assert one.sha256 != two.sha256
    assert two.head.text("address") == "127.0.0.11"
    with pytest.raises(PlanError, match="is another node's own plan, 'spark3' is only named"):
        read_context(own, "spark3", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"version": 2, "nodes": []}', "is no plan of version 1 (version: 2)"),
        (b"[]", "is no plan of version 1 (version: None)"),
        (b"{", "is no JSON"),
        (b"\xff\xfe", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b'{"version": 1}', "nodes: missing"),
        (b'{"version": 1, "nodes": [1]}', "is no list of mappings"),
        (b'{"version": 1, "nodes": [{}]}', "nodes[0].name: missing"),
        (b'{"version": 1, "nodes": [{"name": "a"}]}', "has no node 'spark1'; it has a"),
    ],
)
def test_a_bad_plan_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        read_context(file, "spark1", tmp_path)
    assert message in str(caught.value)
    assert str(file) in str(caught.value)
    assert caught.value.exit_status == 2


def test_a_plan_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read the plan: No such file"):
        read_context(tmp_path / "plan.json", "spark1", tmp_path)


READERS = ["text", "integer", "integers", "texts", "view", "views", "groups"]


@settings(max_examples=60, deadline=None)
@given(value=st.recursive(st.none() | st.booleans() | st.text() | st.integers(), st.lists))
def test_readers_never_raise_anything_else(value: Any) -> None:
    view = View({"key": value}, "plan")
    for reader in READERS:
        try:
            getattr(view, reader)("key")
        except PlanError as error:
            assert "plan.key" in str(error)
