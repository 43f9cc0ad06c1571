"""The environment, evaluated by poetry2nix for aarch64-linux.

Needs what tests/nix/README.md says.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from nixtool import Nix

pytestmark = pytest.mark.nix

DRIVER = "/run/opengl-driver/lib"


def evaluate(nix: Nix) -> dict[str, Any]:
    result: dict[str, Any] = nix.evaluate(
        "../sglang_env/evaluate.nix", refuse="warning: Dependency of package"
    )
    return result


@pytest.fixture(scope="module")
def env(nix: Nix) -> dict[str, Any]:
    return evaluate(nix)


@pytest.fixture(scope="module")
def table(env_dir: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((env_dir / "libraries.json").read_text())
    return data


def site(env: dict[str, Any], name: str) -> str:
    return f"{env['packages'][name]['out']}/{env['sitePackages']}"


def test_every_package_is_the_locked_one(env: dict[str, Any], lock: dict[str, Any]) -> None:
    locked = {
        entry["name"]: (entry["version"], entry["files"][0]["file"], entry["files"][0]["hash"])
        for entry in lock["package"]
    }
    found = {
        name: (one["version"], one["file"], one["hash"]) for name, one in env["packages"].items()
    }
    assert found == locked


def test_the_environment_holds_the_lock_and_nothing_else(
    env: dict[str, Any], lock: dict[str, Any]
) -> None:
    members = set(env["members"]) - {"python3", "bin"}  # the interpreter and its wrapper
    assert members == {entry["name"] for entry in lock["package"]}
    assert env["python"].startswith("3.13.")


def test_evaluating_twice_gives_the_same_derivation(nix: Nix, env: dict[str, Any]) -> None:
    assert env["drv"].endswith("-env.drv")
    assert evaluate(nix)["drv"] == env["drv"]


def test_native_wheels_link_only_what_the_table_says(
    env: dict[str, Any], table: dict[str, Any]
) -> None:
    for name, one in env["packages"].items():
        links = table["links"].get(name, [])
        if "manylinux" not in one["file"]:
            assert one["buildInputs"] == [], name
            continue
        assert "auto-patchelf-hook" in one["hooks"], name
        system = {link for link in links if link in {"rdma-core", "zlib"}}
        assert set(one["buildInputs"]) - {"gcc"} == system, name
        searched = [line.split()[1] for line in one["search"].splitlines()]
        assert searched == [site(env, link) for link in links if link in env["packages"]], name


def test_only_declared_libraries_may_be_missing(env: dict[str, Any], table: dict[str, Any]) -> None:
    driver = set(table["providers"]["driver"]["libraries"])
    for name, one in env["packages"].items():
        allowed = set(table["absent"].get(name, {}))
        if "driver" in table["links"].get(name, []):
            allowed |= driver
        assert set(one["ignored"]) == allowed, name


def test_what_needs_the_driver_looks_where_nixos_puts_it(
    env: dict[str, Any], table: dict[str, Any]
) -> None:
    users = {name for name, links in table["links"].items() if "driver" in links}
    users |= {name for name, sources in table["opens"].items() if "driver" in sources}
    found = {name for name, one in env["packages"].items() if DRIVER in one["runpaths"]}
    assert found == users
    assert {"torch", "nvidia-nccl-cu13", "nvidia-cuda-runtime"} <= found


def test_nccl_finds_verbs(env: dict[str, Any]) -> None:
    assert env["packages"]["nvidia-nccl-cu13"]["runpaths"] == [DRIVER, f"{env['rdma']}/lib"]


def test_cudnn_finds_its_parts_and_nvrtc(env: dict[str, Any]) -> None:
    assert env["packages"]["nvidia-cudnn-cu13"]["runpaths"] == [
        DRIVER,
        f"{site(env, 'nvidia-cublas')}/nvidia/cu13/lib",
        f"{site(env, 'nvidia-cuda-nvrtc')}/nvidia/cu13/lib",
        "$ORIGIN",
    ]


def test_nvrtc_finds_its_builtins(env: dict[str, Any]) -> None:
    assert env["packages"]["nvidia-cuda-nvrtc"]["runpaths"] == ["$ORIGIN"]


def test_the_one_release_with_two_spellings_is_asked_for_as_the_index_calls_it(
    env: dict[str, Any],
) -> None:
    other = {
        name for name, one in env["packages"].items() if one["requestedVersion"] != one["version"]
    }
    assert other == {"cuda-toolkit"}
    assert env["packages"]["cuda-toolkit"]["requestedVersion"] == "13.0.3"


def test_strays_are_removed(env: dict[str, Any]) -> None:
    changed = {
        name for name, one in env["packages"].items() if "build_backend" in one["postInstall"]
    }
    assert changed == {"flashinfer-python", "torch-c-dlpack-ext"}


def test_the_exclusion_is_removed_from_the_requirements(env: dict[str, Any]) -> None:
    removed = {name: one["removed"] for name, one in env["packages"].items() if one["removed"]}
    assert removed == {"sglang": ["outlines"]}
    assert "python-relax-deps-hook" in env["packages"]["sglang"]["hooks"]


def test_cuda_home_is_made_of_the_declared_wheels(
    env: dict[str, Any], table: dict[str, Any]
) -> None:
    assert env["cudaHome"]["sites"] == [site(env, name) for name in table["cuda_home"]]
    assert f"cuda-home.sh $out {DRIVER} $sites" in env["cudaHome"]["command"]


def test_the_runtime_environment(env: dict[str, Any]) -> None:
    variables = dict(env["runtimeEnv"])
    compiler = {variables.pop("CC"), variables.pop("CXX")}
    assert {path.rpartition("/")[2] for path in compiler} == {"gcc", "g++"}
    assert all(path.startswith("/nix/store/") for path in compiler)
    assert variables == {
        "CUDA_HOME": env["cudaHome"]["out"],
        "CUDA_PATH": env["cudaHome"]["out"],
        "FLASHINFER_CUDA_ARCH_LIST": "12.1a",
        "HOME": "/var/cache/spark-engine",
        "LD_LIBRARY_PATH": DRIVER,
        "MAX_JOBS": "2",
        "PYTHONNOUSERSITE": "1",
        "SGLANG_CACHE_DIR": "/var/cache/spark-engine/sglang",
        "TORCH_CUDA_ARCH_LIST": "12.1a",
        "TRITON_LIBCUDA_PATH": DRIVER,
        "XDG_CACHE_HOME": "/var/cache/spark-engine/xdg",
    }
    changed = env["changedEnv"]
    assert changed["SGLANG_CACHE_DIR"] == "/elsewhere/sglang"
    assert changed["MAX_JOBS"] == "1"


def test_the_tools_for_run_time_compilation_are_named(env: dict[str, Any]) -> None:
    names = " ".join(env["runtimePath"])
    for tool in ("cuda-home", "gcc", "ninja", "which", "coreutils"):
        assert tool in names


def test_the_passthru_lock_is_the_committed_one(env: dict[str, Any], env_dir: Path) -> None:
    assert env["lock"] == hashlib.sha256((env_dir / "poetry.lock").read_bytes()).hexdigest()
    assert env["sbom"].endswith(".drv")
