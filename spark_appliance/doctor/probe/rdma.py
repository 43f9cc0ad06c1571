"""Facts about RDMA devices: ports, GID tables, PCIe links, firmware, error counters."""

from __future__ import annotations

import re
from typing import Any, Mapping

from spark_appliance.doctor.probe.core import Facts, Machine, ProbeError

_COUNTERS = (
    "packet_seq_err",
    "out_of_sequence",
    "roce_adp_retrans",
    "local_ack_timeout_err",
    "rx_icrc_encapsulated",
)


def rdma(machine: Machine, request: Mapping[str, Any], facts: Facts) -> None:
    """Every RDMA device, and the active MTU, which only the verbs library tells."""
    del request
    facts.put("devices", _devices, machine)
    facts.put("active_mtu", _active_mtu, machine)


def pci(machine: Machine, request: Mapping[str, Any], facts: Facts) -> None:
    """PCIe link of the asked functions as trained, and as they could."""
    facts.put("links", lambda: {name: _pci(machine, name) for name in request["pci"]})


def _devices(machine: Machine) -> dict[str, dict[str, Any]]:
    base = "/sys/class/infiniband"
    if not machine.exists(base):
        return {}
    return {
        name: {
            "firmware": machine.maybe(f"{base}/{name}/fw_ver"),
            "board": machine.maybe(f"{base}/{name}/board_id"),
            "pci": machine.link(f"{base}/{name}/device"),
            "ports": {
                port: _port(machine, f"{base}/{name}/ports/{port}")
                for port in machine.listing(f"{base}/{name}/ports")
            },
        }
        for name in machine.listing(base)
    }


def _port(machine: Machine, base: str) -> dict[str, Any]:
    counters = {name: machine.maybe(f"{base}/hw_counters/{name}") for name in _COUNTERS}
    return {
        "state": _word(machine.maybe(f"{base}/state")),
        "physical": _word(machine.maybe(f"{base}/phys_state")),
        "rate": machine.maybe(f"{base}/rate"),
        "link_layer": machine.maybe(f"{base}/link_layer"),
        "gids": _gids(machine, base),
        "counters": {
            name: int(value) for name, value in counters.items() if value and value.isdigit()
        },
    }


def _word(text: str | None) -> str | None:
    # "4: ACTIVE"
    return None if text is None else text.partition(":")[2].strip() or text


def _gids(machine: Machine, base: str) -> list[dict[str, Any]]:
    found = []
    for index in sorted(machine.listing(f"{base}/gids"), key=int):
        gid = machine.maybe(f"{base}/gids/{index}")
        # empty entries are all zeroes; reading their type is an error
        if not gid or not gid.replace(":", "").strip("0"):
            continue
        found.append(
            {
                "index": int(index),
                "gid": gid,
                "type": machine.maybe(f"{base}/gid_attrs/types/{index}"),
                "netdev": machine.maybe(f"{base}/gid_attrs/ndevs/{index}"),
            }
        )
    return found


def _active_mtu(machine: Machine) -> dict[str, int]:
    found: dict[str, int] = {}
    device = ""
    for line in machine.run("ibv_devinfo", "-v").splitlines():
        name = re.match(r"hca_id:\s*(\S+)", line)
        if name:
            device = name.group(1)
        mtu = re.search(r"active_mtu:\s*(\d+)", line)
        if mtu and device:
            found[device] = int(mtu.group(1))
    return found


def _pci(machine: Machine, name: str) -> dict[str, Any]:
    base = f"/sys/bus/pci/devices/{name}"
    if not machine.exists(base):
        raise ProbeError(f"no PCI function {name}")
    return {
        "speed": machine.maybe(f"{base}/current_link_speed"),
        "width": machine.maybe(f"{base}/current_link_width"),
        "max_speed": machine.maybe(f"{base}/max_link_speed"),
        "max_width": machine.maybe(f"{base}/max_link_width"),
    }
