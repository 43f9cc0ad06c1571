"""Facts about the operating system: kernel, memory, services, clock, processes."""

from __future__ import annotations

import os
import re
import resource
from typing import Any, Mapping

from spark_appliance.doctor.probe.core import Facts, Machine, ProbeError

_PAIR = re.compile(r'^([A-Za-z_][A-Za-z0-9_]*)=["\']?(.*?)["\']?$')
_UNIT_PROPERTIES = "Id,LoadState,ActiveState,SubState,UnitFileState,Result"


def system(machine: Machine, request: Mapping[str, Any], facts: Facts) -> None:
    """Kernel, distribution, firmware, limits of the login."""
    facts.put("kernel", lambda: machine.text("/proc/sys/kernel/osrelease"))
    facts.put("machine", lambda: os.uname().machine)
    facts.put("hostname", lambda: machine.text("/proc/sys/kernel/hostname"))
    facts.put("cmdline", lambda: machine.text("/proc/cmdline").split())
    facts.put("page_size", lambda: os.sysconf("SC_PAGE_SIZE"))
    facts.put("boot_id", lambda: machine.text("/proc/sys/kernel/random/boot_id"))
    facts.put("uptime_s", lambda: float(machine.text("/proc/uptime").split()[0]))
    facts.put("os_release", lambda: _pairs(machine.text("/etc/os-release")))
    facts.put("dgx_release", lambda: _pairs(machine.maybe("/etc/dgx-release") or ""))
    facts.put("dmi", _dmi, machine)
    facts.put("limits", lambda: {"memlock": _limit(resource.RLIMIT_MEMLOCK), "nofile": _limit(7)})
    facts.put("modules", lambda: [m for m in request["modules"] if _module(machine, m)])
    facts.put(
        "cpu_boost", lambda: machine.maybe("/sys/module/cppc_cpufreq/parameters/auto_sel_mode")
    )


def memory(machine: Machine, request: Mapping[str, Any], facts: Facts) -> None:
    """Sizes in bytes; free blocks by order."""
    facts.put("meminfo", _meminfo, machine)
    facts.put("buddyinfo", _buddyinfo, machine)
    facts.put("swaps", _swaps, machine)
    facts.put("thp", lambda: _chosen(machine.text("/sys/kernel/mm/transparent_hugepage/enabled")))
    facts.put("sysctl", lambda: {name: _sysctl(machine, name) for name in request["sysctl"]})
    facts.put("large", _large_processes, machine)
    facts.put("named", lambda: _named_processes(machine, request["processes"]))


def clock(machine: Machine, request: Mapping[str, Any], facts: Facts) -> None:
    """Whether the clock is kept by a time server; its value is the document's own."""
    del request
    facts.put("timedatectl", lambda: _pairs(machine.run("timedatectl", "show")))


def services(machine: Machine, request: Mapping[str, Any], facts: Facts) -> None:
    """States of the units that were asked for, and of those that failed."""
    facts.put("default_target", lambda: machine.run("systemctl", "get-default").strip())
    facts.put("units", lambda: _units(machine, request["units"]))
    facts.put(
        "failed",
        lambda: [
            line.split()[0].lstrip("●*")
            for line in machine.run(
                "systemctl", "list-units", "--state=failed", "--plain", "--no-legend"
            ).splitlines()
            if line.split()
        ],
    )
    facts.put(
        "manager",
        lambda: _pairs(
            machine.run("systemctl", "show", "--property=RuntimeWatchdogUSec,DefaultLimitMEMLOCK")
        ),
    )
    facts.put(
        "sshd",
        lambda: [
            block
            for block in _blocks(
                machine.run(
                    "systemctl",
                    "show",
                    "--property=Id,LoadState,MemoryMin,OOMScoreAdjust",
                    "--",
                    "ssh.service",
                    "sshd.service",
                )
            )
            if block.get("LoadState") == "loaded"
        ],
    )
    facts.put("watchdogs", _watchdogs, machine)
    facts.put("display", lambda: _display(machine))


def kernel_log(machine: Machine, request: Mapping[str, Any], facts: Facts) -> None:
    """How many lines of the kernel's log match each pattern."""

    def count() -> dict[str, int]:
        text = machine.run("dmesg", "--notime", timeout=10)
        return {
            name: sum(1 for line in text.splitlines() if re.search(pattern, line))
            for name, pattern in request["log_patterns"].items()
        }

    facts.put("matches", count)


def _pairs(text: str) -> dict[str, str]:
    found = (_PAIR.match(line.strip()) for line in text.splitlines())
    return {match.group(1): match.group(2) for match in found if match}


