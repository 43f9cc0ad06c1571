"""What the probe is asked about: names and paths out of the plan, nothing it could decide on."""

from __future__ import annotations

from typing import Any, Final

from spark_appliance.model.plan import NodePlan, Plan
from spark_appliance.names import ENGINE, FABRIC, TARGET

PLAN_FILE: Final = "/etc/spark/plan.json"
"""Where the plan lies on every node."""

DISPLAY_UNITS: Final = ("display-manager.service", "gdm.service", "gdm3.service", "sddm.service")

UNWANTED_UNITS: Final = {
    "snapd.service": "snap",
    "unattended-upgrades.service": "upgrades without asking: drivers change under a running engine",
    "packagekit.service": "package service of the desktop",
    "cups.service": "printing",
    "ollama.service": "another user of the GPU's memory",
    "plymouth-start.service": "boot splash",
}
"""Services that take memory from the engine or change the node under it -> what they are
(christopherowen/spark-ds41f and MiaAI-Lab host notes)."""

POLLERS: Final = ("nvidia-smi", "nvtop", "nv-hostengine", "dcgm-exporter", "gpustat")
"""Programs that poll the GPU: every 2 s cost 0.6 ms a step (knapcio notes)."""

LOG_PATTERNS: Final = {
    "driver out of memory": r"NV_ERR_NO_MEMORY|_memdescAllocInternal",
    "GPU error (Xid)": r"NVRM: Xid",
    "PCIe fatal error": r"AER:.*(?i:fatal)(?<!non-fatal)(?<!Non-Fatal)",
    "ConnectX firmware stuck": r"irisc not responding",
    "out-of-memory kill": r"Out of memory: Killed process",
    "NVMe error": r"nvme\d+.*(I/O error|controller is down|timeout, aborting)",
}
"""Lines of the kernel's log that tell of trouble ahead (field notes 1.9, 6.2)."""

PACKAGES: Final = (
    "sglang",
    "torch",
    "flashinfer-python",
    "sgl-kernel",
    "sglang-kernel",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
    "spark-engram",
    "spark-tp-pad",
)
"""Distributions whose versions must agree between ranks."""

TABLE_FLAGS: Final = (
    "--speculative-dspark-sps-table-path",
    "--speculative-dspark-confidence-sts-path",
)
"""Flags that name a file which every rank needs, the same one."""


def tables(node: NodePlan) -> tuple[str, ...]:
    """Return the table files that a rank's command line names."""
    pairs = zip(node.argv, node.argv[1:], strict=False)
    return tuple(value for flag, value in pairs if flag in TABLE_FLAGS)


def request(plan: Plan, node: NodePlan) -> dict[str, Any]:
    """Return the probe's request for one node."""
    others = [other for other in plan.nodes if other.name != node.name]
    pings: list[dict[str, str | None]] = [
        {"address": peer.address, "netdev": rail.netdev}
        for rail in node.rails
        for peer in rail.peers
    ]
    pings += [{"address": other.address, "netdev": None} for other in others]
    hashes = [PLAN_FILE, *tables(node)]
    if node.nccl_library is not None:
        hashes.append(node.nccl_library.path)
    paths = [plan.model.path, node.cache_directory, "/var/lib", "/"]
    if node.engram is not None:
        paths.append(node.engram.directory)
    mount = node.weights.mount
    units = [unit.name for unit in node.units]
    return {
        "node": node.name,
        "rails": [rail.netdev for rail in node.rails],
        "netdevs": [*(rail.netdev for rail in node.rails), node.lan_interface],
        "pci": [rail.pci for rail in node.rails],
        "pings": pings,
        "names": [other.address for other in others],
        "sysctl": [*sorted(node.sysctl), "vm.min_free_kbytes", "net.ipv4.ip_forward"],
        "modules": list(node.kernel_modules),
        "units": [*dict.fromkeys([*units, TARGET, FABRIC, *DISPLAY_UNITS, *UNWANTED_UNITS])],
        "engine_unit": ENGINE,
        "processes": list(POLLERS),
        "log_patterns": LOG_PATTERNS,
        "paths": list(dict.fromkeys(paths)),
        "checkpoint": plan.model.path,
        "hashes": list(dict.fromkeys(hashes)),
        "packages": list(PACKAGES),
        "engram": None
        if node.engram is None
        else {
            "directory": node.engram.directory,
            "device": node.engram.device,
            "files": [file.name for file in node.engram.files],
        },
        "nfs_server": None if mount is None else mount.what.rpartition(":")[0],
        "ports": [plan.ports.api, plan.ports.rendezvous, plan.ports.supervisor],
    }
