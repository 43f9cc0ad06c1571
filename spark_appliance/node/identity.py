"""Which node of the plan is this machine? Asked on every boot of an image that all nodes share.

The ESP holds what the owner put there: ``spark/cluster.lock.json``, the plan, and, where the
cluster file names no serial numbers, ``spark/node`` with the name of the node.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spark_appliance.names import ESP_NODE, ESP_PLAN
from spark_appliance.node.clock import Clock
from spark_appliance.node.errors import NodeError
from spark_appliance.node.files import read_line, write_atomic
from spark_appliance.node.journal import Journal
from spark_appliance.node.plan import View, read_plan
from spark_appliance.node.process import Runner

SERIAL: Final = "sys/class/dmi/id/product_serial"
NETDEVS: Final = "sys/class/net"
NETWORK: Final = "run/systemd/network/45-spark-lan.network"
"""The same name as on a node that was rolled out (modules/fleet.nix)."""

LONGEST_WAIT: Final = 30.0
"""Seconds until a network card is given up; drivers are loaded while this program runs."""

_RELOAD_SECONDS: Final = 30.0
_NO_SERIAL: Final = frozenset(["", "none", "default string", "to be filled by o.e.m.", "0"])
"""What boards without a number in their firmware say."""

_NAME: Final = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_NO_MAC: Final = "00:00:00:00:00:00"


@dataclass(frozen=True, slots=True)
class Machine:
    """What tells one machine from another: DMI serial number and MAC addresses, lower case."""

    serial: str
    macs: frozenset[str]

    def __str__(self) -> str:
        macs = ", ".join(sorted(self.macs)) or "none"
        return f"serial {self.serial or 'unknown'}, MAC addresses {macs}"


def look(root: Path) -> Machine:
    """Read serial number and MAC addresses below ``root``."""
    serial = (read_line(root / SERIAL) or "").strip().lower()
    folder = root / NETDEVS
    found = (read_line(path / "address") for path in folder.iterdir()) if folder.is_dir() else ()
    macs = frozenset(mac.lower() for mac in found if mac and mac != _NO_MAC)
    return Machine("" if serial in _NO_SERIAL else serial, macs)


def named(esp: Path) -> str | None:
    """Return the name that the owner wrote to the ESP, None without the file.

    Raises:
        NodeError: when the file holds no node name.
    """
    path = esp / ESP_NODE
    if not path.exists():
        return None
    text = (read_line(path) or "").removeprefix("\ufeff").strip()
    if not _NAME.fullmatch(text):
        raise NodeError(
            f"{path}: {text!r:.60} is no node name; write the name alone, as in the cluster file, "
            "for example spark1"
        )
    return text


def choose(nodes: list[View], machine: Machine) -> View | None:
    """Return the node whose serial number or MAC address is this machine's.

    The only node of a plan needs neither. None when no node fits. A serial number that fits
    outweighs a MAC address that does not: the card may be another, or its driver not there yet.

    Raises:
        NodeError: when several nodes fit, or a node fits by its MAC address and has another serial.
    """
    serials = [node for node in nodes if _text(node, "serial") == machine.serial != ""]
    macs = [node for node in nodes if _text(node, "mac") in machine.macs]
    fits = {node.text("name"): node for node in (*serials, *macs)}
    if len(fits) > 1:
        raise NodeError(
            f"this machine ({machine}) is {' as well as '.join(sorted(fits))} by the plan; correct "
            "serial and mac in the cluster file, render it, and put the plan on the ESP again"
        )
    if fits:
        (node,) = fits.values()
        wanted = _text(node, "serial")
        if wanted and machine.serial and wanted != machine.serial:
            raise NodeError(
                f"this machine ({machine}) is {node.text('name')} by its MAC address, but the plan "
                f"says serial {wanted}; correct the cluster file (an exchanged mainboard has "
                "another serial number), render it, and put the plan on the ESP again"
            )
        return node
    return nodes[0] if len(nodes) == 1 and not _known(nodes[0]) else None


def _text(node: View, key: str) -> str:
    return (node.optional_text(key) or "").lower() if key in node.data else ""


def _known(node: View) -> bool:
    return bool(_text(node, "serial") or _text(node, "mac"))


def network_file(interface: str, address: str) -> str:
    """Return networkd's file for the LAN: DHCP for routes and names, the plan's address beside it.

    ``address`` has its prefix length. An address that somebody else has is not taken.
    """
    return (
        f"[Match]\nName={interface}\n\n"
        "[Network]\nDHCP=yes\n\n"
        f"[Address]\nAddress={address}\nDuplicateAddressDetection=ipv4\n"
    )


@dataclass(frozen=True, slots=True)
class Identity:
    """Finds the node and takes its name and address; ``set_name`` is ``socket.sethostname``."""

    root: Path
    esp: Path
    run: Runner
    clock: Clock
    journal: Journal
    set_name: Callable[[str], None] = socket.sethostname

    def take(self) -> None:
        """Take the identity that the ESP and the machine give.

        Raises:
            NodeError: when it cannot be told, saying what was seen and what to do.
            PlanError: when the plan on the ESP cannot be read.
        """
        name = named(self.esp)
        path = self.esp / ESP_PLAN
        if not path.exists():
            self._without_plan(name)
            return
        plan = read_plan(path)
        nodes = plan.views("nodes")
        node = self._by_name(nodes, name, path) if name else self._by_machine(nodes, path)
        self._rename(node.text("name"))
        address = node.optional_text("lan_address") if "lan_address" in node.data else None
        if address is not None:
            self._configure(node.text("lan_interface"), address)
        where = address or "the address that DHCP gives (no management_network in the cluster file)"
        self.journal.notice(
            f"this is {node.text('name')} of {plan.text('name')} at {where}; next, on your "
            "computer: nixos-rebuild switch --flake .#"
            f"{node.text('name')} --target-host root@{node.text('address')}"
        )

    def _without_plan(self, name: str | None) -> None:
        if name is not None:
            self._rename(name)
        self.journal.warning(
            f"no plan on the ESP ({ESP_PLAN}): this machine ({look(self.root)}) is "
            f"{name or socket.gethostname()} at the address that DHCP gives; put the plan there "
            "and reboot, or go on over SSH"
        )

    def _by_name(self, nodes: list[View], name: str, path: Path) -> View:
        for node in nodes:
            if node.text("name") == name:
                self._compare(node, nodes)
                return node
        names = ", ".join(node.text("name") for node in nodes)
        raise NodeError(f"{self.esp / ESP_NODE}: {path} has no node {name!r}; it has {names}")

    def _compare(self, node: View, nodes: list[View]) -> None:
        """Warn when the plan says by numbers that this machine is another node."""
        machine, name = look(self.root), node.text("name")
        serial = _text(node, "serial")
        try:
            other = choose(nodes, machine)
        except NodeError as error:
            says = str(error)
        else:
            if other is not None and other.text("name") != name:
                says = f"this machine ({machine}) is {other.text('name')} by the plan"
            elif serial and machine.serial and serial != machine.serial:
                says = f"this machine ({machine}) is not {name} by the plan: serial {serial}"
            elif not serial and _text(node, "mac") and _text(node, "mac") not in machine.macs:
                says = (
                    f"this machine ({machine}) has no card of {name} by the plan: MAC address "
                    f"{_text(node, 'mac')} (its driver may not be loaded yet)"
                )
            else:
                return
        self.journal.warning(
            f"{self.esp / ESP_NODE} says {name}, and {name} it becomes, but {says}; correct or "
            "remove that file, or correct the cluster file, then reboot"
        )

    def _by_machine(self, nodes: list[View], path: Path) -> View:
        end = self.clock.now() + LONGEST_WAIT
        while True:
            machine = look(self.root)
            node = choose(nodes, machine)
            if node is not None:
                return node
            # only a card that is still to come can change the answer
            if not any(_text(node, "mac") for node in nodes) or self.clock.now() >= end:
                break
            self.clock.sleep(1.0)
        names = ", ".join(node.text("name") for node in nodes)
        raise NodeError(
            f"{path}: none of its nodes ({names}) is this machine ({machine}); write serial or mac "
            f"into the cluster file and render it, or write the name of the node into {ESP_NODE} "
            "on the ESP; then reboot"
        )

    def _rename(self, name: str) -> None:
        try:
            self.set_name(name)
        except OSError as error:
            raise NodeError(f"cannot set the host name to {name}: {error.strerror}") from None

    def _configure(self, interface: str, address: str) -> None:
        write_atomic(self.root / NETWORK, network_file(interface, address))
        done = self.run(["networkctl", "reload"], seconds=_RELOAD_SECONDS)
        if done.status:
            raise NodeError(f"networkctl reload: {done.reason}; see journalctl -u systemd-networkd")
