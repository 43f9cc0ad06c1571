"""Facts about links, addresses, neighbours, reachability, firewalls and listening ports."""

from __future__ import annotations

import os
import re
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Mapping

from spark_appliance.doctor.probe.core import Facts, Machine, ProbeError


def links(machine: Machine, request: Mapping[str, Any], facts: Facts) -> None:
    """Every netdev as the kernel sees it."""
    del request
    facts.put("netdevs", _netdevs, machine)
    facts.put("addresses", _addresses, machine)
    facts.put("neighbours", _neighbours, machine)
    facts.put("routes", _routes, machine)


def managers(machine: Machine, request: Mapping[str, Any], facts: Facts) -> None:
    """Who configures the asked netdevs. Files may hold secrets: only names leave the node."""
    netdevs = request["netdevs"]
    facts.put("netplan", _mentions, machine, "/etc/netplan", (".yaml", ".yml"), netdevs)
    facts.put(
        "networkmanager_files",
        _mentions,
        machine,
        "/etc/NetworkManager/system-connections",
        (".nmconnection", ""),
        netdevs,
    )
    facts.put("networkd", _mentions, machine, "/etc/systemd/network", (".network",), netdevs)
    facts.put("interfaces", _mentions, machine, "/etc/network", ("interfaces",), netdevs)
    facts.put("networkmanager", _nmcli, machine)


def reach(machine: Machine, request: Mapping[str, Any], facts: Facts) -> None:
    """One small ping a rail and peer; management addresses and names of the other nodes."""
    facts.put("pings", _pings, machine, request["pings"])
    facts.put("names", lambda: {name: _resolve(name) for name in request["names"]})


def firewall(machine: Machine, request: Mapping[str, Any], facts: Facts) -> None:
    """What filters incoming packets. Asks only where the kernel already has the module."""
    del request
    facts.put("ufw", lambda: "ENABLED=yes" in (machine.maybe("/etc/ufw/ufw.conf") or ""))
    loaded = machine.maybe("/proc/modules") or ""
    if re.search(r"^nf_tables ", loaded, re.MULTILINE):
        facts.put("nft", _nft, machine)
    else:
        facts.put("nft", lambda: {"chains": [], "rules": []})
    if machine.maybe("/proc/net/ip_tables_names"):
        facts.put("iptables", lambda: machine.run("iptables", "-S").splitlines()[:2000])
    else:
        facts.put("iptables", list)


def ports(machine: Machine, request: Mapping[str, Any], facts: Facts) -> None:
    """Who listens on the asked TCP ports."""
    facts.put("listening", _listening, machine, request["ports"])


def _netdevs(machine: Machine) -> dict[str, dict[str, Any]]:
    base = "/sys/class/net"
    found = {}
    for name in machine.listing(base):
        if not machine.exists(f"{base}/{name}/mtu"):
            continue

        def value(key: str, where: str = f"{base}/{name}") -> str | None:
            return machine.maybe(f"{where}/{key}")

        found[name] = {
            "mac": value("address"),
            "mtu": _number(value("mtu")),
            "state": value("operstate"),
            # both cannot be read while the link is administratively down
            "carrier": value("carrier"),
            "speed": _number(value("speed")),
            "port": value("phys_port_name"),
            "pci": machine.link(f"{base}/{name}/device"),
            "driver": machine.link(f"{base}/{name}/device/driver"),
        }
    return found


def _number(text: str | None) -> int | None:
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def _addresses(machine: Machine) -> dict[str, list[dict[str, Any]]]:
    return {
        link.get("ifname", ""): [
            {
                "address": f"{info.get('local')}/{info.get('prefixlen')}",
                "dynamic": bool(info.get("dynamic", False)),
            }
            for info in link.get("addr_info", [])
            if info.get("family") == "inet"
        ]
        for link in machine.json("ip", "-j", "addr")
    }


def _neighbours(machine: Machine) -> list[dict[str, Any]]:
    return [
        {"address": row.get("dst"), "netdev": row.get("dev"), "mac": row.get("lladdr")}
        for row in machine.json("ip", "-j", "neigh")
    ]


def _routes(machine: Machine) -> list[dict[str, Any]]:
    return [
        {key: row.get(key) for key in ("dst", "gateway", "dev", "prefsrc")}
        for row in machine.json("ip", "-j", "route")
    ]


def _mentions(
    machine: Machine, folder: str, endings: tuple[str, ...], netdevs: list[str]
) -> list[dict[str, Any]]:
    if not machine.exists(folder):
        return []
    found = []
    for name in machine.listing(folder):
        if not name.endswith(endings):
            continue
        text = machine.text(f"{folder}/{name}", 1 << 20)
        words = set(re.findall(r"[A-Za-z0-9_.-]+", text))
        found.append({"file": f"{folder}/{name}", "netdevs": [n for n in netdevs if n in words]})
    return found


