"""Pruning: what is kept, what is refused, and properties on random locks."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from relock.errors import RelockError
from relock.prune import prune
from relock.target import Target

TARGET = Target((3, 13), "aarch64", (2, 41))
METADATA = {"lock-version": "2.1", "python-versions": "~3.13", "content-hash": "0"}


def entry(name: str, version: str = "1", **fields: Any) -> dict[str, Any]:
    files = fields.pop("files", [f"{name}-{version}-py3-none-any.whl"])
    return {
        "name": name,
        "version": version,
        "groups": ["main"],
        "files": [{"file": file, "hash": "sha256:" + "0" * 64} for file in files],
    } | fields


def project(*roots: str, exclude: tuple[str, ...] = (), **special: Any) -> dict[str, Any]:
    dependencies: dict[str, Any] = {"python": "~3.13"} | dict.fromkeys(roots, "*") | special
    return {
        "tool": {
            "poetry": {"dependencies": dependencies},
            "relock": {"exclude": {name: {"version": "1"} for name in exclude}},
        }
    }


def pruned(packages: list[dict[str, Any]], pyproject: dict[str, Any]) -> dict[str, dict[str, Any]]:
    lock = {"package": packages, "metadata": METADATA}
    return {one["name"]: one for one in prune(lock, pyproject, TARGET)["package"]}


def test_the_best_wheel_is_kept_and_nothing_else() -> None:
    files = [
        "a-1.tar.gz",
        "a-1-py3-none-any.whl",
        "a-1-cp313-cp313-manylinux_2_17_aarch64.whl",
        "a-1-cp313-cp313-manylinux_2_28_aarch64.whl",
        "a-1-cp313-cp313-win_amd64.whl",
    ]
    [kept] = pruned([entry("a", files=files)], project("a"))["a"]["files"]
    assert kept["file"] == "a-1-cp313-cp313-manylinux_2_28_aarch64.whl"


def test_what_nobody_needs_here_is_dropped() -> None:
    packages = [
        entry(
            "a",
            dependencies={
                "b": "*",
                "win": {"version": "*", "markers": "sys_platform == 'win32'"},
                "opt": {"version": "*", "optional": True, "markers": "extra == 'opt'"},
            },
            extras={"opt": ["opt"]},
        ),
        entry("b"),
        entry("win"),
        entry("opt"),
        entry("alone"),
    ]
    result = pruned(packages, project("a"))
    assert set(result) == {"a", "b"}
    assert result["a"]["dependencies"] == {"b": "*"}
    assert "extras" not in result["a"]


def test_extras_reach_through_dependencies() -> None:
    optional = {"version": "*", "optional": True, "markers": 'extra == "x"'}
    packages = [
        entry("a", dependencies={"b": {"version": "*", "extras": ["x"]}}),
        entry("b", dependencies={"c": optional}, extras={"x": ["c"], "y": ["d"]}),
        entry("c"),
        entry("d"),
    ]
    result = pruned(packages, project("a"))
    assert set(result) == {"a", "b", "c"}
    assert result["b"]["dependencies"] == {"c": optional}
    assert result["b"]["extras"] == {"x": ["c"]}


def test_an_extra_asked_for_later_still_counts() -> None:
    optional = {"version": "*", "markers": "extra == 'x'"}
    packages = [
        entry("a", dependencies={"c": "*"}),
        entry("b", dependencies={"c": {"version": "*", "extras": ["x"]}}),
        entry("c", dependencies={"d": optional}),
        entry("d"),
    ]
    for roots in (("a", "b"), ("b", "a")):
        assert set(pruned(packages, project(*roots))) == {"a", "b", "c", "d"}


def test_roots_may_ask_for_extras() -> None:
    optional = {"version": "*", "markers": "extra == 'x'"}
    packages = [entry("a", dependencies={"b": optional}), entry("b")]
    with_extra = project(a={"version": "*", "extras": ["x"]})
    assert set(pruned(packages, with_extra)) == {"a", "b"}


def test_an_exclusion_leaves_no_trace() -> None:
    packages = [entry("a", dependencies={"gone": "==1"}), entry("gone")]
    result = pruned(packages, project("a", exclude=("gone",)))
    assert set(result) == {"a"}
    assert "dependencies" not in result["a"]


def test_alternatives_that_do_not_hold_are_dropped() -> None:
    spec = [
        {"version": "==1", "markers": "sys_platform == 'win32'"},
        {"version": "==2", "markers": "sys_platform == 'linux'"},
    ]
    packages = [entry("a", dependencies={"b": spec}), entry("b", "2")]
    assert pruned(packages, project("a"))["a"]["dependencies"] == {"b": "==2"}


def test_alternatives_that_all_hold_are_kept() -> None:
    spec = [">=1", {"version": "<3", "markers": "python_version >= '3.8'"}, ">=1"]
    packages = [entry("a", dependencies={"b": spec}), entry("b", "2")]
    assert pruned(packages, project("a"))["a"]["dependencies"] == {"b": [">=1", "<3"]}


@pytest.mark.parametrize(
    ("marker", "kept"),
    [
        ("sys_platform == 'linux'", None),
        ("extra == 'x' or sys_platform == 'linux'", None),
        ("sys_platform == 'linux' and extra == 'x'", 'extra == "x"'),
        ("extra == 'x' and sys_platform == 'linux'", 'extra == "x"'),
        ("extra == 'y' or extra == 'x' or extra == 'z'", 'extra == "x" or extra == "y"'),
    ],
)
def test_markers_of_dependencies_are_written_in_one_way(marker: str, kept: str | None) -> None:
    packages = [entry("a", dependencies={"b": {"version": "*", "markers": marker}}), entry("b")]
    asked = project(a={"version": "*", "extras": ["y", "x"]})
    spec = {"version": "*", "optional": True, "markers": kept} if kept else "*"
    assert pruned(packages, asked)["a"]["dependencies"] == {"b": spec}


def test_lines_of_extras_lose_their_markers() -> None:
    optional = {"version": ">=1", "markers": "extra == 'x'"}
    lines = ["b (>=1) ; sys_platform == 'linux'", "c ; sys_platform == 'win32'"]
    packages = [entry("a", dependencies={"b": optional}, extras={"x": lines}), entry("b")]
    asked = project(a={"version": "*", "extras": ["x"]})
    assert pruned(packages, asked)["a"]["extras"] == {"x": ["b (>=1)"]}


def test_of_two_entries_the_one_whose_marker_holds_is_kept() -> None:
    packages = [
        entry("a", "1", markers="platform_system == 'Darwin'"),
        entry("a", "2", markers="platform_system != 'Darwin'"),
    ]
    assert pruned(packages, project("a"))["a"]["version"] == "2"


def test_markers_by_group_hold_if_one_does() -> None:
    markers = {"main": "sys_platform == 'linux'", "dev": "sys_platform == 'win32'"}
    assert "a" in pruned([entry("a", markers=markers)], project("a"))


def test_every_entry_carries_the_marker_of_the_target() -> None:
    packages = [
        entry("a", dependencies={"b": "*"}, markers="sys_platform == 'linux'"),
        entry("b", markers="implementation_name != 'PyPy'"),
    ]
    assert {one["markers"] for one in pruned(packages, project("a")).values()} == {TARGET.marker}


def test_sources_are_dropped() -> None:
    source = {"type": "legacy", "url": "there", "reference": "r"}
    assert "source" not in pruned([entry("a", source=source)], project("a"))["a"]


@pytest.mark.parametrize(
    ("packages", "message"),
    [
        ([entry("b")], r"a, required by pyproject\.toml, is not in the lock"),
        ([entry("a", dependencies={"b": "*"})], "b, required by a, is not in the lock"),
        (
            [entry("a"), entry("a", "2"), entry("b"), entry("b", "3")],
            r"locked twice.*a \(1 and 2\), b \(1 and 3\); constrain",
        ),
        ([entry("a", files=["a-1.tar.gz"])], "no wheel for CPython 3.13 on aarch64"),
        (
            [entry("a", files=["a-1-cp311-abi3.abi3t-manylinux_2_28_aarch64.whl"])],
            "compressed ABI tag abi3.abi3t.*constrain",
        ),
    ],
)
def test_what_cannot_be_locked_is_refused_with_a_remedy(
    packages: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(RelockError, match=message):
        pruned(packages, project("a"))


def test_another_hash_than_sha256_is_refused() -> None:
    one = entry("a")
    one["files"][0]["hash"] = "md5:0"
    with pytest.raises(RelockError, match="locked by md5, want sha256"):
        pruned([one], project("a"))


MARKERS = st.sampled_from(
    [
        "",
        "sys_platform == 'linux'",
        "sys_platform == 'win32'",
        "platform_machine == 'x86_64'",
        "python_version >= '3.12'",
        "extra == 'x'",
        "extra == 'y' and sys_platform == 'linux'",
    ]
)
WHEELS = st.lists(
    st.sampled_from(
        [
            "cp313-cp313-manylinux_2_17_aarch64",
            "cp313-cp313-manylinux_2_28_aarch64",
            "cp313-cp313-manylinux_2_28_x86_64",
            "cp312-abi3-manylinux_2_28_aarch64",
            "cp312-cp312-win_amd64",
        ]
    ),
    unique=True,
)


@st.composite
def locks(draw: st.DrawFn) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A lock without holes: any name may depend on any other, cycles included."""
    names = draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, unique=True))
    extras = st.lists(st.sampled_from("xy"), unique=True)
    packages = []
    for name in names:
        dependencies: dict[str, Any] = {}
        for other in draw(st.lists(st.sampled_from(names), unique=True)):
            spec: dict[str, Any] = {"version": "*"}
            if marker := draw(MARKERS):
                spec["markers"] = marker
            if asked := draw(extras):
                spec["extras"] = asked
            dependencies[other] = spec if len(spec) > 1 else "*"
        files = [f"{name}-1-py3-none-any.whl", *(f"{name}-1-{tag}.whl" for tag in draw(WHEELS))]
        one = entry(name, files=draw(st.permutations(files)))
        if dependencies:
            one["dependencies"] = dependencies
        packages.append(one)
    roots = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    return packages, project(*roots)


