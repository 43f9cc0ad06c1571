"""Rails, firewall and kernel settings.

The rails are systemd-networkd's, by files of its own and not by netplan: netplan cannot find a
device by its PCI path, ``netplan apply`` moved GID indices (field notes P05), and addresses that
NetworkManager held were lost at a reboot (1.3, P27). With ``ConfigureWithoutCarrier`` and
``IgnoreCarrierLoss`` an address, and with it its GID index, stays when a cable is loose.
NetworkManager is told to leave the rails alone; every other interface stays its.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from spark_appliance.dgxos.files import NodeFile, ini, link, text_file
from spark_appliance.model.plan import NodePlan, Plan, RailPlan

PREFIX: Final = "05-spark-"
"""Before netplan's 10-netplan-*: the first file that matches wins (systemd.network(5))."""

FIREWALL: Final = "/etc/spark/firewall.nft"
FIREWALL_UNIT: Final = "spark-firewall.service"
NFS_RDMA_PORT: Final = 20049


def network_files(plan: Plan, node: NodePlan) -> Iterator[NodeFile]:
    """Yield .link and .network files, the NetworkManager part, sysctls, modules and firewall."""
    for rail in node.rails:
        yield _link(rail)
        yield _network(rail, node.routes)
    if node.rails:
        names = ";".join(f"interface-name:{rail.netdev}" for rail in node.rails)
        yield text_file(
            "/etc/NetworkManager/conf.d/50-spark.conf",
            ini([("keyfile", [("unmanaged-devices+", names)])]),
        )
        # linked by hand: 'systemctl enable' would bring systemd-networkd-wait-online along,
        # which delays every boot where NetworkManager holds the default route
        yield link(
            "/etc/systemd/system/multi-user.target.wants/systemd-networkd.service",
            "/usr/lib/systemd/system/systemd-networkd.service",
        )
    if node.sysctl:
        lines = (f"{_sysctl(name)} = {value}\n" for name, value in sorted(node.sysctl.items()))
        yield text_file("/etc/sysctl.d/60-spark.conf", "".join(lines))
    if node.kernel_modules:
        yield text_file(
            "/etc/modules-load.d/spark.conf", "".join(f"{m}\n" for m in node.kernel_modules)
        )
    yield from _firewall(plan, node)


def _link(rail: RailPlan) -> NodeFile:
    # on a board without ACPI the path has the bridge's platform device in front
    match = [("Path", f"pci-{rail.pci} platform-*-pci-{rail.pci}")]
    settings = [("Name", rail.netdev), ("MTUBytes", str(rail.mtu))]
    return text_file(
        f"/etc/systemd/network/{PREFIX}{rail.netdev}.link",
        ini([("Match", match), ("Link", settings)]),
    )


def _network(rail: RailPlan, routes: list[str]) -> NodeFile:
    sections = [
        ("Match", [("Name", rail.netdev)]),
        # spark-fabric.service waits for the link and says what is missing; the boot goes on
        ("Link", [("MTUBytes", str(rail.mtu)), ("RequiredForOnline", "no")]),
        (
            "Network",
            [
                ("Address", rail.address),
                ("DHCP", "no"),
                ("IPv6AcceptRA", "no"),
                ("LinkLocalAddressing", "no"),
                ("ConfigureWithoutCarrier", "yes"),
                ("IgnoreCarrierLoss", "yes"),
            ],
        ),
    ]
    for route in routes:
        destination, _, rest = route.partition(" via ")
        gateway, _, netdev = rest.partition(" dev ")
        if netdev == rail.netdev:
            sections.append(("Route", [("Destination", destination), ("Gateway", gateway)]))
    return text_file(f"/etc/systemd/network/{PREFIX}{rail.netdev}.network", ini(sections))


def _sysctl(name: str) -> str:
    """Return a sysctl as sysctl.d(5) reads it: a dot inside an interface name needs slashes."""
    head = "net.ipv4.conf."
    if name.startswith(head) and name.count(".") > 4:
        netdev, _, key = name.removeprefix(head).rpartition(".")
        return f"net/ipv4/conf/{netdev}/{key}"
    return name


def _firewall(plan: Plan, node: NodePlan) -> Iterator[NodeFile]:
    """Close the cluster's own ports to strangers.

    What else the machine accepts stays its owner's business. A table of its own can only refuse
    more, never allow what another table refuses.
    """
    if not node.firewall.peer_addresses:
        return
    ports = {plan.ports.rendezvous, plan.ports.supervisor}
    if plan.ports.nfs is not None:
        ports |= {plan.ports.nfs, NFS_RDMA_PORT}
    if node.firewall.api_port is None:
        # ranks above 0 answer on the API's port too, without a key (sglang 0.5.23 engine.py:1234)
        ports.add(plan.ports.api)
    trusted = ", ".join(f'"{name}"' for name in ("lo", *node.firewall.trusted_interfaces))
    addresses = [address for address in node.firewall.peer_addresses if _numeric(address)]
    peers = f"    ip saddr {{ {', '.join(addresses)} }} accept\n" if addresses else ""
    body = (
        "table inet spark\n"
        "delete table inet spark\n"
        "table inet spark {\n"
        "  chain input {\n"
        "    type filter hook input priority filter - 5; policy accept;\n"
        f"    iifname {{ {trusted} }} accept\n"
        f"{peers}"
        f"    tcp dport {{ {', '.join(map(str, sorted(ports)))} }} drop\n"
        "  }\n"
        "}\n"
    )
    yield text_file(FIREWALL, body)
    unit = [
        (
            "Unit",
            [
                ("Description", "Ports between Sparks closed to everyone else"),
                ("DefaultDependencies", "no"),
                ("Before", "network-pre.target shutdown.target"),
                ("Wants", "network-pre.target"),
                ("Conflicts", "shutdown.target"),
            ],
        ),
        (
            "Service",
            [
                ("Type", "oneshot"),
                ("RemainAfterExit", "yes"),
                ("ExecStart", f"/usr/sbin/nft -f {FIREWALL}"),
                ("ExecReload", f"/usr/sbin/nft -f {FIREWALL}"),
                ("ExecStop", "/usr/sbin/nft delete table inet spark"),
            ],
        ),
        ("Install", [("WantedBy", "multi-user.target")]),
    ]
    yield text_file(f"/etc/systemd/system/{FIREWALL_UNIT}", ini(unit))
    yield link(
        f"/etc/systemd/system/multi-user.target.wants/{FIREWALL_UNIT}", f"../{FIREWALL_UNIT}"
    )


def _numeric(address: str) -> bool:
    return all(part.isdecimal() for part in address.split("."))
