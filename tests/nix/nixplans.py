"""Plans of the examples and of the virtual machines, as if all nodes ran one system."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from spark_appliance.lockfile import LOCK_NAME, SYSTEM_LOCK_NAME, dump
from spark_appliance.model.cluster import read_cluster
from spark_appliance.model.plan import Plan
from spark_appliance.model.yamlfile import parse
from spark_appliance.profiles import load_profile
from spark_appliance.render import render

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
MACHINES = "tests/vm"
"""Name of the cluster of the virtual machines among the examples."""

NAMES = [*sorted(path.parent.name for path in EXAMPLES.glob("*/cluster.yaml")), MACHINES]

IMAGE = {"reference": "registry.lan/spark-engine", "digest": "sha256:" + "ab" * 32}


def cluster_file(name: str) -> Path:
    """Return the cluster file of an example or of the virtual machines."""
    folder = REPOSITORY / MACHINES / "cluster" if name == MACHINES else EXAMPLES / name
    return folder / "cluster.yaml"


def nixos_lock(name: str) -> Path:
    """Return the committed plan for NixOS nodes, relative to the repository."""
    folder = cluster_file(name).parent
    beside = folder / SYSTEM_LOCK_NAME.format(system="nixos")
    return (beside if beside.exists() else folder / LOCK_NAME).relative_to(REPOSITORY)


def plan_of(file: Path, system: str, change: Callable[[Any], None] | None = None) -> Plan:
    """Render a cluster file as if all its nodes ran ``system``, after ``change`` to its data."""
    data = parse(str(file), file.read_bytes()).data
    if system == "dgx-os":
        data["image"] = IMAGE
    for node in data["nodes"]:
        node["system"] = system
    if change is not None:
        change(data)
    cluster, findings = read_cluster(data)
    assert cluster is not None, findings
    plan = render(cluster, load_profile(cluster.profile, file.parent)).plan
    assert plan is not None
    return plan


def nixos_plan(example: Path, change: Callable[[Any], None] | None = None) -> str:
    """Render an example as if all its nodes ran NixOS."""
    return dump(plan_of(example / "cluster.yaml", "nixos", change))
