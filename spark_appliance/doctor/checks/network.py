"""Rails and management network: links, addresses, MTU, neighbours, firewall."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from spark_appliance.doctor.checks.common import all_ok
from spark_appliance.doctor.document import Document
from spark_appliance.doctor.firewall import INPUT, drops, from_iptables, from_nft
from spark_appliance.doctor.registry import CHECKS, Facts
from spark_appliance.doctor.result import Verdict, fail, ok, skip, warn
from spark_appliance.model.plan import NodePlan, RailPlan

RAIL_MBPS = 200_000
"""Speed that ethtool shows on a cabled port, Mb/s (NVIDIA playbooks, multi-sparks)."""


def _cage(rail: RailPlan) -> str:
    return f"{rail.netdev} (cage {rail.cage})"


@CHECKS.node(
    "NET.LINK",
    means="The rail has no link: cable not seated, other end down, or the port is off.",
    do="Check the cable at both ends (spark-appliance topology); ip link set NETDEV up.",
)
def link(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge whether every rail is there and has its link."""
    netdevs = document.section("links").at("netdevs")
    if not netdevs.present:
        netdevs.text()
    for rail in node.rails:
        device = netdevs.at(rail.netdev)
        if not device.present:
            yield fail(
                f"{_cage(rail)} does not exist",
                rail.netdev,
                do="Compare the names with ip link; upper and lower case matter.",
            )
            continue
        state, carrier = device.at("state").optional(), device.at("carrier").optional()
        if carrier == "1" and state == "up":
            yield ok("up", rail.netdev)
        elif carrier is None:
            yield fail(
                f"{_cage(rail)} is switched off",
                rail.netdev,
                do=f"ip link set {rail.netdev} up, or install the node.",
            )
        else:
            peers = ", ".join(peer.node for peer in rail.peers)
            yield fail(f"{_cage(rail)} has no carrier; its cable goes to {peers}", rail.netdev)
    del facts