def _nmcli(machine: Machine) -> dict[str, str]:
    if not machine.has("nmcli"):
        return {}
    if machine.run("systemctl", "is-active", "NetworkManager.service", check=False).strip() != (
        "active"
    ):
        return {}
    rows = machine.run("nmcli", "-t", "-f", "DEVICE,STATE", "device").splitlines()
    return dict(row.split(":", 1) for row in rows if ":" in row)


def _pings(machine: Machine, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def one(target: dict[str, Any]) -> dict[str, Any]:
        address, netdev = target["address"], target.get("netdev")
        through = ["-I", netdev] if netdev else []
        result = {"address": address, "netdev": netdev, "received": 0, "error": None}
        try:
            # the first packet may fall to a cold ARP cache
            text = machine.run(
                "ping", "-n", "-c", "2", "-i", "0.3", "-W", "1", *through, address,
                timeout=5, check=False,
            )  # fmt: skip
        except ProbeError as error:
            result["error"] = str(error)
            return result
        match = re.search(r"(\d+) received", text)
        result["received"] = int(match.group(1)) if match else 0
        return result

    if not wanted:
        return []
    with ThreadPoolExecutor(max_workers=min(16, len(wanted))) as pool:
        return list(pool.map(one, wanted))


def _resolve(name: str) -> str | None:
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])
    except OSError:
        return None


def _nft(machine: Machine) -> dict[str, Any]:
    """Return the chains, and each rule as: netdevs it is for, other conditions, verdict."""
    ruleset = machine.json("nft", "-j", "list", "ruleset", timeout=10).get("nftables", [])
    chains, rules = [], []
    for item in ruleset:
        if "chain" in item:
            keys = ("family", "table", "name", "hook", "policy")
            chains.append({key: item["chain"].get(key) for key in keys})
        elif "rule" in item:
            rule = item["rule"]
            place = {key: rule.get(key) for key in ("family", "table", "chain")}
            rules.append({**place, **_nft_rule(rule.get("expr", []))})
    return {"chains": chains, "rules": rules[:2000]}


def _nft_rule(expressions: list[dict[str, Any]]) -> dict[str, Any]:
    netdevs: list[str] | None = None
    conditional = False
    verdict = target = None
    for expression in expressions:
        for kind, value in expression.items():
            if kind in ("accept", "drop", "return"):
                verdict = kind
            elif kind == "reject":
                verdict = "drop"
            elif kind in ("jump", "goto"):
                verdict, target = kind, value.get("target")
            elif kind == "match" and value.get("op") == "==" and _is_netdev(value.get("left")):
                right = value.get("right")
                names = right.get("set", []) if isinstance(right, dict) else [right]
                netdevs = [name for name in names if isinstance(name, str)]
            elif kind not in ("counter", "comment", "log"):
                conditional = True
    return {"netdevs": netdevs, "conditional": conditional, "verdict": verdict, "target": target}


def _is_netdev(left: Any) -> bool:
    return isinstance(left, dict) and left.get("meta", {}).get("key") in ("iif", "iifname")


def _listening(machine: Machine, wanted: list[int]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in ("tcp", "tcp6"):
        for line in (machine.maybe(f"/proc/net/{name}") or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) < 10 or fields[3] != "0A":
                continue
            raw, _, port = fields[1].partition(":")
            if int(port, 16) in wanted:
                entry = {"port": int(port, 16), "address": _address(raw), "inode": fields[9]}
                found.append(entry)
    owners = _owners(machine, {entry["inode"] for entry in found})
    for entry in found:
        entry["process"] = owners.get(str(entry.pop("inode")))
    return found


def _address(raw: str) -> str:
    words = [struct.pack("=I", int(raw[at : at + 8], 16)) for at in range(0, len(raw), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words))


def _owners(machine: Machine, inodes: set[str]) -> dict[str, dict[str, Any]]:
    owners: dict[str, dict[str, Any]] = {}
    if not inodes:
        return owners
    for pid in machine.listing("/proc"):
        if not pid.isdigit():
            continue
        try:
            numbers = os.listdir(machine.path(f"/proc/{pid}/fd"))
        except OSError:
            continue  # another user's, or gone
        for number in numbers:
            match = re.match(r"socket:\[(\d+)\]", machine.link(f"/proc/{pid}/fd/{number}") or "")
            if match and match.group(1) in inodes:
                owners[match.group(1)] = {
                    "pid": int(pid),
                    "name": machine.maybe(f"/proc/{pid}/comm"),
                    "unit": _unit(machine.maybe(f"/proc/{pid}/cgroup") or ""),
                }
    return owners


def _unit(cgroup: str) -> str | None:
    match = re.search(r"/([^/\n]+\.(?:service|scope))(?:/|$)", cgroup, re.MULTILINE)
    return match.group(1) if match else None
