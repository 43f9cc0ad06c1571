"""Addresses of the rails: generated from one prefix or taken as given, then checked.

A *rail* is one twin of one cabled cage: a netdev with its RDMA device, one IPv4 address and the
peers that share its subnet. Twins of a cage are always in different subnets: two MACs in one
subnet make replies leave through the wrong one (openucx/ucx#5598, NVIDIA switch playbook).
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from spark_appliance.model.cluster import CageName, Cluster, is_ipv4, node_path
from spark_appliance.model.findings import Finding, errors
from spark_appliance.topology.cabling import Cable, End
from spark_appliance.topology.hardware import CAGES, NETDEVS, Twin

_PREFIX: Final = ("topology", "prefix")
_PROXY_RANGE: Final = ipaddress.IPv4Network("198.18.0.0/15")
"""Used for fake addresses by proxy tools (MiaAI-Lab, docs/switchless-ring.md)."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another node on the same subnet."""

    rank: int
    address: ipaddress.IPv4Address


@dataclass(frozen=True, slots=True)
class Rail:
    """One addressed netdev of one node."""

    rank: int
    cage: CageName
    twin: int
    netdev: str
    rdma: str
    pci: str
    address: ipaddress.IPv4Interface
    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class Fabric:
    """All cables and rails of a cluster; rails are ordered by rank, cage and twin."""

    cables: tuple[Cable, ...]
    rails: tuple[Rail, ...]
    mtu: int

    def of(self, rank: int) -> tuple[Rail, ...]:
        """Return the rails of one node."""
        return tuple(rail for rail in self.rails if rail.rank == rank)

    def between(self, rank: int, other: int) -> tuple[Rail, ...]:
        """Return the rails of ``rank`` on which ``other`` is reached directly."""
        return tuple(
            rail for rail in self.of(rank) if any(peer.rank == other for peer in rail.peers)
        )


def assign_addresses(cluster: Cluster, cables: list[Cable]) -> tuple[Fabric | None, list[Finding]]:
    """Give every twin of every cabled cage its address and check the result."""
    explicit = [node.addresses is not None for node in cluster.nodes]
    if any(explicit):
        table, findings = _explicit(cluster, cables)
    else:
        table, findings = _generated(cluster, cables)
    if errors(findings) or table is None:
        return None, findings
    findings = [
        *findings,
        *_check_subnets(cluster, cables, table),
        *_check_management(cluster, table),
    ]
    rails = tuple(
        _rail(end, index, twin, table, cables)
        for end in sorted(end for cable in cables for end in cable.ends)
        for index, twin in enumerate(CAGES[end.cage].twins)
    )
    return Fabric(tuple(cables), rails, cluster.topology.mtu), findings


_Table = dict[tuple[End, int], ipaddress.IPv4Interface]


def _generated(cluster: Cluster, cables: list[Cable]) -> tuple[_Table | None, list[Finding]]:
    """Number the rails so that an address can be read.

    With prefix a.b.0.0/16: behind a switch a.b.<twin>00.<node>; on a direct cable
    a.b.<twin><low node><high node>.<node>; twins count 1, 2 and nodes 1..8 in rank order. So
    10.77.212.1 is node 1, second twin, on the cable between nodes 1 and 2.
    """
    prefix = ipaddress.IPv4Network(cluster.topology.prefix)
    if not cables:
        return {}, []
    if prefix.prefixlen != 16 or not _usable(prefix.network_address + 1):
        return None, [
            Finding(
                "topology.prefix",
                _PREFIX,
                f"{prefix} cannot hold the rails",
                "give a private unicast /16, for example 10.77.0.0/16",
            )
        ]
    base = int(prefix.network_address)
    table: _Table = {}
    for cable in cables:
        for twin in (0, 1):
            third = (twin + 1) * 100
            if cable.b is not None:
                third += (cable.a.rank + 1) * 10 + cable.b.rank + 1
            for end in cable.ends:
                host = base + third * 256 + end.rank + 1
                table[end, twin] = ipaddress.IPv4Interface((host, 24))
    findings: list[Finding] = []
    if prefix.overlaps(_PROXY_RANGE) or not prefix.is_private:
        findings.append(
            Finding(
                "topology.prefix-public",
                _PREFIX,
                f"{prefix} is not a private range (or one that proxy tools use)",
                "prefer a range of RFC 1918, for example 10.77.0.0/16",
                "warning",
            )
        )
    return table, findings