def _blocks(text: str) -> list[dict[str, str]]:
    return [pairs for pairs in map(_pairs, text.split("\n\n")) if pairs]


def _units(machine: Machine, names: list[str]) -> dict[str, dict[str, str]]:
    text = machine.run("systemctl", "show", f"--property={_UNIT_PROPERTIES}", "--", *names)
    blocks = _blocks(text)
    if len(blocks) != len(names):
        raise ProbeError(f"systemctl told of {len(blocks)} units, asked for {len(names)}")
    # an alias (display-manager.service) is answered with the id of the unit behind it
    return {
        name: {
            "load": block.get("LoadState", ""),
            "active": block.get("ActiveState", ""),
            "sub": block.get("SubState", ""),
            "file": block.get("UnitFileState", ""),
            "result": block.get("Result", ""),
        }
        for name, block in zip(names, blocks)
    }


def _dmi(machine: Machine) -> dict[str, str]:
    base = "/sys/class/dmi/id"
    names = ("sys_vendor", "product_name", "board_name", "bios_vendor", "bios_version", "bios_date")
    values = {name: machine.maybe(f"{base}/{name}") for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _limit(which: int) -> dict[str, Any]:
    soft, hard = resource.getrlimit(which)
    return {
        "soft": "unlimited" if soft == resource.RLIM_INFINITY else soft,
        "hard": "unlimited" if hard == resource.RLIM_INFINITY else hard,
    }


def _module(machine: Machine, name: str) -> bool:
    return machine.exists(f"/sys/module/{name.replace('-', '_')}")


def _meminfo(machine: Machine) -> dict[str, int]:
    values = {}
    for line in machine.text("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()
        if number and number[0].isdigit():
            values[name] = int(number[0]) * (1024 if number[1:] == ["kB"] else 1)
    return values


def _buddyinfo(machine: Machine) -> list[dict[str, Any]]:
    zones = []
    for line in machine.text("/proc/buddyinfo").splitlines():
        match = re.match(r"Node\s+(\d+),\s+zone\s+(\S+)\s+(.*)$", line)
        if match:
            free = [int(number) for number in match.group(3).split()]
            zones.append({"node": int(match.group(1)), "zone": match.group(2), "free": free})
    return zones


def _swaps(machine: Machine) -> list[dict[str, Any]]:
    rows = [line.split() for line in machine.text("/proc/swaps").splitlines()[1:]]
    return [
        {"name": row[0], "size": int(row[2]) * 1024, "used": int(row[3]) * 1024}
        for row in rows
        if len(row) >= 4
    ]


def _chosen(text: str) -> str:
    match = re.search(r"\[(\S+)\]", text)
    if match is None:
        raise ProbeError(f"no choice in {text!r}")
    return match.group(1)


def _sysctl(machine: Machine, name: str) -> str | None:
    # names of netdevs may hold dots; none of a Spark does
    value = machine.maybe("/proc/sys/" + name.replace(".", "/"))
    return None if value is None else " ".join(value.split())


def _processes(machine: Machine) -> list[tuple[int, str, int]]:
    found = []
    for name in machine.listing("/proc"):
        if not name.isdigit():
            continue
        comm, statm = machine.maybe(f"/proc/{name}/comm"), machine.maybe(f"/proc/{name}/statm")
        fields = (statm or "").split()
        if comm is not None and len(fields) > 1:
            found.append((int(name), comm, int(fields[1]) * os.sysconf("SC_PAGE_SIZE")))
    return found


def _large_processes(machine: Machine) -> list[dict[str, Any]]:
    """Return the largest processes over 256 MiB, with resident bytes."""
    large = sorted(_processes(machine), key=lambda process: -process[2])[:8]
    return [{"pid": p, "name": n, "resident": r} for p, n, r in large if r >= 256 << 20]


def _named_processes(machine: Machine, names: list[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for _, comm, _ in _processes(machine):
        if comm in names:
            counts[comm] = counts.get(comm, 0) + 1
    return counts


def _watchdogs(machine: Machine) -> list[dict[str, str | None]]:
    base = "/sys/class/watchdog"
    if not machine.exists(base):
        return []
    return [
        {
            "name": name,
            "identity": machine.maybe(f"{base}/{name}/identity"),
            "state": machine.maybe(f"{base}/{name}/state"),
            "timeout": machine.maybe(f"{base}/{name}/timeout"),
        }
        for name in machine.listing(base)
    ]


def _display(machine: Machine) -> dict[str, str | None]:
    base = "/sys/module/nvidia_drm/parameters"
    return {name: machine.maybe(f"{base}/{name}") for name in ("modeset", "fbdev")}
