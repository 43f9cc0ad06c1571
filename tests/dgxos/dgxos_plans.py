"""Plans for the tests of the DGX OS adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spark_appliance.model.cluster import read_cluster
from spark_appliance.model.plan import NodePlan, Plan
from spark_appliance.model.yamlfile import parse
from spark_appliance.profiles import load_profile
from spark_appliance.render import render

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*/cluster.yaml"))
DIGEST = "sha256:" + "ab" * 32


def dgx_plan(path: Path, **changes: Any) -> Plan:
    """Render an example with every node on DGX OS and an image."""
    data = parse(str(path), path.read_bytes()).data
    assert isinstance(data, dict)
    data["image"] = {"reference": "registry.lan/spark-engine", "digest": DIGEST}
    for node in data["nodes"]:
        node["system"] = "dgx-os"
    data |= changes
    cluster, findings = read_cluster(data)
    assert cluster is not None, findings
    plan = render(cluster, load_profile(cluster.profile, path.parent)).plan
    assert plan is not None
    return plan


def example(name: str) -> Path:
    return ROOT / "examples" / name / "cluster.yaml"


def node_of(plan: Plan, name: str) -> NodePlan:
    node = plan.node(name)
    assert node is not None
    return node
