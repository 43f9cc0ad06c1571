"""All files of a DGX OS node, and the bundle that carries them there."""

from __future__ import annotations

import base64
from typing import Any, Final

from spark_appliance.dgxos.files import NodeFile
from spark_appliance.dgxos.host import SPARK_NODE, host_files, recovery_files
from spark_appliance.dgxos.network import FIREWALL, FIREWALL_UNIT, network_files
from spark_appliance.dgxos.storage import storage_files
from spark_appliance.dgxos.units import unit_files
from spark_appliance.errors import InputError
from spark_appliance.model.plan import NodePlan, Plan
from spark_appliance.node.generations.bundle import VERSION, Action, Watch

ROUTER_FOLDER: Final = "/usr/local/lib/spark/router"
ROUTER_PYTHON: Final = f"{ROUTER_FOLDER}/bin/python3"
"""A virtual environment that ``install`` makes on the head (fleet.install)."""

RUNTIMES: Final = {"docker": "/usr/bin/docker", "podman": "/usr/bin/podman"}


def node_files(plan: Plan, node: NodePlan, program: bytes) -> list[NodeFile]:
    """Return every file of a node, recovery first, the rest by path.

    Raises:
        InputError: for a node of another system, and when the plan names no image.
    """
    if node.system != "dgx-os":
        raise InputError.one(
            "dgxos.system",
            f"{node.name} is a {node.system} node",
            "NixOS nodes are built and switched with nixos-rebuild: spark-appliance build",
        )
    if plan.image is None:
        raise InputError.one(
            "dgxos.no-image",
            f"{node.name}: the plan names no image for the engine",
            "write image: {reference, digest} into the cluster file (docs/dgx-os.md), render again",
        )
    placeholders = {
        "@spark-node@": SPARK_NODE,
        "@image@": plan.image.name,
        "@container-runtime@": RUNTIMES[plan.image.runtime],
    }
    if plan.router is not None and node.rank == 0:
        placeholders["@router-python@"] = ROUTER_PYTHON
    rest = [
        *host_files(plan, node, program),
        *network_files(plan, node),
        *storage_files(node),
        *unit_files(node, placeholders),
    ]
    return [*recovery_files(), *sorted(rest, key=lambda file: file.path)]


def actions(node: NodePlan) -> list[Action]:
    """Return what makes changed files take effect, in order.

    Nothing here starts or stops the engine, and nothing restarts NFS: both have lives of their
    own (``serve``, ``share``).
    """
    systemd = "/etc/systemd/system/"
    network = ("/etc/systemd/network/", "/etc/NetworkManager/")
    firewall = f"{systemd}{FIREWALL_UNIT}"
    result = [
        _action("systemd-sysusers", paths=("/etc/sysusers.d/",), boot=True),
        _action(
            "systemd-tmpfiles --create /etc/tmpfiles.d/spark.conf",
            paths=("/etc/tmpfiles.d/",),
            needs="/etc/tmpfiles.d/spark.conf",
            boot=True,
        ),
        _action("systemctl daemon-reload", paths=(systemd,), boot=True),
        _action(
            "systemctl restart systemd-modules-load.service",
            paths=("/etc/modules-load.d/",),
            boot=True,
        ),
        _action("systemctl restart systemd-sysctl.service", paths=("/etc/sysctl.d/",), boot=True),
        _action("udevadm control --reload", paths=("/etc/udev/", *network), boot=True),
        _action(
            "systemctl try-reload-or-restart NetworkManager.service",
            paths=network,
            needs="/usr/lib/systemd/system/NetworkManager.service",
        ),
    ]
    if node.rails:
        result += [
            _action("systemctl start systemd-networkd.service", paths=network),
            _action("networkctl reload", paths=network),
        ]
    result += [
        _action(f"systemctl restart {FIREWALL_UNIT}", paths=(FIREWALL, firewall), needs=firewall),
        _action("exportfs -ra", paths=("/etc/exports.d/",), needs="exportfs"),
    ]
    return result


def _action(
    line: str, *, paths: tuple[str, ...], needs: str | None = None, boot: bool = False
) -> Action:
    return Action(tuple(line.split()), paths, needs, 60, boot)


def watches(node: NodePlan) -> list[Watch]:
    """Return which files of others would contradict ours; they are named, never changed."""
    result: list[Watch] = []
    rails = tuple(rail.netdev for rail in node.rails)
    if rails:
        advice = "two owners of one interface lose its address at a reboot; remove it there"
        for pattern in (
            "/etc/netplan/*.yaml",
            "/etc/systemd/network/*.network",
            "/etc/NetworkManager/system-connections/*.nmconnection",
        ):
            result.append(Watch(pattern, rails, advice))
        result.append(
            Watch(
                "/etc/ufw/ufw.conf",
                ("ENABLED=yes",),
                "the firewall must let the Sparks talk: "
                + "; ".join(f"ufw allow in on {name}" for name in rails)
                + "".join(f"; ufw allow from {a}" for a in node.firewall.peer_addresses),
            )
        )
    if node.weights.export is not None:
        result.append(
            Watch(
                "/etc/exports",
                ("fsid=0", "fsid=root"),
                "only one export can be the root of NFSv4's name space; remove one",
            )
        )
    return result


def bundle(plan: Plan, node: NodePlan, program: bytes) -> dict[str, Any]:
    """Return what ``spark_appliance.node.generations`` applies, as plain data.

    Raises:
        InputError: as ``node_files``.
    """
    files = node_files(plan, node, program)
    return {
        "version": VERSION,
        "label": f"{plan.name} {plan.source.cluster_sha256[:12]}",
        "files": [
            {
                "path": file.path,
                "kind": file.kind,
                "sha256": file.sha256,
                "mode": f"{file.mode:04o}",
                "owner": file.owner,
                "group": file.group,
            }
            for file in files
        ],
        "actions": [action.as_json() for action in actions(node)],
        "watches": [watch.as_json() for watch in watches(node)],
        "contents": {file.sha256: base64.b64encode(file.content).decode() for file in files},
    }
