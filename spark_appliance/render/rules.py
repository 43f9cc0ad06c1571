"""Rules that take two values of the cluster file to judge and belong to no other module."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from spark_appliance.model.cluster import Cluster, is_ipv4, node_path
from spark_appliance.model.facts import ModelFacts
from spark_appliance.model.findings import Finding
from spark_appliance.model.profile import Profile
from spark_appliance.topology.hardware import CAGES

NFS_PORT = 2049
NFS_RDMA_PORT = 20049


def check_cluster(cluster: Cluster, profile: Profile, facts: ModelFacts) -> list[Finding]:
    """Judge nodes, ports, storage and the fit of the profile."""
    return [
        *_profile_fits(cluster, profile),
        *_nodes_differ(cluster),
        *_addresses_reach(cluster),
        *_ports_differ(cluster),
        *_engram_places(cluster, facts),
        *_weights(cluster),
        *_image(cluster),
        *_api(cluster),
    ]


def _profile_fits(cluster: Cluster, profile: Profile) -> Iterator[Finding]:
    count = len(cluster.nodes)
    if count not in profile.nodes:
        allowed = " or ".join(map(str, profile.nodes))
        yield Finding(
            "profile.node-count",
            ("profile",),
            f"profile {profile.name} is for {allowed} nodes, the file has {count}",
            "choose another profile, or write your own and give its path",
        )


def _nodes_differ(cluster: Cluster) -> Iterator[Finding]:
    for key in ("name", "address", "ssh", "serial", "mac"):
        seen: dict[str, int] = {}
        for rank, node in enumerate(cluster.nodes):
            value = getattr(node, key)
            if value is None:
                continue
            value = value.casefold() if key in ("address", "serial") else value
            if value in seen:
                yield Finding(
                    f"nodes.{key}-used-twice",
                    node_path(rank, key),
                    f"{key} {value} is also that of node {seen[value] + 1}",
                    f"give every node its own {key}",
                )
            seen.setdefault(value, rank)


def _addresses_reach(cluster: Cluster) -> Iterator[Finding]:
    if len(cluster.nodes) == 1:
        return
    rails = {twin.netdev for cage in CAGES.values() for twin in cage.twins}
    # all nodes on loopback: a trial of the programs on one machine
    one_machine = all(node.address.startswith("127.") for node in cluster.nodes)
    for rank, node in enumerate(cluster.nodes):
        address = ipaddress.IPv4Address(node.address) if is_ipv4(node.address) else None
        own = address is not None and (
            (address.is_loopback and not one_machine)
            or address.is_unspecified
            or address.is_multicast
        )
        if own or node.address == "255.255.255.255" or node.address.startswith("localhost"):
            yield Finding(
                "nodes.address-unreachable",
                node_path(rank, "address"),
                f"other nodes cannot reach {node.name} at {node.address}",
                "give its address on the LAN",
            )
        if node.lan_interface in rails or node.lan_interface == "lo":
            yield Finding(
                "nodes.lan-interface",
                node_path(rank, "lan_interface"),
                f"{node.lan_interface} is not the management network",
                "give the netdev of the LAN port (enP7s7 on a Spark)",
            )
        network = cluster.management_network
        if network and address and address not in ipaddress.IPv4Network(network):
            yield Finding(
                "nodes.address-outside",
                node_path(rank, "address"),
                f"{node.address} is not in management_network {network}",
                "correct one of the two",
                "warning",
            )


def _ports_differ(cluster: Cluster) -> Iterator[Finding]:
    used = {
        "api.port": cluster.api.port,
        **({"router.port": cluster.router.port} if cluster.router is not None else {}),
        "ports.rendezvous": cluster.ports.rendezvous,
        "ports.supervisor": cluster.ports.supervisor,
        "ssh": 22,
        "nfs": NFS_PORT,
        "nfs over rdma": NFS_RDMA_PORT,
        "rpcbind": 111,
    }
    seen: dict[int, str] = {}
    for name, port in used.items():
        if port in seen:
            key, other = (seen[port], name) if "." in seen[port] else (name, seen[port])
            yield Finding(
                "ports.used-twice",
                tuple(key.split(".")),
                f"port {port} is used for {key} and for {other}",
                "give every service its own port",
            )
        seen.setdefault(port, name)


def _engram_places(cluster: Cluster, facts: ModelFacts) -> Iterator[Finding]:
    for rank, node in enumerate(cluster.nodes):
        place = node.engram
        if place is None:
            if facts.engram is not None:
                yield Finding(
                    "engram.place-missing",
                    node_path(rank),
                    f"{node.name} has no place for its Engram rows; without them on local NVMe the "
                    "model does not fit",
                    "add engram: {device: /dev/disk/by-id/...} or engram: {directory: /path}",
                )
            continue
        if facts.engram is None:
            yield Finding(
                "engram.place-unused",
                node_path(rank, "engram"),
                f"{facts.name} has no Engram tables",
                "remove engram",
                "note",
            )
        model = cluster.model.path
        inside = place.directory is not None and (
            f"{place.directory}/".startswith(f"{model}/") or model.startswith(f"{place.directory}/")
        )
        if inside:
            yield Finding(
                "engram.inside-checkpoint",
                node_path(rank, "engram", "directory"),
                f"{place.directory} and the checkpoint {model} lie in each other; workers mount "
                "the checkpoint read-only",
                "give a directory of its own",
            )
        if (place.device is None) == (place.directory is None):
            yield Finding(
                "engram.one-place",
                node_path(rank, "engram"),
                "give exactly one of device and directory",
                "keep one of the two",
            )
        if place.device is not None and not place.device.startswith("/dev/disk/by-"):
            yield Finding(
                "engram.device-unstable",
                node_path(rank, "engram", "device"),
                f"{place.device} can be another disk after a reboot",
                "use a stable name: ls -l /dev/disk/by-id",
            )


def _weights(cluster: Cluster) -> Iterator[Finding]:
    if cluster.weights.mode == "local" and cluster.weights.rdma:
        yield Finding(
            "weights.rdma-unused",
            ("weights", "rdma"),
            "local copies use no NFS",
            "remove weights.rdma",
            "warning",
        )
    if cluster.weights.mode != "nfs":
        return
    if len(cluster.nodes) == 1:
        yield Finding(
            "weights.nfs-single",
            ("weights", "mode"),
            "a single node has nobody to share with",
            "remove weights.mode",
        )
    if cluster.topology.kind == "ring":
        yield Finding(
            "weights.nfs-ring",
            ("weights", "mode"),
            "in a ring the node opposite the head has no cable to it",
            "use weights.mode: local (every node keeps its own copy)",
        )


def _image(cluster: Cluster) -> Iterator[Finding]:
    if cluster.image is None and any(node.system == "dgx-os" for node in cluster.nodes):
        yield Finding(
            "image.missing",
            ("nodes",),
            "DGX OS runs the engine from an image, and none is named: install will refuse",
            "add image: {reference, digest} (docs/dgx-os.md)",
            "warning",
        )


def _api(cluster: Cluster) -> Iterator[Finding]:
    if cluster.api.key_file is None and not cluster.api.bind.startswith("127."):
        yield Finding(
            "api.no-key",
            ("api",),
            f"everyone who reaches {cluster.api.bind}:{cluster.api.port} may use the model",
            "add api.key_file (a file on the head with the key), or bind to 127.0.0.1",
            "warning",
        )
