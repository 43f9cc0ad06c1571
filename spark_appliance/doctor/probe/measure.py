"""Measurements that need nothing but the node: full-size pings and a load on the GPU."""

from __future__ import annotations

import re
from typing import Any, Mapping

from spark_appliance.doctor.probe import cuda
from spark_appliance.doctor.probe.core import Facts, Machine, ProbeError

_PACKETS = 5
_HEADERS = 28
"""Bytes of IPv4 and ICMP header in a packet."""

_SPARE = 6 << 30
"""Bytes that must stay available besides the buffer: a CUDA context takes 0.6 GiB."""


def dfping(machine: Machine, request: Mapping[str, Any], facts: Facts) -> None:
    """Ping every peer over its rail with packets of the full MTU that may not be split."""

    def one(target: Mapping[str, Any]) -> dict[str, Any]:
        netdev, address, mtu = target["netdev"], target["address"], target["mtu"]
        result = {"netdev": netdev, "address": address, "bytes": mtu, "sent": _PACKETS}
        try:
            text = machine.run(
                "ping", "-n", "-M", "do", "-s", str(mtu - _HEADERS), "-c", str(_PACKETS),
                "-i", "0.2", "-W", "1", "-I", netdev, address, timeout=8, check=False,
            )  # fmt: skip
        except ProbeError as error:
            return dict(result, received=0, error=str(error))
        match = re.search(r"(\d+) received", text)
        return dict(result, received=int(match.group(1)) if match else 0, error=None)

    facts.put("pings", lambda: [one(target) for target in request["dfping"]])


def gpu_load(machine: Machine, request: Mapping[str, Any], facts: Facts) -> None:
    """Load the GPU for some seconds, read its clock and how fast it reads memory."""
    size, seconds = int(request["gpu_bytes"]), float(request["gpu_seconds"])

    def room() -> int:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", machine.text("/proc/meminfo"), re.MULTILINE)
        available = int(match.group(1)) * 1024 if match else 0
        if available < size + _SPARE:
            raise ProbeError(f"only {available >> 20} MiB of memory are available")
        return available

    if facts.put("available_bytes", room) is None:
        return
    gpu = facts.put("device", cuda.describe)
    if gpu is None:
        return
    facts.put("total_bytes", lambda: gpu["total_bytes"])
    values = facts.put("load", cuda.load, seconds, size)
    if values is not None:
        facts.put("clock_mhz", lambda: values["clock_mhz"])
        facts.put("read_gbs", lambda: values["read_gbs"])
