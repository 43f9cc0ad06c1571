"""The committed lock: what poetry2nix and the container may rely on."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

NEEDED = {
    "sglang": "0.5.23",
    "sglang-kernel": "0.4.10",
    "flashinfer-python": "0.7.2",
    "torch": "2.14.1",
    "triton": "3.8.0",
    "nvidia-nccl-cu13": "2.30.7",
    "nvidia-nvshmem-cu13": "3.4.5",
    "transformers": "5.19.0",
    "xgrammar": "0.2.7",
}

CUDA_13_0 = (
    "cuda-toolkit",
    "nvidia-cuda-cccl",
    "nvidia-cuda-crt",
    "nvidia-cuda-cupti",
    "nvidia-cuda-nvcc",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
    "nvidia-nvjitlink",
    "nvidia-nvtx",
    "nvidia-nvvm",
)

ADDRESS = re.compile(r"[a-z]+://(?!cyclonedx\.org/schema/)")


def by_name(lock: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in lock["package"]}


def test_each_package_is_locked_once_under_its_normal_name(lock: dict[str, Any]) -> None:
    names = [entry["name"] for entry in lock["package"]]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert [name for name in names if canonicalize_name(name) != name] == []
    assert names == sorted(names)
    assert len(names) == 202


def test_each_package_has_one_wheel_with_a_sha256(lock: dict[str, Any]) -> None:
    for entry in lock["package"]:
        [file] = entry["files"]
        assert set(file) == {"file", "hash"}
        assert file["file"].endswith(".whl"), entry["name"]
        assert re.fullmatch(r"sha256:[0-9a-f]{64}", file["hash"]), entry["name"]
        name, version, _, _ = parse_wheel_filename(file["file"])
        assert (name, version) == (entry["name"], Version(entry["version"]))


def accepted(interpreter: str, abi: str, platform: str) -> bool:
    """The target, written down a second time: CPython 3.13, aarch64, glibc at most 2.41."""
    manylinux = re.fullmatch(r"manylinux_2_(\d+)_aarch64", platform)
    fits = platform in {"any", "manylinux2014_aarch64", "linux_aarch64"} or (
        manylinux is not None and 17 <= int(manylinux[1]) <= 41
    )
    stable = re.fullmatch(r"cp3(\d+)", interpreter)
    older = {"py3", "cp313", *(f"py3{minor}" for minor in range(14))}
    pure = abi == "none" and interpreter in older
    return fits and (
        pure
        or (interpreter, abi) == ("cp313", "cp313")
        or (abi == "abi3" and stable is not None and int(stable[1]) <= 13)
    )


def test_each_wheel_fits_the_target_and_poetry2nix_can_read_its_name(lock: dict[str, Any]) -> None:
    for entry in lock["package"]:
        file = entry["files"][0]["file"]
        _, _, _, tags = parse_wheel_filename(file)
        assert any(accepted(t.interpreter, t.abi, t.platform) for t in tags), file
        assert "." not in file.removesuffix(".whl").split("-")[-2], f"{file}: compressed ABI tag"
        assert not file.endswith("-linux_aarch64.whl"), f"{file}: poetry2nix rejects plain linux_*"


@pytest.mark.parametrize(("name", "version"), NEEDED.items())
def test_needed_package_has_the_fixed_version(
    lock: dict[str, Any], name: str, version: str
) -> None:
    assert by_name(lock)[name]["version"] == version


@pytest.mark.parametrize("name", CUDA_13_0)
def test_compiler_and_runtime_are_all_cuda_13_0(lock: dict[str, Any], name: str) -> None:
    assert by_name(lock)[name]["version"].startswith("13.0.")


def test_no_package_comes_from_a_named_source(lock: dict[str, Any]) -> None:
    assert [entry["name"] for entry in lock["package"] if "source" in entry] == []


def test_cryptography_stays_readable(lock: dict[str, Any]) -> None:
    assert Version(by_name(lock)["cryptography"]["version"]) < Version("50")


def test_exclusions_are_documented_and_really_out(
    lock: dict[str, Any], pyproject: dict[str, Any]
) -> None:
    excluded = pyproject["tool"]["relock"]["exclude"]
    assert set(excluded) == {"outlines"}
    names = by_name(lock)
    for name, why in excluded.items():
        assert why["reason"]
        assert name not in names
        assert name not in names["sglang"]["dependencies"]
    assert "outlines-core" not in names


def meets(version: str, wanted: str) -> bool:
    """Poetry's way to write a constraint: PEP 440, a bare version, `*`, and `||` for or."""
    for part in wanted.split("||"):
        text = part.strip()
        text = "" if text == "*" else f"=={text}" if text[0].isdigit() else text
        if SpecifierSet(text).contains(version, prereleases=True):
            return True
    return False


def test_every_locked_dependency_is_met_by_the_locked_version(lock: dict[str, Any]) -> None:
    names = by_name(lock)
    wrong = []
    for entry in lock["package"]:
        for dependency, spec in entry.get("dependencies", {}).items():
            for one in spec if isinstance(spec, list) else [spec]:
                wanted = one if isinstance(one, str) else one["version"]
                met = names[canonicalize_name(dependency)]["version"]
                if not meets(met, wanted):
                    wrong.append((entry["name"], dependency, wanted, met))
    assert wrong == []


def test_the_python_range_is_one_minor_version(lock: dict[str, Any]) -> None:
    assert lock["metadata"]["python-versions"] == "~3.13"
    assert lock["metadata"]["lock-version"] == "2.1"


def test_committed_files_hold_no_address(env_dir: Path) -> None:
    named = [
        (path.name, line)
        for path in sorted(env_dir.rglob("*"))
        if path.is_file()
        and path.suffix in {".lock", ".toml", ".json", ".nix", ".py", ".sh", ".md"}
        for line in path.read_text(encoding="utf-8").splitlines()
        if ADDRESS.search(line)
    ]
    assert named == []
