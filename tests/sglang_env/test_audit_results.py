"""The committed results belong to the committed lock and report no problem."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

PARTS = ("elf", "files", "gpu", "index", "licences")


def result(env_dir: Path, part: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((env_dir / "audit" / "results" / f"{part}.json").read_text())
    return data


@pytest.mark.parametrize("part", PARTS)
def test_there_are_no_problems(env_dir: Path, part: str) -> None:
    assert result(env_dir, part).get("problems", []) == []


@pytest.mark.parametrize("part", PARTS)
def test_results_are_sorted_text(env_dir: Path, part: str) -> None:
    path = env_dir / "audit" / "results" / f"{part}.json"
    text = json.dumps(json.loads(path.read_text()), indent=1, sort_keys=True, ensure_ascii=False)
    assert path.read_text() == text + "\n"


def test_the_index_was_asked_for_exactly_the_locked_files(
    env_dir: Path, lock: dict[str, Any]
) -> None:
    files = {entry["files"][0]["file"] for entry in lock["package"]}
    assert set(result(env_dir, "index")["files"]) == files


def test_licences_are_listed_for_exactly_the_locked_packages(
    env_dir: Path, lock: dict[str, Any]
) -> None:
    found = result(env_dir, "licences")
    assert set(found["packages"]) == {entry["name"] for entry in lock["package"]}
    assert found["unstated"] == sorted(name for name, one in found["packages"].items() if not one)


def test_the_bill_of_materials_is_the_one_of_the_lock(
    env_dir: Path, lock: dict[str, Any], pyproject: dict[str, Any]
) -> None:
    sbom = pytest.importorskip(
        "audit.sbom", reason="cyclonedx-python-lib is not installed: it writes the document"
    )
    from audit.metadata import Licence

    stated = result(env_dir, "licences")["packages"]
    text = sbom.build(
        lock,
        pyproject["tool"]["poetry"],
        {name: Licence.from_data(one) for name, one in stated.items()},
    )
    assert (env_dir / "audit" / "results" / "sbom.cdx.json").read_text() == text


def test_the_table_names_only_locked_packages(env_dir: Path, lock: dict[str, Any]) -> None:
    table = json.loads((env_dir / "libraries.json").read_text())
    known = {entry["name"] for entry in lock["package"]}
    providers = set(table["providers"])
    for field in ("directories", "links", "opens", "absent", "foreign", "stray"):
        assert set(table[field]) <= known, field
        assert list(table[field]) == sorted(table[field]), field
    assert set(table["cuda_home"]) <= known
    for sources in table["links"].values():
        assert set(sources) <= known | providers
        assert sources == sorted(sources)
    for sources in table["opens"].values():
        assert set(sources) <= set(table["directories"]) | providers | {"own"}


def test_the_torch_stack_has_code_for_a_gb10(env_dir: Path) -> None:
    files = result(env_dir, "gpu")["files"]
    for path in (
        "torch/lib/libtorch_cuda.so",
        "sgl_kernel/sm100/common_ops.abi3.so",
        "nvidia/cu13/lib/libcublasLt.so.13",
        "nvidia/nccl/lib/libnccl.so.2",
    ):
        assert files[path]["runs"], path
