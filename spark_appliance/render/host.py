"""Settings of the host that follow from the plan: sysctl, modules, firewall, guard."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

from spark_appliance.memory import RESERVE_GIB, START_RESERVE_GIB
from spark_appliance.model.cluster import Cluster, is_ipv4
from spark_appliance.model.facts import GIB
from spark_appliance.model.plan import FirewallPlan, GuardPlan, WeightsPlan
from spark_appliance.topology.addressing import Rail


def sysctl(cluster: Cluster, rails: tuple[Rail, ...]) -> dict[str, str]:
    """Return kernel settings.

    Both twins of a cage hang on one wire, so each must answer ARP only for its own address
    (graham33/nixos-dgx-spark nccl-two-sparks). With one subnet a rail, strict reverse-path
    filtering is harmless; a ring keeps it loose for routed diagonals.
    """
    rp_filter = "2" if cluster.topology.kind == "ring" else "1"
    values = {
        # recovers 0.87 GiB of unified memory (christopherowen/spark-ds41f)
        "vm.watermark_boost_factor": "0",
    }
    for rail in rails:
        base = f"net.ipv4.conf.{rail.netdev}"
        values[f"{base}.arp_ignore"] = "1"
        values[f"{base}.arp_announce"] = "2"
        values[f"{base}.rp_filter"] = rp_filter
    return values


def kernel_modules(rails: tuple[Rail, ...], weights: WeightsPlan, *, rdma: bool) -> list[str]:
    """Return modules to load at boot."""
    modules = ["ib_uverbs", "mlx5_core", "mlx5_ib", "rdma_ucm"] if rails else []
    if rdma and weights.mount is not None:
        modules.append("rpcrdma")
    if rdma and weights.export is not None:
        modules.append("svcrdma")
    return sorted(modules)


def firewall(cluster: Cluster, rank: int, rails: tuple[Rail, ...]) -> FirewallPlan:
    """Return what a node has to accept."""
    local_only = cluster.api.bind.startswith("127.")
    return FirewallPlan(
        trusted_interfaces=[rail.netdev for rail in rails],
        api_port=cluster.api.port if rank == 0 and not local_only else None,
        peer_addresses=[node.address for other, node in enumerate(cluster.nodes) if other != rank],
    )


def guard() -> GuardPlan:
    """Return the memory guard's thresholds."""
    return GuardPlan(
        start_bytes=round(START_RESERVE_GIB * GIB),
        steady_bytes=round(RESERVE_GIB * GIB),
        interval=1,
    )


def lan_address(cluster: Cluster, rank: int) -> str | None:
    """Return a node's management address with its prefix length, None when one is not known."""
    address, network = cluster.nodes[rank].address, cluster.management_network
    if network is None or not is_ipv4(address):
        return None
    lan = IPv4Network(network)
    return f"{address}/{lan.prefixlen}" if IPv4Address(address) in lan else None