def _explicit(cluster: Cluster, cables: list[Cable]) -> tuple[_Table | None, list[Finding]]:
    findings: list[Finding] = []
    table: _Table = {}
    up = {end for cable in cables for end in cable.ends}
    for rank, node in enumerate(cluster.nodes):
        wanted = {
            twin.netdev: (end, index)
            for end in sorted(up)
            if end.rank == rank
            for index, twin in enumerate(CAGES[end.cage].twins)
        }
        given = node.addresses or {}
        for netdev, (end, index) in wanted.items():
            if netdev in given:
                table[end, index] = ipaddress.IPv4Interface(given[netdev])
            else:
                findings.append(
                    Finding(
                        "topology.port-without-address",
                        node_path(rank, "addresses"),
                        f"{node.name}: {netdev} is cabled but has no address",
                        f"add {netdev}: <address>/24 (every twin needs its own subnet)",
                    )
                )
        for netdev in given:
            if netdev not in wanted:
                findings.append(_unwanted_netdev(rank, netdev, wanted))
    return (None if findings else table), findings


def _unwanted_netdev(rank: int, netdev: str, wanted: dict[str, tuple[End, int]]) -> Finding:
    path = node_path(rank, "addresses", netdev)
    if netdev in NETDEVS:
        return Finding(
            "topology.address-without-cable",
            path,
            f"{netdev} has an address but no cable",
            "remove the address, or add the cable to topology.cables",
        )
    close = [name for name in NETDEVS if name.lower() == netdev.lower()]
    remedy = f"write {close[0]} (the capital P matters)" if close else f"use: {', '.join(wanted)}"
    return Finding("topology.unknown-netdev", path, f"a Spark has no rail named {netdev}", remedy)


def _check_subnets(cluster: Cluster, cables: list[Cable], table: _Table) -> list[Finding]:
    findings: list[Finding] = []
    for (end, index), interface in sorted(table.items()):
        network = interface.network
        path = _address_path(cluster, end, index)
        who = f"{cluster.nodes[end.rank].name} {_netdev(end, index)}"
        if network.prefixlen > 30 or interface.ip in (
            network.network_address,
            network.broadcast_address,
        ):
            findings.append(
                Finding(
                    "topology.address-not-host",
                    path,
                    f"{who}: {interface} is no host address of its subnet",
                    f"use an address between the ends of {network}",
                )
            )
        if not _usable(interface.ip):
            findings.append(
                Finding(
                    "topology.address-unusable",
                    path,
                    f"{who}: {interface.ip} is no address for a rail",
                    "use a private unicast address, for example of 10.0.0.0/8",
                )
            )
        elif not interface.ip.is_private and cluster.nodes[end.rank].addresses is not None:
            findings.append(
                Finding(
                    "topology.address-public",
                    path,
                    f"{who}: {interface.ip} is a public address",
                    "prefer a range of RFC 1918",
                    "warning",
                )
            )
    for rank, node in enumerate(cluster.nodes):
        own = sorted((key, value) for key, value in table.items() if key[0].rank == rank)
        for (key, one), (other_key, two) in combinations(own, 2):
            if one.network.overlaps(two.network):
                findings.append(
                    Finding(
                        "topology.twins-share-subnet",
                        _address_path(cluster, *other_key),
                        f"{node.name}: {_netdev(*key)} and {_netdev(*other_key)} are both in "
                        f"{two.network}",
                        "give every netdev of a node its own /24",
                    )
                )
    if errors(findings):
        return findings
    groups = _groups(cables)
    for group in groups:
        networks = {table[key].network for key in group}
        if len(networks) > 1:
            findings.append(
                Finding(
                    "topology.cable-subnets-differ",
                    _address_path(cluster, *group[-1]),
                    f"{_names(cluster, group)} share a wire but not a subnet: "
                    f"{', '.join(map(str, sorted(networks)))}",
                    "give both ends of a rail addresses of the same /24",
                )
            )
        addresses = [table[key].ip for key in group]
        for position, (key, address) in enumerate(zip(group, addresses, strict=True)):
            if address in addresses[:position]:
                findings.append(
                    Finding(
                        "topology.address-used-twice",
                        _address_path(cluster, *key),
                        f"{address} is used twice",
                        "give every netdev its own address",
                    )
                )
    for left, right in combinations(groups, 2):
        first, second = table[left[0]].network, table[right[0]].network
        if first.overlaps(second) and not errors(findings):
            findings.append(
                Finding(
                    "topology.subnet-used-twice",
                    _address_path(cluster, *right[0]),
                    f"{second} of {_names(cluster, right)} is also used by {_names(cluster, left)}",
                    "give every cable its own two /24",
                )
            )
    return findings


