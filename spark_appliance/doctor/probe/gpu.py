"""Facts about the GPU. Values that the driver does not know stay "N/A", as GB10's memory does."""

from __future__ import annotations

import re
from typing import Any, Mapping

from spark_appliance.doctor.probe.core import Facts, Machine, ProbeError

_FIELDS = (
    "name",
    "driver_version",
    "pstate",
    "clocks.sm",
    "clocks.max.sm",
    "power.draw",
    "temperature.gpu",
    "memory.total",
    "persistence_mode",
)
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")


def gpu(machine: Machine, request: Mapping[str, Any], facts: Facts) -> None:
    """Driver, clocks, power and who computes."""
    del request
    facts.put("driver", _driver, machine)
    facts.put("gpus", lambda: _query(machine, _FIELDS))
    facts.put("reasons", _reasons, machine)
    facts.put("apps", _apps, machine)


def _driver(machine: Machine) -> dict[str, Any]:
    text = machine.text("/proc/driver/nvidia/version")
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text.splitlines()[0] if text else "")
    if match is None:
        raise ProbeError("/proc/driver/nvidia/version names no version")
    return {"version": match.group(1), "open": "Open Kernel Module" in text}


def _smi(machine: Machine, argument: str) -> list[list[str]]:
    # run as root without the driver, nvidia-smi would load it
    if not machine.exists("/proc/driver/nvidia/version"):
        raise ProbeError("the NVIDIA driver is not loaded")
    text = machine.run("nvidia-smi", argument, "--format=csv,noheader,nounits", timeout=10)
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line]


def _query(machine: Machine, fields: tuple[str, ...]) -> list[dict[str, str]]:
    rows = _smi(machine, "--query-gpu=" + ",".join(fields))
    return [dict(zip(fields, row)) for row in rows]


def _reasons(machine: Machine) -> list[str]:
    failure = ProbeError("not asked")
    for field in _REASONS:  # renamed in driver 535
        try:
            return [row[0] for row in _smi(machine, f"--query-gpu={field}")]
        except ProbeError as error:
            failure = error
    raise failure


def _apps(machine: Machine) -> list[dict[str, Any]]:
    rows = _smi(machine, "--query-compute-apps=pid,process_name,used_memory")
    apps = []
    for row in rows:
        if row and row[0].isdigit():
            cgroup = machine.maybe(f"/proc/{row[0]}/cgroup") or ""
            unit = re.search(r"/([^/\n]+\.(?:service|scope))(?:/|$)", cgroup, re.MULTILINE)
            apps.append(
                {
                    "pid": int(row[0]),
                    "name": row[1] if len(row) > 1 else "",
                    "memory": row[2] if len(row) > 2 else "",
                    "unit": unit.group(1) if unit else None,
                }
            )
    return apps
