"""What is in the closure of the example hosts, and what is not."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

import pytest
from closure import Output, System
from nixtool import Nix

pytestmark = pytest.mark.nix

ENGINE = "spark-engine-"
ABSENT = (
    # containers
    *("docker", "podman", "containerd", "crun", "runc", "nvidia-container-toolkit"),
    # display servers and desktops
    *("xorg-server", "xwayland", "gdm", "sddm", "lightdm", "gnome-shell", "plasma-workspace"),
    *("weston", "sway", "mutter", "nvidia-settings", "plymouth"),
    # CUDA is the engine's, from its wheels
    *("cudatoolkit", "cuda_nvcc", "cudnn"),
)
"""Programs that no derivation of a host has, not even to build something."""


@pytest.fixture(scope="session")
def systems(nix: Nix, fleet: tuple[str, Any, Any]) -> dict[str, System]:
    _, _, hosts = fleet
    return {name: System(nix, host["toplevel"]) for name, host in hosts.items()}


def version(packages: set[Output], name: str) -> str:
    versions = {
        found[1] for p in packages if (found := re.fullmatch(rf"{re.escape(name)}-(\d.*)", p.name))
    }
    assert len(versions) == 1, (name, versions)
    return versions.pop()


def compilers(packages: set[Output]) -> set[str]:
    """Names of compilers; a library output of a compiler is none."""
    return {
        package.name
        for package in packages
        if re.match(r"(gcc|clang|llvm|rustc|go|ghc)(-wrapper)?-\d", package.name)
        and package.output == "out"
    }


def test_the_engine_and_the_programs_of_the_node_are_there(systems: dict[str, System]) -> None:
    for name, system in systems.items():
        packages = system.packages()
        assert version(packages, "spark-engine") == "0.5.23", name
        assert version(packages, "python3.13-sglang") == "0.5.23"
        assert version(packages, "python3.13-flashinfer-python") == "0.7.2"
        assert version(packages, "python3.13-torch") == "2.14.1"
        assert version(packages, "python3.13-nvidia-cuda-runtime").startswith("13.0.")
        assert {"python3.13-spark-engram", "python3.13-spark-tp-pad"} <= {
            package.name.rpartition("-")[0] for package in packages
        }
        assert version(packages, "spark-appliance")
        assert version(packages, "rdma-core")  # on NCCL's way to verbs


def test_the_driver_is_r580_with_open_modules(systems: dict[str, System]) -> None:
    for name, system in systems.items():
        packages = system.packages()
        assert version(packages, "nvidia-x11").startswith("580."), name
        modules = {p.name for p in packages if p.name.startswith("nvidia-open-")}
        assert len(modules) == 1
        assert modules.pop().startswith("nvidia-open-580.")


def test_no_containers_no_display_server_no_second_cuda(systems: dict[str, System]) -> None:
    for name, system in systems.items():
        found = {
            item
            for item in system.names
            for absent in ABSENT
            if re.match(rf"{re.escape(absent)}(-\d|$)", item)
            and not re.search(r"\.(tar|zip|patch)", item)  # sources are no programs
        }
        assert found == set(), name


def test_the_only_compiler_is_the_one_that_the_engine_compiles_kernels_with(
    systems: dict[str, System],
) -> None:
    for name, system in systems.items():
        assert {item.partition("-")[0] for item in compilers(system.packages())} == {"gcc"}, name
        assert compilers(system.packages(without=ENGINE)) == set(), name


def test_no_key_of_a_third_party_cache_is_trusted(systems: dict[str, System]) -> None:
    for name, system in systems.items():
        settings = dict(
            line.split(" = ", 1)
            for line in system.text("nix.conf").splitlines()
            if " = " in line and not line.startswith("#")
        )
        # one of each, that of NixOS itself
        (key,) = settings["trusted-public-keys"].split()
        (cache,) = settings["substituters"].split()
        assert key.startswith(f"{urlsplit(cache).hostname}-1:"), name
        assert str(urlsplit(cache).hostname).endswith(".nixos.org"), name
        extra = [key for key in settings if key.startswith("extra-") and settings[key].strip()]
        assert not {"extra-substituters", "extra-trusted-public-keys"} & set(extra), name


def test_the_router_is_on_its_head_alone(
    systems: dict[str, System], fleet: tuple[str, Any, Any]
) -> None:
    _, plan, _ = fleet
    for index, (name, system) in enumerate(systems.items()):
        wanted = index == 0 and plan["router"] is not None
        has = any(p.name.startswith("sglang-router-") for p in system.packages())
        assert has is wanted, name
