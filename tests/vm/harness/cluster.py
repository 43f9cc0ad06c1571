"""The cluster of ../cluster as DGX OS guests: its plan, and what each guest is made of.

What is decided for the NixOS machines is decided there once: names, addresses, cables, profile,
and the limits of a small machine. Here only what differs on DGX OS is added: the container image,
a disk for Engram rows by its serial, jumbo frames, and the tables of a small Engram model.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from harness.engine_image import EngineImage
from harness.keys import KeyPair
from harness.spec import Nic, Spec, host_mac
from spark_appliance import lockfile
from spark_appliance.engram import _column_bounds
from spark_appliance.model.cluster import read_cluster
from spark_appliance.model.facts import EngramTables
from spark_appliance.model.plan import NodePlan, Plan, read_plan
from spark_appliance.profiles import load_profile
from spark_appliance.render import render

CLUSTER = Path(__file__).parents[1] / "cluster"

ROWS_PER_COLUMN = 2000
"""Lower bound of the tables' column sizes: two tables of 13 MB."""

ENGRAM_SERIAL = "ENGRAM1"
IMAGE_SERIAL = "IMAGE"
LAN = "lan"
KEY_FILE = "/etc/spark/api-key"
HEAD_MEMORY_MIB = 1536
WORKER_MEMORY_MIB = 1408


def cluster_data(image: EngineImage) -> dict[str, Any]:
    """Return the cluster file of the NixOS machines, changed for DGX OS."""
    data: dict[str, Any] = yaml.safe_load((CLUSTER / "cluster.yaml").read_text(encoding="utf-8"))
    data["image"] = {"digest": image.identity, "runtime": "podman"}
    data["topology"]["mtu"] = 9000
    data["model"]["shards"] = 3  # spark-engram fake-checkpoint: one a table and one more
    for node in data["nodes"]:
        node["system"] = "dgx-os"
        node["ssh"] = node["name"]
        node["engram"] = {"device": f"/dev/disk/by-id/nvme-QEMU_NVMe_Ctrl_{ENGRAM_SERIAL}"}
    return data


def make_plan(image: EngineImage, *, engine_env: dict[str, str] | None = None) -> Plan:
    """Render the plan; ``engine_env`` are further variables of the engine."""
    data = cluster_data(image)
    if engine_env:
        data["engine"] = {"env": engine_env}
    cluster, findings = read_cluster(data)
    assert cluster is not None, findings
    loaded = load_profile(cluster.profile, CLUSTER)
    layers = (1, 14)
    bounds = _column_bounds(ROWS_PER_COLUMN, 24, len(layers))
    rows = {layer: bound[-1] for layer, bound in zip(layers, bounds, strict=True)}
    tables = EngramTables(rows=rows, columns=24, vocab_size=ROWS_PER_COLUMN, row_bytes=264)
    rendering = render(cluster, replace(loaded, facts=replace(loaded.facts, engram=tables)))
    assert rendering.plan is not None, rendering.findings
    return _for_small_machines(rendering.plan)


def _for_small_machines(rendered: Plan) -> Plan:
    small = json.loads((CLUSTER / "small-machine.json").read_text(encoding="utf-8"))
    data = json.loads(lockfile.dump(rendered))
    data["health"] |= small["health"]
    data["restart"] |= small["restart"]
    for node in data["nodes"]:
        node["guard"] |= small["guard"]
    plan, findings = read_plan(data)
    assert plan is not None, findings
    return plan


def cable_of(node: NodePlan, netdev: str) -> str:
    """Return the name of the cable in a rail's socket: both ends have the rail's subnet."""
    rail = next(rail for rail in node.rails if rail.netdev == netdev)
    return "rail" + rail.address.split("/")[0].rsplit(".", 1)[0].split(".", 2)[2]