def _check_management(cluster: Cluster, table: _Table) -> list[Finding]:
    findings: list[Finding] = []
    rails = {interface.network for interface in table.values()}
    if cluster.management_network is not None:
        management = ipaddress.IPv4Network(cluster.management_network)
        for network in sorted(rails):
            if network.overlaps(management):
                findings.append(
                    Finding(
                        "topology.overlaps-management",
                        ("management_network",),
                        f"rail subnet {network} overlaps the management network {management}",
                        "choose another topology.prefix (or other explicit addresses)",
                    )
                )
                break
    for rank, node in enumerate(cluster.nodes):
        if not is_ipv4(node.address):
            continue
        address = ipaddress.IPv4Address(node.address)
        for network in sorted(rails):
            if address in network:
                findings.append(
                    Finding(
                        "topology.overlaps-management",
                        node_path(rank, "address"),
                        f"management address {address} lies in rail subnet {network}",
                        "choose another topology.prefix (or other explicit addresses)",
                    )
                )
    return findings


def _groups(cables: list[Cable]) -> list[list[tuple[End, int]]]:
    """Return the sets of twins that share one wire (or one switch), by cable and twin."""
    to_switch = [cable.a for cable in cables if cable.b is None]
    groups = [[(end, twin) for end in to_switch] for twin in (0, 1)] if to_switch else []
    groups += [
        [(end, twin) for end in cable.ends]
        for cable in cables
        if cable.b is not None
        for twin in (0, 1)
    ]
    return groups


def _rail(end: End, index: int, twin: Twin, table: _Table, cables: list[Cable]) -> Rail:
    group = next(group for group in _groups(cables) if (end, index) in group)
    peers = tuple(
        Peer(other.rank, table[other, which].ip) for other, which in group if other != end
    )
    return Rail(
        end.rank, end.cage, index, twin.netdev, twin.rdma, twin.pci, table[end, index], peers
    )


def _usable(address: ipaddress.IPv4Address) -> bool:
    """Tell whether a rail can have the address: unicast, not of this host, not reserved."""
    return not (
        address.is_loopback
        or address.is_multicast
        or address.is_link_local
        or address.is_reserved
        or address.packed[0] == 0
    )


def _netdev(end: End, index: int) -> str:
    return CAGES[end.cage].twins[index].netdev


def _names(cluster: Cluster, group: list[tuple[End, int]]) -> str:
    return " and ".join(f"{cluster.nodes[end.rank].name} {_netdev(end, i)}" for end, i in group)


def _address_path(cluster: Cluster, end: End, index: int) -> tuple[str | int, ...]:
    if cluster.nodes[end.rank].addresses is None:
        return _PREFIX
    return node_path(end.rank, "addresses", _netdev(end, index))
