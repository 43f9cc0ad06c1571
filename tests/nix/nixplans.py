"""Plans of the examples as if their nodes ran NixOS."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from spark_appliance.lockfile import dump
from spark_appliance.model.cluster import read_cluster
from spark_appliance.model.yamlfile import parse
from spark_appliance.profiles import load_profile
from spark_appliance.render import render

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def nixos_plan(example: Path, change: Callable[[Any], None] | None = None) -> str:
    """Render an example as if all its nodes ran NixOS, after ``change`` to the file's data."""
    file = example / "cluster.yaml"
    data = parse(str(file), file.read_bytes()).data
    for node in data["nodes"]:
        node["system"] = "nixos"
    if change is not None:
        change(data)
    cluster, findings = read_cluster(data)
    assert cluster is not None, findings
    plan = render(cluster, load_profile(cluster.profile, example)).plan
    assert plan is not None
    return dump(plan)