def guests(plan: Plan, image: EngineImage, user: KeyPair, hosts: dict[str, KeyPair],
           ports: dict[str, int]) -> list[Spec]:  # fmt: skip
    """Return the machines as they come out of the box: cards, disks, network of the LAN, sshd."""
    names = "".join(f"{node.address} {node.name}\n" for node in plan.nodes)
    return [
        Spec(
            name=node.name,
            number=node.rank + 1,
            nics=_nics(node),
            files=_files(node, names, user, hosts[node.name]),
            units=tuple(f"soft-roce@{rail.netdev}.service" for rail in node.rails),
            disks={ENGRAM_SERIAL: 512},
            memory_mib=HEAD_MEMORY_MIB if node.rank == 0 else WORKER_MEMORY_MIB,
            ssh_port=ports[node.name],
            attached={IMAGE_SERIAL: image.archive},
        )
        for node in plan.nodes
    ]


def _mac(node: NodePlan, position: int) -> str:
    return f"52:54:00:12:{position:02x}:{node.rank + 1:02x}"


def _nics(node: NodePlan) -> tuple[Nic, ...]:
    cards = [Nic(LAN, _mac(node, 0))]
    for position, rail in enumerate(node.rails, 1):
        domain, _, rest = rail.pci.partition(":")
        port = 0 if domain == "0000" else 1  # QEMU has no second PCI domain
        slot = (port, int(rest.rpartition(".")[2]))
        cards.append(Nic(cable_of(node, rail.netdev), _mac(node, position), slot))
    # the first function of a device must come first
    return tuple(sorted(cards, key=lambda nic: nic.slot or (-1, 0)))


_SOFT_ROCE = """[Unit]
Description=RDMA in software on %I
BindsTo=sys-subsystem-net-devices-%i.device
After=sys-subsystem-net-devices-%i.device systemd-modules-load.service
Before=spark-fabric.service

[Service]
Type=oneshot
RemainAfterExit=yes
EnvironmentFile=/etc/soft-roce/%I
ExecStart=rdma link add ${DEVICE} type rxe netdev %I
ExecStop=rdma link delete ${DEVICE}
"""


def _files(node: NodePlan, names: str, user: KeyPair, host: KeyPair) -> dict[str, tuple[int, str]]:
    network = "etc/systemd/network"
    files = {
        "etc/hosts": (0o644, f"127.0.0.1 localhost\n{names}"),
        "etc/exports": (0o644, ""),
        "etc/ssh/sshd_config": (
            0o644,
            "PermitRootLogin prohibit-password\nPasswordAuthentication no\nUsePAM no\nUseDNS no\n",
        ),
        "etc/ssh/ssh_host_ed25519_key": (0o600, host.private),
        "etc/ssh/ssh_host_ed25519_key.pub": (0o644, host.public + "\n"),
        "root/.ssh/authorized_keys": (0o600, user.public + "\n"),
        "etc/modules-load.d/soft-roce.conf": (0o644, "rdma_rxe\n"),
        "etc/systemd/system/soft-roce@.service": (0o644, _SOFT_ROCE),
    }
    for position, name, address in (
        (_mac(node, 0), node.lan_interface, f"{node.address}/24"),
        (host_mac(node.rank + 1), "host0", "10.0.2.15/24"),
    ):
        files[f"{network}/10-{name}.link"] = (0o644, _named(position, name))
        text = f"[Match]\nName={name}\n\n[Network]\nAddress={address}\nIPv6AcceptRA=no\n"
        files[f"{network}/10-{name}.network"] = (0o644, text)
    for position, rail in enumerate(node.rails, 1):
        # the names that a Spark's firmware gives; those of domain 0 are also given by PCI path
        files[f"{network}/10-{rail.netdev}.link"] = (
            0o644,
            _named(_mac(node, position), rail.netdev),
        )
        files[f"etc/soft-roce/{rail.netdev}"] = (0o644, f"DEVICE={rail.rdma}\n")
    return files


def _named(mac: str, name: str) -> str:
    return f"[Match]\nMACAddress={mac}\n\n[Link]\nName={name}\n"
