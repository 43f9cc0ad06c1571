"""RDMA devices: state, GID tables, MTU, PCIe links, firmware."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from spark_appliance.doctor.checks.common import all_ok, listed
from spark_appliance.doctor.document import Document, View
from spark_appliance.doctor.registry import CHECKS, Facts
from spark_appliance.doctor.result import Verdict, fail, ok, skip, warn
from spark_appliance.model.plan import NodePlan, RailPlan
from spark_appliance.topology.hardware import RDMA_PORT

PCIE_SPEED = 32.0
"""GT/s of PCIe Gen5; each ConnectX-7 function of a Spark has four lanes of it."""

PCIE_WIDTH = 4

JUMBO = 4200
"""Netdev MTU from which RDMA uses 4096-byte packets (NVIDIA playbooks PR#103)."""


def port(document: Document, rail: RailPlan) -> View:
    """Return the RDMA port of a rail."""
    return document.section("rdma").at("devices", rail.rdma, "ports", str(RDMA_PORT))


def wanted_gid(rail: RailPlan) -> str:
    """Return the GID of a rail's IPv4 address as sysfs prints it."""
    address = ipaddress.IPv4Interface(rail.address).ip
    return ipaddress.IPv6Address(f"::ffff:{address}").exploded


def gid_index(document: Document, rail: RailPlan) -> int | None:
    """Return the index of the RoCE v2 entry of the rail's address on its netdev, None if none.

    Raises:
        Missing: when the table was not reported.
    """
    for entry in port(document, rail).at("gids").items():
        if (
            (entry.at("gid").optional() or "").lower() == wanted_gid(rail)
            and entry.at("type").optional() == "RoCE v2"
            and entry.at("netdev").optional() == rail.netdev
        ):
            return entry.at("index").integer()
    return None


@CHECKS.node(
    "RDMA.ACTIVE",
    means="NCCL cannot use this rail and waits, or falls back to sockets at 1 GB/s.",
    do="Cable and netdev first (NET.LINK); then: modprobe mlx5_ib; rdma link.",
)
def active(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge state and link layer of every rail's RDMA port."""
    del facts
    devices = document.section("rdma").at("devices")
    dict(devices.entries())
    for rail in node.rails:
        if not devices.at(rail.rdma).present:
            yield fail(f"{rail.rdma} does not exist", rail.rdma)
            continue
        here = port(document, rail)
        state, layer = here.at("state").text(), here.at("link_layer").text()
        if state != "ACTIVE":
            physical = here.at("physical").optional()
            yield fail(f"{rail.rdma}: {state}, physical {physical}", rail.rdma)
        elif layer != "Ethernet":
            yield fail(f"{rail.rdma}: link layer {layer}, Ethernet wanted", rail.rdma)
        else:
            yield ok(f"{state}, {layer}", rail.rdma)


@CHECKS.node(
    "RDMA.GID",
    problems=("P03", "P04", "P05", "P06"),
    means="The rail has no RoCE v2 entry for its address: queue pairs fail or spin without end.",
    do="Correct the address (NET.ADDRESS); then take the netdev down and up once.",
)
def gid(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge type, address and netdev of the GID that each rail has to use."""
    del facts
    indices = {}
    for rail in node.rails:
        index = gid_index(document, rail)
        if index is not None:
            indices[rail.rdma] = index
            yield ok(f"index {index}", rail.rdma)
            continue
        near = [
            f"{entry.at('index').data} {entry.at('type').optional()} on "
            f"{entry.at('netdev').optional()}"
            for entry in port(document, rail).at("gids").items()
            if (entry.at("gid").optional() or "").lower() == wanted_gid(rail)
        ]
        seen = f"only {', '.join(near)}" if near else "none for the address"
        yield fail(f"{rail.rdma}: {seen}; RoCE v2 of {rail.address} wanted", rail.rdma)
    if len(set(indices.values())) > 1:
        yield warn(
            f"indices differ: {listed(indices)}",
            "index",
            means="NCCL_IB_GID_INDEX has one value for all devices, so it stays unset and NCCL "
            "chooses itself.",
            do="Take all rails down and up in the order of the plan to make them equal.",
        )


@CHECKS.node(
    "RDMA.MTU",
    problems=("P08", "P09"),
    means="RDMA uses small packets: prefill about 40 % slower; unequal ends break connections.",
    do="Set the netdev's MTU (NET.MTU) and take the link down and up.",
)
def mtu(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge the active MTU of every rail's device."""
    del facts
    active_mtu = document.section("rdma").at("active_mtu")
    if node.rails:
        dict(active_mtu.entries())
    for rail in node.rails:
        found = active_mtu.at(rail.rdma).integer()
        wanted = 4096 if rail.mtu >= JUMBO else 1024
        good = found >= wanted
        yield ok(str(found), rail.rdma) if good else fail(f"{found}, not {wanted}", rail.rdma)


@CHECKS.node(
    "RDMA.PCIE",
    problems=("P15",),
    means="The card's PCIe link is narrower or slower than it should be: half the bandwidth.",
    do="Update the firmware (fwupdmgr), then remove mains power for a minute.",
)
def pcie(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge the trained PCIe link of every rail: Gen5, four lanes (tonyd2wild PR#35)."""
    del facts
    for rail in node.rails:
        here = document.section("pci").at("links", rail.pci)
        speed, width = here.at("speed").text(), here.at("width").text()
        try:
            good = float(speed.split()[0]) >= PCIE_SPEED and int(width) >= PCIE_WIDTH
        except (ValueError, IndexError):
            yield skip(f"{speed!r} x{width!r} not understood", rail.pci)
            continue
        text = f"{rail.netdev}: {speed} x{width}"
        yield ok(text, rail.pci) if good else fail(text, rail.pci)


@CHECKS.cluster(
    "RDMA.FIRMWARE",
    means="Cards with different firmware behave differently.",
    do="Bring all cards to the same firmware: fwupdmgr update.",
)
def firmware(facts: Facts) -> Iterator[Verdict]:
    """Compare the firmware of all rails' devices."""
    found: dict[str, str] = {}
    for node in facts.plan.nodes:
        document = facts.documents().get(node.name)
        if document is None:
            continue
        for rail in node.rails:
            version = document.section("rdma").at("devices", rail.rdma, "firmware").optional()
            if version:
                found[f"{node.name} {rail.rdma}"] = version

    def mixed() -> Iterator[Verdict]:
        if len(set(found.values())) > 1:
            yield warn(listed(found))

    if found:
        yield from all_ok(mixed(), next(iter(found.values())))