@given(locks())
def test_pruning_twice_is_pruning_once(case: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
    packages, pyproject = case
    once = prune({"package": packages, "metadata": METADATA}, pyproject, TARGET)
    assert prune(once, pyproject, TARGET) == once


@given(locks(), st.randoms(use_true_random=False))
def test_the_order_of_the_lock_does_not_matter(
    case: tuple[list[dict[str, Any]], dict[str, Any]], chance: random.Random
) -> None:
    packages, pyproject = case
    shuffled = [
        one | {"files": chance.sample(one["files"], len(one["files"]))}
        for one in chance.sample(packages, len(packages))
    ]
    assert pruned(shuffled, pyproject) == pruned(packages, pyproject)


@given(locks())
def test_the_result_is_closed_and_holds_the_roots(
    case: tuple[list[dict[str, Any]], dict[str, Any]],
) -> None:
    packages, pyproject = case
    result = pruned(packages, pyproject)
    assert set(pyproject["tool"]["poetry"]["dependencies"]) - {"python"} <= set(result)
    for one in result.values():
        assert len(one["files"]) == 1
        assert set(one.get("dependencies", {})) <= set(result)


@given(locks())
def test_what_was_dropped_is_not_missed(
    case: tuple[list[dict[str, Any]], dict[str, Any]],
) -> None:
    packages, pyproject = case
    result = pruned(packages, pyproject)
    assert pruned([one for one in packages if one["name"] in result], pyproject) == result


@given(locks())
def test_kept_dependencies_hold_on_the_target(
    case: tuple[list[dict[str, Any]], dict[str, Any]],
) -> None:
    packages, pyproject = case
    for one in pruned(packages, pyproject).values():
        for spec in one.get("dependencies", {}).values():
            marker = spec.get("markers", "") if isinstance(spec, dict) else ""
            assert TARGET.marker_holds(marker, ("x", "y"))
