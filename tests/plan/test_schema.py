"""Types, unknown keys and single values of the cluster file."""

from __future__ import annotations

from typing import Any

import pytest
from clusters import changed, document, findings_of
from hypothesis import given
from hypothesis import strategies as st

from spark_appliance.model.cluster import read_cluster
from spark_appliance.model.findings import Path

CASES: list[tuple[str, dict[str, Any], str, Path, str]] = [
    ("unknown key", changed(document(), "nmae", to=1), "schema.unknown-key", ("nmae",), "'name'"),
    (
        "unknown key below",
        changed(document(), "nodes", 1, "adress", to="x"),
        "schema.unknown-key",
        ("nodes", 1, "adress"),
        "'address'",
    ),
    ("wrong version", changed(document(), "version", to=2), "schema.value", ("version",), "1"),
    ("version as text", changed(document(), "version", to="1"), "schema.value", ("version",), "1"),
    ("name is a number", changed(document(), "name", to=7), "schema.type", ("name",), "quotes"),
    ("name is no", changed(document(), "name", to=False), "schema.type", ("name",), "quotes"),
    (
        "revision is a number",
        changed(document(), "model", to={"revision": 12345678}),
        "schema.type",
        ("model", "revision"),
        "quotes",
    ),
    (
        "node name",
        changed(document(), "nodes", 0, "name", to="Spark_1"),
        "schema.value",
        ("nodes", 0, "name"),
        "pattern",
    ),
    (
        "port",
        changed(document(), "api", "port", to=70000),
        "schema.value",
        ("api", "port"),
        "65535",
    ),
    (
        "port as text",
        changed(document(), "api", "port", to="8888"),
        "schema.type",
        ("api", "port"),
        "type",
    ),
    (
        "bind",
        changed(document(), "api", "bind", to="localhost"),
        "schema.value",
        ("api", "bind"),
        "schema",
    ),
    (
        "address",
        changed(document(), "nodes", 0, "address", to="1.2.3"),
        "schema.value",
        ("nodes", 0, "address"),
        "schema",
    ),
    (
        "host name",
        changed(document(), "nodes", 0, "address", to="a_b"),
        "schema.value",
        ("nodes", 0, "address"),
        "schema",
    ),
    (
        "ssh option",
        changed(document(), "nodes", 0, "ssh", to="-oProxyCommand=x"),
        "schema.value",
        ("nodes", 0, "ssh"),
        "pattern",
    ),
    (
        "relative path",
        changed(document(), "model", to={"path": "models"}),
        "schema.value",
        ("model", "path"),
        "schema",
    ),
    (
        "path with ..",
        changed(document(), "model", to={"path": "/a/../b"}),
        "schema.value",
        ("model", "path"),
        "schema",
    ),
    (
        "prefix with host bits",
        changed(document(), "topology", "prefix", to="10.0.0.1/16"),
        "schema.value",
        ("topology", "prefix"),
        "schema",
    ),
    (
        "kind",
        changed(document(), "topology", "kind", to="mesh"),
        "schema.value",
        ("topology", "kind"),
        "ring",
    ),
    (
        "cable end",
        changed(document(), "topology", "cables", to={"spark1.p2": "spark2.p0"}),
        "schema.value",
        ("topology", "cables", "spark1.p2"),
        "pattern",
    ),
    (
        "flag with dashes",
        changed(document(), "engine", to={"args": {"--tp": 3}}),
        "schema.value",
        ("engine", "args", "--tp"),
        "pattern",
    ),
    (
        "flag is a list",
        changed(document(), "engine", to={"args": {"x": [1]}}),
        "schema.type",
        ("engine", "args", "x"),
        "type",
    ),
    (
        "variable is a number",
        changed(document(), "engine", to={"env": {"MAX_JOBS": 2}}),
        "schema.type",
        ("engine", "env", "MAX_JOBS"),
        "quotes",
    ),
    (
        "variable with newline",
        changed(document(), "engine", to={"env": {"A": "x\ny"}}),
        "schema.value",
        ("engine", "env", "A"),
        "schema",
    ),
    ("no nodes", changed(document(), "nodes", to=[]), "schema.value", ("nodes",), "schema"),
    (
        "nine nodes",
        changed(document(), "nodes", to=document()["nodes"] * 3),
        "schema.value",
        ("nodes",),
        "schema",
    ),
    (
        "mtu",
        changed(document(), "topology", "mtu", to=100),
        "schema.value",
        ("topology", "mtu"),
        "1280",
    ),
]


@pytest.mark.parametrize(
    ("data", "rule", "path", "remedy"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_bad_value_is_found_at_its_place(
    data: dict[str, Any], rule: str, path: Path, remedy: str
) -> None:
    findings = findings_of(data)
    assert [(f.rule, f.path) for f in findings] == [(rule, path)]
    assert remedy in findings[0].remedy


@pytest.mark.parametrize("key", ["version", "name", "profile", "topology", "nodes"])
def test_missing_key_is_named(key: str) -> None:
    data = document()
    del data[key]
    findings = findings_of(data)
    assert [(f.rule, f.path) for f in findings] == [("schema.missing", (key,))]


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_a_file_that_is_no_mapping(data: Any) -> None:
    assert read_cluster(data)[1][0].rule == "schema.type"


def test_all_problems_come_at_once() -> None:
    data = changed(document(), "name", to=7)
    data = changed(data, "nodes", 0, "adress", to="x")
    data = changed(data, "api", "port", to=0)
    assert len(findings_of(data)) == 3


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda child: (
        st.lists(child, max_size=3) | st.dictionaries(st.text(max_size=8), child, max_size=3)
    ),
    max_leaves=8,
)


@given(plain, st.sampled_from(["nodes", "topology", "api", "engine", "model", "weights", "ports"]))
def test_any_plain_data_in_any_place_gives_findings_and_no_exception(value: Any, key: str) -> None:
    cluster, findings = read_cluster(changed(document(), key, to=value))
    assert (cluster is None) == bool(findings)
    for finding in findings:
        assert finding.message
        assert finding.remedy
        assert finding.path[:1] == (key,)
