"""Cluster documents for tests: a valid one of every kind, and ways to break exactly one thing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from spark_appliance.model.cluster import Cluster, read_cluster
from spark_appliance.model.findings import Finding
from spark_appliance.profiles import load_profile
from spark_appliance.render import Rendering, render

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.parent.name for path in (ROOT / "examples").glob("*/cluster.yaml"))

PROFILES = {1: "single-dev", 2: "pair", 3: "stable-tp3", 4: "stable-tp4"}


def document(kind: str = "triangle", count: int = 3, profile: str | None = None) -> dict[str, Any]:
    """Return plain data of a cluster without any finding but, for a pair, that it does not fit."""
    data: dict[str, Any] = {
        "version": 1,
        "name": "test",
        "profile": profile or PROFILES[count],
        "topology": {"kind": kind},
        "api": {"key_file": "/etc/spark/api-key"},
        "image": {"digest": "sha256:" + "0" * 64},
        "nodes": [
            {"name": f"spark{number}", "address": f"192.168.1.{10 + number}"}
            for number in range(1, count + 1)
        ],
    }
    if count > 1:
        for node in data["nodes"]:
            node["engram"] = {"directory": "/var/lib/spark/engram"}
    if kind == "ring":
        data["topology"] |= {"nccl_library": "/opt/libnccl.so.2", "nccl_library_sha256": "a" * 64}
    return data


def cluster_of(data: dict[str, Any]) -> Cluster:
    cluster, findings = read_cluster(data)
    assert cluster is not None, findings
    return cluster


def rendering_of(data: dict[str, Any]) -> Rendering:
    cluster = cluster_of(data)
    return render(cluster, load_profile(cluster.profile, ROOT))


def findings_of(data: dict[str, Any]) -> list[Finding]:
    cluster, findings = read_cluster(data)
    if cluster is None:
        return findings
    return list(render(cluster, load_profile(cluster.profile, ROOT)).findings)


def rules_of(data: dict[str, Any], *severities: str) -> list[str]:
    """Return the sorted rules found; errors alone unless other severities are named."""
    wanted = severities or ("error",)
    return sorted(f.rule for f in findings_of(data) if f.severity in wanted)


def changed(data: dict[str, Any], *path: str | int, to: Any) -> dict[str, Any]:
    """Return a copy with one value replaced (or set)."""
    result = copy.deepcopy(data)
    place: Any = result
    for key in path[:-1]:
        place = place.setdefault(key, {}) if isinstance(place, dict) else place[key]
    place[path[-1]] = to
    return result


def addressed(kind: str = "triangle", count: int = 3) -> dict[str, Any]:
    """Return a document whose rails have explicit addresses, the ones that would be generated."""
    data = document(kind, count)
    plan = rendering_of(data).plan
    assert plan is not None
    for node, planned in zip(data["nodes"], plan.nodes, strict=True):
        node["addresses"] = {rail.netdev: rail.address for rail in planned.rails}
    return data
