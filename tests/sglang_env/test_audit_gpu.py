"""GPU code: which architectures run on a GB10, and how containers are read."""

from __future__ import annotations

import struct

import pytest
from audit import fatbin
from audit.gpu_rules import GpuCode, judge, runs, usable

RUN = ["sm_120", "sm_121", "sm_121a", "sm_120f", "sm_121f"]
RUN_PTX = ["compute_75", "compute_90", "compute_120", "compute_121", "compute_121a", "compute_120f"]
DO_NOT_RUN = ["sm_90", "sm_100", "sm_110", "sm_120a", "sm_100f", "sm_90a", "sm_122", "sm_130"]
DO_NOT_RUN_PTX = ["compute_90a", "compute_120a", "compute_100f", "compute_130"]


@pytest.mark.parametrize("name", [*RUN, *RUN_PTX])
def test_runs(name: str) -> None:
    assert runs(name)


@pytest.mark.parametrize("name", [*DO_NOT_RUN, *DO_NOT_RUN_PTX])
def test_does_not_run(name: str) -> None:
    assert not runs(name)


def test_another_device_has_other_answers() -> None:
    assert runs("sm_100f", (10, 3))
    assert runs("sm_80", (8, 6))
    assert not runs("sm_121", (12, 0))


@pytest.mark.parametrize("name", ["", "sm_", "gfx950", "sm_120x", "compute"])
def test_a_name_that_is_no_architecture_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="no GPU architecture"):
        runs(name)


def test_usable_names_each_architecture_once() -> None:
    code = GpuCode("w", "p", {"sm_120": 3, "sm_90": 1}, {"compute_120": 2, "compute_90a": 1})
    assert usable(code) == ["compute_120", "sm_120"]


def test_dead_code_needs_a_reason_and_a_reason_needs_dead_code() -> None:
    dead = GpuCode("w", "dead.so", {"sm_90a": 1}, {})
    live = GpuCode("w", "live.so", {"sm_121a": 1}, {})
    assert judge([dead, live], {})["problems"] == ["dead.so: nothing in it runs on sm_121"]
    result = judge([dead, live], {"dead.so": "why"})
    assert result["problems"] == []
    assert result["nothing_runs"] == {"dead.so": "why"}
    assert result["files"]["live.so"]["runs"] == ["sm_121a"]
    assert judge([live], {"live.so": "why", "none.so": "why"})["problems"] == [
        "gpu_exceptions.json: live.so: has usable code or does not exist",
        "gpu_exceptions.json: none.so: has usable code or does not exist",
    ]


def container(*entries: tuple[int, int, bytes]) -> bytes:
    body = b""
    for kind, architecture, payload in entries:
        head = struct.pack("<HHIQ12xI", kind, 0x101, 64, len(payload), architecture)
        body += head.ljust(64, b"\0") + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_containers_are_found_anywhere_but_in_the_skipped_parts() -> None:
    first = container((1, 75, b"ptx"), (2, 120, b"cubin"), (8, 75, b"lto"))
    second = container((2, 90, b""))
    data = b"\0" * 7 + first + b"\0" * 5 + second
    low = 7 + len(first) + 5
    assert list(fatbin.entries(data, [])) == [
        ("ptx", 75, 7, 7 + len(first)),
        ("sass", 120, 7, 7 + len(first)),
        ("sass", 90, low, len(data)),
    ]
    assert [entry.architecture for entry in fatbin.entries(data, [(0, low)])] == [90]


@pytest.mark.parametrize(
    "data",
    [
        fatbin.MAGIC,
        container((2, 120, b"cubin"))[:-1],
        struct.pack("<IHHQ", 0xBA55ED50, 2, 16, 0),
        container((2, 120, b""))[:20] + struct.pack("<I", 0) + container((2, 120, b""))[24:],
    ],
)
def test_what_only_looks_like_a_container_is_passed_over(data: bytes) -> None:
    assert list(fatbin.entries(data, [])) == []