@CHECKS.node(
    "NET.SPEED",
    problems=("P16",),
    means="The link came up slower than the cable allows; a switch often settles at 100G.",
    do="Switch: force 200G (200G-baseCR4) and turn autonegotiation off. Direct: other cable.",
)
def speed(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge the speed of every rail that has a link."""
    del facts
    for rail in node.rails:
        device = document.section("links").at("netdevs", rail.netdev)
        if device.at("carrier").optional() != "1":
            yield skip("no link", rail.netdev)
            continue
        mbps = device.at("speed").integer()
        text = f"{mbps} Mb/s"
        yield ok(text, rail.netdev) if mbps >= RAIL_MBPS else fail(text, rail.netdev)


@CHECKS.node(
    "NET.ADDRESS",
    problems=("P11", "P27"),
    means="The rail has not exactly its planned address: RDMA finds no GID, or the wrong one.",
    do="Install the node (addresses are in files then); remove foreign addresses with ip addr del.",
)
def address(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge that every rail has exactly its address."""
    del facts
    addresses = document.section("links").at("addresses")
    dict(addresses.entries())
    for rail in node.rails:
        if not addresses.at(rail.netdev).present:
            yield fail(f"{rail.netdev}: no such netdev, {rail.address} wanted", rail.netdev)
            continue
        found = [entry.at("address").text() for entry in addresses.at(rail.netdev).items()]
        if found == [rail.address]:
            yield ok(rail.address, rail.netdev)
        else:
            have = ", ".join(found) or "no address"
            yield fail(f"{rail.netdev}: {have}, {rail.address} wanted", rail.netdev)


@CHECKS.node(
    "NET.SUBNETS",
    problems=("P10",),
    means="Two interfaces share a subnet: answers leave through the wrong one, RDMA times out.",
    do="Give every rail its own subnet; change topology.prefix when something else uses it.",
)
def subnets(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge that no other interface of the node overlaps the subnet of a rail."""
    del facts
    taken = []
    for netdev, entries in document.section("links").at("addresses").entries():
        for entry in entries.items():
            try:
                taken.append((netdev, ipaddress.ip_interface(entry.at("address").text())))
            except ValueError:
                continue

    def clashes() -> Iterator[Verdict]:
        for rail in node.rails:
            network = ipaddress.IPv4Interface(rail.address).network
            for netdev, other in taken:
                if netdev == rail.netdev or other.network.version != network.version:
                    continue
                if other.network.prefixlen < 32 and network.overlaps(other.network):
                    yield fail(f"{rail.netdev} {network} and {netdev} {other.network}", rail.netdev)

    yield from all_ok(clashes(), f"{len(node.rails)} subnets of their own")


@CHECKS.node(
    "NET.MTU",
    problems=("P08", "P09"),
    means="Rails with different MTU lose packets (retry exceeded); a small one costs prefill 40 %.",
    do="Install the node, or ip link set NETDEV mtu MTU. A firmware update can reset it.",
)
def mtu(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge the MTU of every rail."""
    del facts
    for rail in node.rails:
        found = document.section("links").at("netdevs", rail.netdev, "mtu").integer()
        text = f"{found}, {rail.mtu} planned"
        yield ok(str(found), rail.netdev) if found == rail.mtu else fail(text, rail.netdev)


@CHECKS.node(
    "NET.PEER",
    problems=("P07",),
    means="The other end of the rail does not answer: wrong cable, wrong address, or a firewall. "
    "RDMA does not wait for ARP and would give up with retry exceeded.",
    do="Compare the cabling with spark-appliance topology, then address and firewall there.",
)
def peer(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge a small ping over every rail; it also warms the ARP cache."""
    del facts
    answers = {}
    for ping in document.section("reach").at("pings").items():
        key = (ping.at("netdev").optional(), ping.at("address").optional())
        answers[key] = ping
    for rail in node.rails:
        for other in rail.peers:
            subject = f"{rail.netdev}>{other.node}"
            entry = answers.get((rail.netdev, other.address))
            if entry is None:
                yield skip("no ping was sent", subject)
            elif entry.at("error").optional():
                yield skip(str(entry.at("error").optional()), subject)
            elif entry.at("received").integer():
                yield ok(f"{other.address} answers", subject)
            else:
                yield fail(
                    f"{other.node} ({other.address}) does not answer over {_cage(rail)}", subject
                )


@CHECKS.node(
    "NET.NEIGHBOUR",
    problems=("P10",),
    means="The address of the peer leads to the wrong card: both twins answer ARP for each other, "
    "or the cable goes elsewhere.",
    do="arp_ignore=1 and arp_announce=2 on all rails (HOST.SYSCTL); ip neigh flush dev NETDEV.",
)
def neighbour(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Compare the neighbour table with the peers' own MAC addresses."""
    table = {}
    for entry in document.section("links").at("neighbours").items():
        netdev, who = entry.at("netdev").optional(), entry.at("address").optional()
        table[netdev, who] = entry.at("mac").optional()
    documents = facts.documents()

    def wrong() -> Iterator[Verdict]:
        for rail in node.rails:
            for other in rail.peers:
                mac = table.get((rail.netdev, other.address))
                there = facts.plan.node(other.node)
                if mac is None or there is None or other.node not in documents:
                    continue
                netdevs = documents[other.node].section("links").at("netdevs")
                owner = next(
                    (r.netdev for r in there.rails if r.address.split("/")[0] == other.address), ""
                )
                real = netdevs.at(owner, "mac").optional()
                if real is not None and real.lower() != mac.lower():
                    yield fail(
                        f"{rail.netdev}: {other.address} is at {mac}, "
                        f"{other.node} {owner} has {real}",
                        f"{rail.netdev}>{other.node}",
                    )

    yield from all_ok(wrong(), f"{len(table)} entries, none wrong")


@CHECKS.node(
    "NET.LAN",
    problems=("P35",),
    means="Rendezvous, Gloo and NCCL's bootstrap go over the management network.",
    do="Correct nodes.lan_interface or nodes.address.",
)
def lan(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge the management interface, its address, and the way to the other nodes."""
    addresses = document.section("links").at("addresses")
    dict(addresses.entries())
    names = {}
    for name, value in document.section("reach").at("names").entries():
        names[name] = value.optional()
    if not addresses.at(node.lan_interface).present:
        yield fail(f"{node.lan_interface} does not exist", node.lan_interface)
    else:
        have = [
            entry.at("address").text().split("/")[0]
            for entry in addresses.at(node.lan_interface).items()
        ]
        literal = _is_address(node.address)
        if literal and node.address not in have:
            yield fail(
                f"{node.lan_interface} has {', '.join(have) or 'no address'}, not {node.address}",
                node.lan_interface,
            )
        elif not have:
            yield fail(f"{node.lan_interface} has no address", node.lan_interface)
        else:
            yield ok(f"{node.lan_interface} {', '.join(have)}", node.lan_interface)
    pings = {
        ping.at("address").optional(): ping
        for ping in document.section("reach").at("pings").items()
        if ping.at("netdev").optional() is None
    }
    for other in facts.plan.nodes:
        if other.name == node.name:
            continue
        if names.get(other.address, "") is None:
            yield fail(f"{other.address} cannot be resolved", other.name)
            continue
        entry = pings.get(other.address)
        if entry is None or entry.at("error").optional():
            yield skip("no ping was sent", other.name)
        elif entry.at("received").integer():
            yield ok(f"{other.address} answers", other.name)
        else:
            yield fail(f"{other.name} ({other.address}) does not answer", other.name)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


@CHECKS.node(
    "NET.MANAGER",
    problems=("P27",),
    means="Rails are configured twice, or by nothing that outlives a reboot: addresses vanish.",
    do="Keep one: remove the other's profile (nmcli connection delete, /etc/netplan).",
)
def manager(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge who configures the rails."""
    del facts
    managers = document.section("managers")
    states = dict(managers.at("networkmanager").entries())
    sources: dict[str, list[str]] = {rail.netdev: [] for rail in node.rails}
    for kind in ("netplan", "networkmanager_files", "networkd", "interfaces"):
        if not managers.at(kind).present:
            continue  # no right to look
        for entry in managers.at(kind).items():
            for netdev in entry.at("netdevs").texts():
                if netdev in sources:
                    sources[netdev].append(entry.at("file").optional() or kind)
    for netdev, files in sources.items():
        state = states[netdev].optional() or "" if netdev in states else ""
        profiles = [name for name in files if "NetworkManager" in name]
        others = [name for name in files if name not in profiles]
        if profiles and others:
            yield warn(f"{netdev}: {', '.join(files)}", netdev)
        elif state.startswith("connected") and not files:
            yield warn(
                f"{netdev}: connected by NetworkManager without a profile of its name", netdev
            )
        elif len(others) > 1:
            yield warn(f"{netdev}: {', '.join(others)}", netdev)
        elif files or node.system == "nixos":
            yield ok(files[0] if files else "NixOS", netdev)
        else:
            yield warn(f"{netdev}: no file configures it", netdev)


@CHECKS.node(
    "NET.FIREWALL",
    problems=("P28",),
    means="Incoming packets are dropped by default: collectives use ephemeral ports on the rails "
    "and between the management addresses.",
    do="Install the node (it writes the rules of the plan), or accept the rails and the peers.",
)
def firewall(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge rules that would drop the ranks' connections."""
    del facts
    section = document.section("firewall")
    wanted = sorted(node.firewall.trusted_interfaces)

    def closed() -> Iterator[Verdict]:
        filters = {f"nft {name}": chains for name, chains in from_nft(section.at("nft")).items()}
        if section.at("iptables").texts():
            filters["iptables"] = from_iptables(section.at("iptables").texts())
        for name, chains in filters.items():
            dropped = [netdev for netdev in wanted if drops(chains, INPUT, netdev)]
            if dropped:
                yield fail(f"{name} drops new connections from {', '.join(dropped)}", name)
        if section.at("ufw").flag() and not filters:
            yield warn("ufw is enabled, its rules could not be read", "ufw")

    if not wanted and not node.firewall.peer_addresses:
        yield ok("a single node")
        return
    yield from all_ok(closed(), "nothing drops the rails")
