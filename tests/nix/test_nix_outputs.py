"""Every output of the flake evaluates, for every system it is offered for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from nixplans import MACHINES, NAMES, nixos_lock
from nixtool import REPOSITORY, Nix

pytestmark = pytest.mark.nix

EXAMPLES = [name for name in NAMES if name != MACHINES]
LINUX = {"oci", "oci-smoke", "oci-tools", "spark-engram", "spark-tp-pad"}
EVERYWHERE = {"default", "spark-appliance", "options-doc"}
SPARK = {"image", "sglang-router", "sglang-env", "sglang-env-sbom", "spark-engine"}


@pytest.fixture(scope="module")
def outputs(nix: Nix) -> Any:
    return nix.evaluate("outputs.nix")


def test_the_flake_offers_what_it_says(outputs: Any) -> None:
    assert outputs["names"] == [
        "apps",
        "checks",
        "devShells",
        "formatter",
        "lib",
        "nixosConfigurations",
        "nixosModules",
        "overlays",
        "packages",
        "templates",
    ]
    assert outputs["lib"] == ["mkAppliance", "mkFleet", "nodePlan", "planVersion", "readPlan"]
    assert set(outputs["nixosModules"]) == {
        "default",
        "hardware",
        "fabric",
        "weights",
        "engram",
        "guard",
        "engine",
        "image",
        "fleet",
        "router",
    }


@pytest.mark.parametrize(
    ("system", "names"),
    [
        ("aarch64-linux", EVERYWHERE | LINUX | SPARK),
        ("x86_64-linux", EVERYWHERE | LINUX),
        ("aarch64-darwin", EVERYWHERE),
    ],
)
def test_packages_are_derivations(outputs: Any, system: str, names: set[str]) -> None:
    packages = outputs["packages"][system]
    assert set(packages) == names
    assert all(path.endswith(".drv") for path in packages.values())


@pytest.mark.parametrize("system", ["aarch64-linux", "x86_64-linux"])
def test_vm_tests_are_derivations_on_both_systems(outputs: Any, system: str) -> None:
    checks = outputs["checks"][system]
    for name in ("fabric", "weights", "engram", "engine", "rollout"):
        assert checks[f"vm-{name}"].endswith(f"vm-test-run-{name}.drv")


def test_checks_cover_examples_and_hosts(outputs: Any) -> None:
    checks = outputs["checks"]["aarch64-linux"]
    assert {"format", "lint", "options-doc", "render-three-spark-triangle"} <= set(checks)
    nodes = {f"host-{name}" for name in outputs["hosts"] if name != "appliance"}
    assert set(outputs["hostChecks"]["aarch64-linux"]) == nodes
    assert outputs["hostChecks"]["x86_64-linux"] == []


def test_every_nixos_node_of_the_examples_is_a_configuration(outputs: Any) -> None:
    """Their derivations are in ``test_nix_hosts.py``, one example at a time."""
    plans = [json.loads((REPOSITORY / nixos_lock(name)).read_bytes()) for name in EXAMPLES]
    nodes = {f"{plan['name']}-{node['name']}" for plan in plans for node in plan["nodes"]}
    assert set(outputs["hosts"]) == {"appliance", *nodes}
    assert outputs["appliance"].endswith(".drv")


def test_apps_run_programs_of_the_packages(outputs: Any) -> None:
    for system, apps in outputs["apps"].items():
        assert apps["default"].endswith("/bin/spark-appliance"), system
