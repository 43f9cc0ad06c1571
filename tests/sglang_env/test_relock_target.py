"""Which wheels the target takes, and how markers answer there."""

from __future__ import annotations

from typing import Any

import pytest
from relock.errors import RelockError
from relock.target import Target

TARGET = Target((3, 13), "aarch64", (2, 41))

BEST_FIRST = [
    "p-1-2-cp313-cp313-manylinux_2_41_aarch64.whl",
    "p-1-1-cp313-cp313-manylinux_2_41_aarch64.whl",
    "p-1-cp313-cp313-manylinux_2_41_aarch64.whl",
    "p-1-cp313-cp313-manylinux_2_28_aarch64.whl",
    "p-1-cp313-cp313-manylinux_2_17_aarch64.manylinux2014_aarch64.whl",
    "p-1-cp313-cp313-linux_aarch64.whl",
    "p-1-cp313-abi3-manylinux_2_28_aarch64.whl",
    "p-1-cp313-none-manylinux_2_28_aarch64.whl",
    "p-1-cp39-abi3-manylinux_2_28_aarch64.whl",
    "p-1-py3-none-manylinux_2_28_aarch64.whl",
    "p-1-py3-none-any.whl",
]

REFUSED = [
    "p-1-cp313-cp313-manylinux_2_42_aarch64.whl",
    "p-1-cp313-cp313-manylinux_2_28_x86_64.whl",
    "p-1-cp313-cp313-musllinux_1_2_aarch64.whl",
    "p-1-cp313-cp313t-manylinux_2_28_aarch64.whl",
    "p-1-cp312-cp312-manylinux_2_28_aarch64.whl",
    "p-1-cp314-abi3-manylinux_2_28_aarch64.whl",
    "p-1-cp313-cp313-macosx_11_0_arm64.whl",
    "p-1-cp313-cp313-win_arm64.whl",
    "p-1-py2-none-any.whl",
    "p-1-cp313-cp313-manylinux_2_35_riscv64.whl",
]


def test_wheels_are_ordered_as_installers_order_them() -> None:
    keys = [TARGET.wheel_key(name) for name in BEST_FIRST]
    assert None not in keys
    assert keys == sorted(keys)  # type: ignore[type-var]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("name", REFUSED)
def test_wheels_of_other_systems_are_refused(name: str) -> None:
    assert TARGET.wheel_key(name) is None


def test_a_name_that_is_no_wheel_is_an_error() -> None:
    with pytest.raises(RelockError, match=r"p-1\.tar\.gz"):
        TARGET.wheel_key("p-1.tar.gz")


@pytest.mark.parametrize(
    ("marker", "extras", "holds"),
    [
        ("", (), True),
        ("*", (), True),
        ("sys_platform == 'linux' and platform_machine == 'aarch64'", (), True),
        ("platform_machine == 'x86_64'", (), False),
        ("os_name == 'nt' or sys_platform == 'darwin'", (), False),
        ("python_version >= '3.13' and python_version < '3.14'", (), True),
        ("python_full_version < '3.14'", (), True),
        ("implementation_name != 'PyPy'", (), True),
        ("extra == 'cu13'", (), False),
        ("extra == 'cu13'", ("cu12", "cu13"), True),
        ("sys_platform == 'win32' and extra == 'cu13'", ("cu13",), False),
    ],
)
def test_markers_answer_for_the_target(marker: str, extras: tuple[str, ...], holds: bool) -> None:
    assert TARGET.marker_holds(marker, extras) is holds


def test_a_marker_that_depends_on_the_patch_release_is_an_error() -> None:
    with pytest.raises(RelockError, match="constrain the package"):
        TARGET.marker_holds("python_full_version < '3.13.1'")


def test_a_broken_marker_is_an_error() -> None:
    with pytest.raises(RelockError, match="marker"):
        TARGET.marker_holds("sys_platform ==")


def test_the_targets_own_marker_holds_only_there() -> None:
    marker = TARGET.marker
    assert TARGET.marker_holds(marker)
    assert not Target((3, 13), "x86_64", (2, 41)).marker_holds(marker)


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"python": "3.13", "machine": "aarch64"},
        {"python": "3", "machine": "aarch64", "glibc": "2.41"},
        {"python": "3.13", "machine": "aarch64", "glibc": 2.41},
    ],
)
def test_a_bad_target_table_names_itself_and_the_remedy(table: dict[str, Any]) -> None:
    with pytest.raises((RelockError), match=r"\[tool\.relock\.target\].*write python"):
        Target.from_pyproject({"tool": {"relock": {"target": table}}})


def test_the_committed_target_is_read(pyproject: dict[str, Any]) -> None:
    assert Target.from_pyproject(pyproject) == TARGET
