"""What sysfs and ``ip`` say about a rail: link, MTU, address, RDMA port and GIDs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv6Address
from pathlib import Path
from typing import Final

from spark_appliance.node.errors import NodeError, PlanError
from spark_appliance.node.files import read_line
from spark_appliance.node.plan import NodeContext
from spark_appliance.node.process import Runner

ROCE_V2: Final = "RoCE v2"
"""As gid_attrs/types spells it (kernel: drivers/infiniband/core/sysfs.c)."""

IP_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Peer:
    """Another node on the rail's subnet."""

    node: str
    address: IPv4Address


@dataclass(frozen=True, slots=True)
class Rail:
    """One netdev with its RDMA device, as the plan wants it."""

    netdev: str
    rdma: str
    address: IPv4Interface
    mtu: int
    peers: tuple[Peer, ...]
    cable: str

    def __str__(self) -> str:
        return f"rail {self.netdev} ({self.cable})"


@dataclass(frozen=True, slots=True)
class Gid:
    """An entry of a GID table."""

    index: int
    gid: str
    type: str
    netdev: str

    def __str__(self) -> str:
        return f"{self.index}: {self.type} {self.gid} {self.netdev}"


@dataclass(frozen=True, slots=True)
class Seen:
    """A rail as it is. ``missing`` says what keeps it from working, one text each."""

    rail: Rail
    operstate: str | None
    mtu: int | None
    speed: int | None
    state: str | None
    phys_state: str | None
    addresses: tuple[str, ...]
    gids: tuple[Gid, ...]
    gid_index: int | None
    missing: tuple[str, ...]


def rails_of(context: NodeContext) -> list[Rail]:
    """Return the rails of this node.

    Raises:
        PlanError: when an address of the plan is none.
    """
    rails = []
    for view in context.node.views("rails"):
        try:
            rails.append(
                Rail(
                    netdev=view.text("netdev"),
                    rdma=view.text("rdma"),
                    address=IPv4Interface(view.text("address")),
                    mtu=view.integer("mtu"),
                    peers=tuple(
                        Peer(peer.text("node"), IPv4Address(peer.text("address")))
                        for peer in view.views("peers")
                    ),
                    cable=_cable(context, view.text("cage")),
                )
            )
        except ValueError as error:
            raise PlanError(f"{view.path}: {error}") from None
    return rails


def addresses(runner: Runner) -> dict[str, tuple[str, ...]]:
    """Return the IPv4 addresses (with prefix length) of every netdev.

    Raises:
        NodeError: when ``ip`` fails or answers no JSON.
    """
    done = runner(["ip", "-json", "-4", "addr", "show"], seconds=IP_SECONDS)
    if done.status:
        raise NodeError(f"'ip -json -4 addr show' failed: {done.reason}")
    try:
        links = json.loads(done.stdout or "[]")
        return {
            link["ifname"]: tuple(
                f"{entry['local']}/{entry['prefixlen']}" for entry in link.get("addr_info", [])
            )
            for link in links
            if "ifname" in link
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        raise NodeError("'ip -json -4 addr show' did not answer the JSON of iproute2") from None


def gid_table(context: NodeContext, rdma: str) -> tuple[Gid, ...]:
    """Return the used entries of a device's GID table, in order."""
    port = context.path(f"/sys/class/infiniband/{rdma}/ports/1")
    indices = sorted(int(entry) for entry in _names(port / "gids") if entry.isdecimal())
    table = []
    for index in indices:
        gid = read_line(f"{port}/gids/{index}")
        if not gid or not gid.strip("0:"):
            # most of the hundreds of entries are empty; reading their attributes only fails
            continue
        kind = read_line(f"{port}/gid_attrs/types/{index}")
        netdev = read_line(f"{port}/gid_attrs/ndevs/{index}")
        if kind and netdev:
            table.append(Gid(index, gid, kind, netdev))
    return tuple(table)


def matching_gid(rail: Rail, table: tuple[Gid, ...]) -> int | None:
    """Return the index that RoCE v2 over this rail's IPv4 address has to use.

    All three must fit: neighbouring entries differ only in the type (nccl-mesh-plugin#51), and
    an index that was right moves when a link flaps (field notes 1.5).
    """
    for entry in table:
        if (
            entry.type == ROCE_V2
            and entry.netdev == rail.netdev
            and _mapped(entry.gid) == rail.address.ip
        ):
            return entry.index
    return None


def look(context: NodeContext, rail: Rail, by_netdev: dict[str, tuple[str, ...]]) -> Seen:
    """Look at one rail and compare it with the plan."""
    net = context.path(f"/sys/class/net/{rail.netdev}")
    device = context.path(f"/sys/class/infiniband/{rail.rdma}")
    operstate = read_line(net / "operstate")
    mtu = _number(read_line(net / "mtu"))
    state = read_line(device / "ports/1/state")
    phys_state = read_line(device / "ports/1/phys_state")
    found = by_netdev.get(rail.netdev, ())
    table = gid_table(context, rail.rdma)
    index = matching_gid(rail, table)
    missing = []
    if operstate is None:
        others = ", ".join(sorted(_names(net.parent))) or "none"
        missing.append(f"netdev {rail.netdev} does not exist (there are: {others})")
    else:
        if operstate != "up":
            missing.append(f"link is {operstate}: check the cable and that the other end is on")
        if mtu != rail.mtu:
            missing.append(f"MTU is {mtu}, the plan says {rail.mtu}")
        if str(rail.address) not in found:
            have = ", ".join(found) or "no IPv4 address"
            missing.append(f"address {rail.address} is not there (the netdev has {have})")
    if state is None:
        others = ", ".join(sorted(_names(device.parent))) or "none"
        missing.append(f"RDMA device {rail.rdma} does not exist (there are: {others})")
    elif "ACTIVE" not in state:
        missing.append(f"RDMA port of {rail.rdma} is '{state}' ({phys_state})")
    elif index is None:
        seen = "; ".join(str(entry) for entry in table) or "an empty GID table"
        missing.append(
            f"{rail.rdma} has no RoCE v2 GID for {rail.address.ip} on {rail.netdev} (seen: {seen})"
        )
    return Seen(
        rail=rail,
        operstate=operstate,
        mtu=mtu,
        speed=_number(read_line(net / "speed")),
        state=state,
        phys_state=phys_state,
        addresses=found,
        gids=table,
        gid_index=index,
        missing=tuple(missing),
    )


def _cable(context: NodeContext, cage: str) -> str:
    here = f"{context.name}.{cage}"
    for cable in context.plan.view("topology").views("cables"):
        far = cable.optional_view("b")
        ends = [f"{end.text('node')}.{end.text('cage')}" for end in (cable.view("a"), far) if end]
        if here in ends:
            others = [end for end in ends if end != here]
            return f"cable {here} to {others[0] if others else 'the switch'}"
    return f"cage {here}"


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []


def _mapped(gid: str) -> IPv4Address | None:
    try:
        return IPv6Address(gid).ipv4_mapped
    except ValueError:
        return None


def _number(text: str | None) -> int | None:
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None
