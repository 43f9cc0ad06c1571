"""Build the fabric of a cluster: counts, cables, addresses, in that order."""

from __future__ import annotations

from spark_appliance.model.cluster import Cluster
from spark_appliance.model.findings import Finding, errors
from spark_appliance.topology.addressing import Fabric, assign_addresses
from spark_appliance.topology.cabling import NODE_COUNTS, read_cables

JUMBO_MTU = 4200
"""From this MTU up RDMA uses 4096-byte packets (NVIDIA dgx-spark-playbooks PR#103)."""


def build_fabric(cluster: Cluster) -> tuple[Fabric | None, list[Finding]]:
    """Return the fabric, or None and the findings that prevent one."""
    topology = cluster.topology
    counts = NODE_COUNTS[topology.kind]
    if len(cluster.nodes) not in counts:
        allowed = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        return None, [
            Finding(
                "topology.node-count",
                ("topology", "kind"),
                f"a {topology.kind} takes {allowed} nodes, the file has {len(cluster.nodes)}",
                "change topology.kind or the list of nodes",
            )
        ]
    cables, findings = read_cables(cluster)
    if findings:
        return None, findings
    fabric, findings = assign_addresses(cluster, cables)
    if errors(findings):
        return None, findings
    return fabric, [*findings, *_check_mtu(cluster), *_check_nccl_library(cluster)]


def _check_mtu(cluster: Cluster) -> list[Finding]:
    if cluster.topology.kind == "single" or cluster.topology.mtu >= JUMBO_MTU:
        return []
    return [
        Finding(
            "topology.mtu-small",
            ("topology", "mtu"),
            f"with MTU {cluster.topology.mtu} RDMA falls to 1024-byte packets; prefill was seen "
            "about 40 % slower",
            f"use 9000 (or at least {JUMBO_MTU})",
            "warning",
        )
    ]


def _check_nccl_library(cluster: Cluster) -> list[Finding]:
    topology = cluster.topology
    path = ("topology", "nccl_library")
    if topology.kind == "ring" and topology.nccl_library is None:
        return [
            Finding(
                "topology.ring-nccl",
                path,
                "stock NCCL cannot start on a ring of four: it sets up trees between ranks that "
                "no cable joins",
                "give nccl_library: a libnccl.so.2 with switchless-ring support, or use a switch",
            )
        ]
    if topology.kind == "ring" and topology.nccl_library_sha256 is None:
        return [
            Finding(
                "topology.ring-nccl-unpinned",
                path,
                "the NCCL library is not pinned; doctor can only compare the nodes with each other",
                "add nccl_library_sha256 (sha256sum of the file)",
                "warning",
            )
        ]
    if topology.kind != "ring" and topology.nccl_library is not None:
        return [
            Finding(
                "topology.nccl-library-unused",
                path,
                "only a ring replaces NCCL's library",
                "remove nccl_library",
            )
        ]
    return []
