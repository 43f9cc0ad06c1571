"""The environment, evaluated by poetry2nix for aarch64-linux.

Needs Nix >= 2.18, a nixpkgs tree and a poetry2nix tree: `SPARK_NIXPKGS` and `SPARK_POETRY2NIX`
name the folders, `SPARK_NIX` a command to put before Nix's programs (for a Nix in a chroot).
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.nix

HERE = Path(__file__).resolve().parent
DRIVER = "/run/opengl-driver/lib"


def evaluate() -> dict[str, Any]:
    trees = {}
    for argument, variable in (("nixpkgs", "SPARK_NIXPKGS"), ("poetry2nix", "SPARK_POETRY2NIX")):
        if not os.environ.get(variable):
            pytest.skip(f"${variable} is not set: no {argument} tree to evaluate with")
        trees[argument] = os.environ[variable]
    prefix = shlex.split(os.environ.get("SPARK_NIX", ""))
    if not prefix and shutil.which("nix-instantiate") is None:
        pytest.skip("Nix is not installed and $SPARK_NIX is not set")
    command = [
        *prefix,
        "nix-instantiate",
        "--eval",
        "--strict",
        "--json",
        str(HERE / "evaluate.nix"),
    ]
    for argument, tree in trees.items():
        command += ["--arg", argument, f"({tree})"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "warning: Dependency of package" not in done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def nix() -> dict[str, Any]:
    return evaluate()


@pytest.fixture(scope="module")
def table(env_dir: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((env_dir / "libraries.json").read_text())
    return data


def site(nix: dict[str, Any], name: str) -> str:
    return f"{nix['packages'][name]['out']}/{nix['sitePackages']}"


def test_every_package_is_the_locked_one(nix: dict[str, Any], lock: dict[str, Any]) -> None:
    locked = {
        entry["name"]: (entry["version"], entry["files"][0]["file"], entry["files"][0]["hash"])
        for entry in lock["package"]
    }
    found = {
        name: (one["version"], one["file"], one["hash"]) for name, one in nix["packages"].items()
    }
    assert found == locked


def test_the_environment_holds_the_lock_and_nothing_else(
    nix: dict[str, Any], lock: dict[str, Any]
) -> None:
    members = set(nix["members"]) - {"python3", "bin"}  # the interpreter and its wrapper
    assert members == {entry["name"] for entry in lock["package"]}
    assert nix["python"].startswith("3.13.")


def test_evaluating_twice_gives_the_same_derivation(nix: dict[str, Any]) -> None:
    assert nix["drv"].endswith("-env.drv")
    assert evaluate()["drv"] == nix["drv"]


def test_native_wheels_link_only_what_the_table_says(
    nix: dict[str, Any], table: dict[str, Any]
) -> None:
    for name, one in nix["packages"].items():
        links = table["links"].get(name, [])
        if "manylinux" not in one["file"]:
            assert one["buildInputs"] == [], name
            continue
        assert "auto-patchelf-hook" in one["hooks"], name
        system = {link for link in links if link in {"rdma-core", "zlib"}}
        assert set(one["buildInputs"]) - {"gcc"} == system, name
        searched = [line.split()[1] for line in one["search"].splitlines()]
        assert searched == [site(nix, link) for link in links if link in nix["packages"]], name


def test_only_declared_libraries_may_be_missing(nix: dict[str, Any], table: dict[str, Any]) -> None:
    driver = set(table["providers"]["driver"]["libraries"])
    for name, one in nix["packages"].items():
        allowed = set(table["absent"].get(name, {}))
        if "driver" in table["links"].get(name, []):
            allowed |= driver
        assert set(one["ignored"]) == allowed, name


def test_what_needs_the_driver_looks_where_nixos_puts_it(
    nix: dict[str, Any], table: dict[str, Any]
) -> None:
    users = {name for name, links in table["links"].items() if "driver" in links}
    users |= {name for name, sources in table["opens"].items() if "driver" in sources}
    found = {name for name, one in nix["packages"].items() if DRIVER in one["runpaths"]}
    assert found == users
    assert {"torch", "nvidia-nccl-cu13", "nvidia-cuda-runtime"} <= found


def test_nccl_finds_verbs(nix: dict[str, Any]) -> None:
    assert nix["packages"]["nvidia-nccl-cu13"]["runpaths"] == [DRIVER, f"{nix['rdma']}/lib"]


def test_cudnn_finds_its_parts_and_nvrtc(nix: dict[str, Any]) -> None:
    assert nix["packages"]["nvidia-cudnn-cu13"]["runpaths"] == [
        DRIVER,
        f"{site(nix, 'nvidia-cublas')}/nvidia/cu13/lib",
        f"{site(nix, 'nvidia-cuda-nvrtc')}/nvidia/cu13/lib",
        "$ORIGIN",
    ]


def test_nvrtc_finds_its_builtins(nix: dict[str, Any]) -> None:
    assert nix["packages"]["nvidia-cuda-nvrtc"]["runpaths"] == ["$ORIGIN"]


def test_the_one_release_with_two_spellings_is_asked_for_as_the_index_calls_it(
    nix: dict[str, Any],
) -> None:
    other = {
        name for name, one in nix["packages"].items() if one["requestedVersion"] != one["version"]
    }
    assert other == {"cuda-toolkit"}
    assert nix["packages"]["cuda-toolkit"]["requestedVersion"] == "13.0.3"


def test_strays_are_removed(nix: dict[str, Any]) -> None:
    changed = {
        name for name, one in nix["packages"].items() if "build_backend" in one["postInstall"]
    }
    assert changed == {"flashinfer-python", "torch-c-dlpack-ext"}


def test_the_exclusion_is_removed_from_the_requirements(nix: dict[str, Any]) -> None:
    removed = {name: one["removed"] for name, one in nix["packages"].items() if one["removed"]}
    assert removed == {"sglang": ["outlines"]}
    assert "python-relax-deps-hook" in nix["packages"]["sglang"]["hooks"]


def test_cuda_home_is_made_of_the_declared_wheels(
    nix: dict[str, Any], table: dict[str, Any]
) -> None:
    assert nix["cudaHome"]["sites"] == [site(nix, name) for name in table["cuda_home"]]
    assert f"cuda-home.sh $out {DRIVER} $sites" in nix["cudaHome"]["command"]


def test_the_runtime_environment(nix: dict[str, Any]) -> None:
    variables = dict(nix["runtimeEnv"])
    compiler = {variables.pop("CC"), variables.pop("CXX")}
    assert {path.rpartition("/")[2] for path in compiler} == {"gcc", "g++"}
    assert all(path.startswith("/nix/store/") for path in compiler)
    assert variables == {
        "CUDA_HOME": nix["cudaHome"]["out"],
        "CUDA_PATH": nix["cudaHome"]["out"],
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
    changed = nix["changedEnv"]
    assert changed["SGLANG_CACHE_DIR"] == "/elsewhere/sglang"
    assert changed["MAX_JOBS"] == "1"


def test_the_tools_for_run_time_compilation_are_named(nix: dict[str, Any]) -> None:
    names = " ".join(nix["runtimePath"])
    for tool in ("cuda-home", "gcc", "ninja", "which", "coreutils"):
        assert tool in names


def test_the_passthru_lock_is_the_committed_one(nix: dict[str, Any], env_dir: Path) -> None:
    assert nix["lock"] == hashlib.sha256((env_dir / "poetry.lock").read_bytes()).hexdigest()
    assert nix["sbom"].endswith(".drv")
