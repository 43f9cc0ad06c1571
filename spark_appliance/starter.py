"""The commented cluster file that ``init`` prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from spark_appliance.errors import InputError
from spark_appliance.model.cluster import System, TopologyKind
from spark_appliance.topology.cabling import NODE_COUNTS, customary_cables


@dataclass(frozen=True, slots=True)
class Start:
    """What ``init`` was asked for."""

    topology: TopologyKind
    nodes: int
    name: str
    system: System


_PROFILES: Final = {1: "single-dev", 2: "pair", 3: "stable-tp3", 4: "stable-tp4"}


def starter(start: Start) -> str:
    """Return a cluster file with comments.

    Raises:
        InputError: when the topology does not take that many nodes, or nothing is known to fit.
    """
    counts = NODE_COUNTS[start.topology]
    if start.nodes not in counts:
        allowed = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        raise InputError.one(
            "topology.node-count",
            f"a {start.topology} takes {allowed} nodes, not {start.nodes}",
            f"give --nodes {counts[0]}, or another --topology",
        )
    profile = _PROFILES.get(start.nodes, "./my-profile.yaml")
    small = start.nodes == 1
    lines = [
        "# A cluster of DGX Sparks. Check it:   spark-appliance check",
        "#                          Render it:  spark-appliance render",
        "# Every key with its meaning:          spark-appliance schema",
        "version: 1",
        f"name: {start.name}",
        "",
        "# What the engine runs with: a bundled profile, or the path of your own (./my.yaml).",
    ]
    if start.nodes not in _PROFILES:
        lines.append(f"# None is bundled for {start.nodes} nodes; start from a copy of stable-tp4.")
    lines += [f"profile: {profile}", "", "model:"]
    if small:
        lines += [
            "  # Directory of the checkpoint on the node; download it there first:",
            "  #   hf download Qwen/Qwen3-4B --local-dir /models/Qwen3-4B",
            "  path: /models/Qwen3-4B",
            "  id: Qwen/Qwen3-4B",
            "  shards: 3",
            "  served_name: qwen3-4b",
        ]
    else:
        lines += [
            "  # Directory of the checkpoint: on the head's disk; workers see it at the same path.",
            "  path: /models/DeepSeek-V4.1-Flash",
            "  id: deepseek-ai/DeepSeek-V4.1-Flash",
            "  # Pin the commit that you downloaded (quoted); packed Engram files are bound to it.",
            '  # revision: "0123456789abcdef"',
        ]
    lines += ["", "topology:", f"  kind: {start.topology}"]
    if start.nodes > 1:
        lines += [
            "  # Every rail gets its own /24 out of this prefix; it must not be used elsewhere.",
            "  prefix: 10.77.0.0/16",
            "  # Cables, as NVIDIA's playbooks plug them. p0 is the cage next to the RJ45 socket.",
            "  cables:",
        ]
        for cable in customary_cables(start.topology, start.nodes):
            other = "switch" if cable.b is None else f"spark{cable.b.rank + 1}.{cable.b.cage}"
            lines.append(f"    spark{cable.a.rank + 1}.{cable.a.cage}: {other}")
    if start.topology == "ring":
        lines += [
            "  # Stock NCCL cannot start on a ring of four: give a libnccl.so.2 that can, the same",
            "  # file on every node, and pin it (sha256sum).",
            "  nccl_library: /opt/spark/nccl-ring/libnccl.so.2",
            "  # nccl_library_sha256: ...",
        ]
    if start.system == "nixos":
        lines += [
            "",
            "# The LAN; a node takes its address there beside what DHCP gives.",
            "management_network: 192.168.1.0/24",
        ]
    else:
        lines += [
            "",
            "# The engine's image (docs/image.md); its digest is in docs/digests.md.",
            "# image:",
            "#   reference: registry.lan:5000/spark-appliance",
            "#   digest: sha256:...",
        ]
    lines += [
        "",
        "# The Sparks in rank order; the first is the head. The address is that of the LAN port.",
        "nodes:",
    ]
    for number in range(1, start.nodes + 1):
        lines += [
            f"  - name: spark{number}",
            f"    address: 192.168.1.{10 + number}",
            f"    system: {start.system}",
        ]
        if start.system == "nixos":
            lines.append(f"    ssh: root@192.168.1.{10 + number}")
            if number == 1:
                lines += [
                    "    # By one of these a disk image knows which node it is (docs/image.md):",
                    '    # serial: "1234567890"',
                    '    # mac: "4c:bb:47:00:00:01"',
                ]
        if not small:
            if number == 1:
                lines.append(
                    "    # Local NVMe for this node's share of the Engram tables (see the table of "
                    "render):"
                )
                lines.append(
                    "    # a directory, or a whole disk: {device: /dev/disk/by-id/nvme-...}"
                )
            lines.append("    engram: {directory: /var/lib/spark/engram}")
    lines += [
        "",
        "api:",
        "  # Address that the head listens on; 127.0.0.1 keeps it to the head itself.",
        "  bind: 0.0.0.0",
        "  port: 8888",
        "  # File on the head with the API key (mode 0600); clients send it as a bearer token.",
        "  key_file: /etc/spark/api-key",
        "",
        "# Your own changes, over the profile's (a node may have an 'engine' of its own):",
        "# engine:",
        "#   args:",
        "#     log-level: info",
        "#   env:",
        "#     NCCL_DEBUG: INFO",
    ]
    return "\n".join(lines) + "\n"
