"""What a plan makes of a machine, in one shape for NixOS and DGX OS.

``of_dgx`` reads the files that the DGX OS adapter writes, ``of_nixos`` the values of ``added.nix``:
what a NixOS node has that the same machine without a plan has not. Both readers refuse what they
do not know, so that nothing is left out of the comparison unseen. Differences that are meant are
in ``differences.py``.
"""

from __future__ import annotations

import configparser
import json
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from differences import NIXOS_ETC, NIXOS_GONE, NIXOS_PACKAGES, NIXOS_UNITS, NIXOS_USERS
from nixunits import sections

from spark_appliance.dgxos.compare import Unit, parse_unit
from spark_appliance.dgxos.files import NodeFile

SYSTEMD = "/etc/systemd/system/"
SSHD = "sshd.service"
TOUCHED = {"nfs-server.service", "systemd-networkd.service", "system.slice", SSHD}
"""The system's own units that the plan adds to; what they are without it is the system's matter."""

RUNTIMES = ("docker", "podman")
WITH_VALUE = ("--container", "--container-runtime", "--image", "--python")
WITHIN_CONTAINER = ("--user", "--writable-engram")

_YES = {"yes": True, "true": True, "y": True, "1": True}
_NO = {"no": False, "false": False, "n": False, "0": False}

Source = tuple[str, str]
"""Where a connection comes from: an interface, a peer's address, or a stranger."""


@dataclass
class Machine:
    """What the plan makes of one node."""

    units: dict[str, Unit] = field(default_factory=dict)
    rails: dict[str, dict[str, dict[str, list[str]]]] = field(default_factory=dict)
    sysctl: dict[str, str] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)
    exports: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    nfs: dict[str, str | bool] = field(default_factory=dict)
    tmpfiles: set[tuple[str, ...]] = field(default_factory=set)
    udev: set[str] = field(default_factory=set)
    limits: set[tuple[str, ...]] = field(default_factory=set)
    users: set[str] = field(default_factory=set)
    unmanaged: set[str] = field(default_factory=set)
    programs: set[str] = field(default_factory=set)
    accepts: dict[Source, set[int]] = field(default_factory=dict)
    """Ports of the cluster that each source reaches."""
    plan: Any = None


def sources(node: Any) -> list[Source]:
    """Return everybody who might open a connection to a node of a plan."""
    firewall = node["firewall"]
    return [
        ("interface", "lo"),
        *(("interface", name) for name in firewall["trusted_interfaces"]),
        *(("peer", address) for address in firewall["peer_addresses"]),
        ("stranger", ""),
    ]


def cluster_ports(plan: Any, node: Any) -> set[int]:
    """Return the ports that programs listen on for the cluster, 20049 for NFS over RDMA.

    The router listens on its head alone.
    """
    ports = {port for port in plan["ports"].values() if port is not None}
    ports |= {20049} if plan["ports"]["nfs"] is not None else set()
    return ports | ({plan["router"]["port"]} if plan["router"] and node["rank"] == 0 else set())


def common_plan(plan: Any) -> Any:
    """Return what of a plan must not depend on the system of its nodes."""
    result = {key: value for key, value in plan.items() if key not in ("image", "source")}
    result["nodes"] = [
        {key: value for key, value in node.items() if key not in ("system", "units")}
        for node in plan["nodes"]
    ]
    return result


# -- DGX OS ------------------------------------------------------------------------------------


def of_dgx(files: Iterable[NodeFile], plan: Any, node: Any) -> Machine:
    """Read the files of a DGX OS node."""
    machine = Machine()
    wanted: dict[str, set[str]] = defaultdict(set)
    rules = None
    for file in files:
        name = file.path.removeprefix(SYSTEMD)
        lines = [line for line in _text(file).splitlines() if line and line[0] != "#"]
        if file.path.startswith(SYSTEMD) and ".wants/" in name:
            assert file.kind == "link", file.path
            by, _, unit = name.partition(".wants/")
            wanted[unit].add(by)
        elif file.path.startswith(SYSTEMD) and name.endswith(".d/50-spark.conf"):
            unit = name.partition(".d/")[0].replace("ssh.service", SSHD)
            machine.units[unit] = parse_unit(file.text)
        elif file.path.startswith(SYSTEMD):
            machine.units[name] = parse_unit(file.text)
        elif found := re.fullmatch(r"/etc/systemd/network/05-spark-(.+)", file.path):
            machine.rails[found[1]] = sections("\n".join(lines))
        elif file.path == "/etc/NetworkManager/conf.d/50-spark.conf":
            machine.unmanaged = set(lines[1].partition("+=")[2].split(";"))
        elif file.path == "/etc/sysctl.d/60-spark.conf":
            pairs = (line.split(" = ") for line in lines)
            machine.sysctl = {key.replace("/", "."): value for key, value in pairs}
        elif file.path == "/etc/modules-load.d/spark.conf":
            machine.modules = set(lines)
        elif file.path == "/etc/exports.d/spark.exports":
            machine.exports = _exports(lines)
        elif file.path == "/etc/nfs.conf.d/spark.conf":
            conf = configparser.ConfigParser()
            conf.read_string("\n".join(lines))
            machine.nfs = {
                f"{s}.{k}": _value(v) for s in conf.sections() for k, v in conf[s].items()
            }
        elif file.path == "/etc/tmpfiles.d/spark.conf":
            machine.tmpfiles = {tuple(shlex.split(line)[:5]) for line in lines}
        elif file.path.startswith("/etc/udev/rules.d/"):
            machine.udev = set(lines)
        elif file.path.startswith("/etc/security/limits.d/"):
            machine.limits = {tuple(line.split()) for line in lines}
        elif file.path.startswith("/etc/sysusers.d/"):
            machine.users = {line.split()[1] for line in lines if line.startswith("u ")}
        elif file.path == "/usr/local/sbin/spark-node":
            machine.programs.add("spark-node")
        elif file.path == "/etc/spark/plan.json":
            machine.plan = common_plan(json.loads(file.text))
        elif file.path == "/etc/spark/firewall.nft":
            rules = lines
        else:
            raise AssertionError(f"a file that no NixOS value was compared with: {file.path}")
    for name, by in wanted.items():
        lists = machine.units.setdefault(name, _empty())["lists"]
        assert set(lists.get("WantedBy", [])) in (set(), by), f"{name}: [Install] and links differ"
        lists["WantedBy"] = sorted(by)
    machine.units = {name: _meaning(unit) for name, unit in machine.units.items()}
    ports = cluster_ports(plan, node)
    machine.accepts = {s: ports - _refused(rules or [], s, ports) for s in sources(node)}
    return machine


def _text(file: NodeFile) -> str:
    return "" if file.path == "/usr/local/sbin/spark-node" else file.text


def _exports(lines: Iterable[str]) -> dict[str, dict[str, set[str]]]:
    result: dict[str, dict[str, set[str]]] = {}
    for line in lines:
        path, *clients = shlex.split(line)
        result[path] = {
            c.partition("(")[0]: set(c[:-1].partition("(")[2].split(",")) for c in clients
        }
    return result


def _refused(rules: list[str], source: Source, ports: set[int]) -> set[int]:
    """Return the ports that the table refuses to a source; its first verdict counts."""
    refused: set[int] = set()
    for rule in (line.strip() for line in rules):
        values = set(re.findall(r'[^\s{},"]+', rule.partition("{")[2].partition("}")[0]))
        if rule.startswith("iifname") and rule.endswith("accept"):
            if source[0] == "interface" and source[1] in values:
                return refused
        elif rule.startswith("ip saddr") and rule.endswith("accept"):
            if source[0] == "peer" and source[1] in values:
                return refused
        elif rule.startswith("tcp dport") and rule.endswith("drop"):
            refused |= ports & {int(value) for value in values}
        else:
            assert re.match(r"(delete )?table inet spark|chain input|type filter|}", rule), rule
    return refused


# -- NixOS -------------------------------------------------------------------------------------


def of_nixos(host: Any, plan: Any, node: Any) -> Machine:
    """Read the values of a NixOS node."""
    added = host["added"]
    machine = Machine(
        sysctl=added["sysctl"],
        modules=set(added["kernelModules"]),
        unmanaged=set(added["unmanaged"]),
        exports=_exports(host["exports"].splitlines()),
        limits={
            (rule["domain"], rule["type"], rule["item"], rule["value"])
            for rule in added["loginLimits"]
        },
        plan=common_plan(host["plan"]),
    )
    for name in ("kernelParams", "fileSystems", "modprobe"):
        assert not added[name], f"{name}: {added[name]}"
    machine.units = _nixos_units(added, node)
    for name, text in host["network"].items():
        machine.rails[name.removeprefix("10-spark-")] = sections(text)
    machine.nfs = {
        f"{section}.{key}": _value(value)
        for section, values in host["nfs"].items()
        for key, value in values.items()
    }
    if host["nfsServer"]:
        machine.nfs["nfsd.threads"] = str(host["nfsThreads"])
    for folder in added["tmpfiles"]["settings"].values():
        for path, kinds in folder["after"].items():
            for rule in kinds.values():
                line = (rule["type"], path, rule["mode"], rule["user"], rule["group"])
                machine.tmpfiles.add(line)
    assert not added["tmpfiles"]["rules"], added["tmpfiles"]["rules"]
    machine.udev = {line for line in added["udev"]["rules"] if "queue/" in line}
    machine.users = set(added["users"]) - set(NIXOS_USERS)
    machine.programs = {"spark-node"} & {_PROGRAMS.get(name) for name in added["packages"]}
    _refuse("packages", set(added["packages"]) - set(_PROGRAMS), NIXOS_PACKAGES)
    etc = {name for name in added["etc"] if not _compared(name)}
    _refuse("files in /etc", etc, NIXOS_ETC)
    _refuse("missing", [*added["gone"].pop("units"), *added["gone"].pop("etc")], NIXOS_GONE)
    assert not any(added["gone"].values()), added["gone"]
    machine.accepts = {s: _accepted(added, s, cluster_ports(plan, node)) for s in sources(node)}
    return machine


_PROGRAMS = {"spark-appliance": "spark-node"}


def _compared(name: str) -> bool:
    """Return whether a file of /etc is made of values that are compared."""
    return name == "spark/plan.json" or name.startswith("systemd/network/10-spark-")


def _nixos_units(added: Any, node: Any) -> dict[str, Unit]:
    ours = {unit["name"] for unit in node["units"]}
    ours |= {name.replace(".mount", ".automount") for name in ours}
    result: dict[str, Unit] = {}
    others = []
    for name, change in added["units"].items():
        before = change["before"]
        text = change["after"]["text"]
        if before is not None:
            text = _new_lines(before["text"], text)
            if "=" not in text:
                continue  # only paths of the store differ
        if name not in ours | TOUCHED:
            others.append(name)
            continue
        unit = parse_unit(text)
        if name in TOUCHED:
            unit["commands"] = {}
            unit["settings"] = {k: v for k, v in unit["settings"].items() if k in _PROTECTED}
        unit["lists"].pop("WantedBy", None)
        wanted = sorted({*change["after"]["wantedBy"], *change["after"]["requiredBy"]})
        if wanted and before is None:
            unit["lists"]["WantedBy"] = wanted
        result[name] = _meaning(unit)
    _refuse("units", others, NIXOS_UNITS)
    return result


_PROTECTED = ("MemoryMin", "OOMScoreAdjust")


def _new_lines(before: str, after: str) -> str:
    """Return the lines that are new, with the headings of sections."""
    old = set(before.splitlines())
    return "\n".join(
        line
        for line in after.splitlines()
        if line.startswith("[")
        or not (line in old or line.startswith(("X-", "Environment=", "ExecStop=/nix/store")))
    )


def _accepted(added: Any, source: Source, ports: set[int]) -> set[int]:
    if source[0] == "interface" and (
        source[1] == "lo" or source[1] in added["trustedInterfaces"]  # nixpkgs always trusts lo
    ):
        return ports
    for rule in filter(None, added["extraInputRules"].splitlines()):
        found = re.fullmatch(r'ip saddr \{ ([0-9., ]+) \} accept comment ".*"', rule)
        assert found, rule
        if source[0] == "peer" and source[1] in found[1].split(", "):
            return ports
    return ports & set(added["ports"]["tcp"])


# -- both --------------------------------------------------------------------------------------


def _refuse(what: str, names: Iterable[str], allowed: Mapping[str, str]) -> None:
    unknown = [n for n in names if not any(re.fullmatch(pattern, n) for pattern in allowed)]
    assert not unknown, f"{what} on NixOS that DGX OS has nothing for: {sorted(unknown)}"


def _empty() -> Unit:
    return {"lists": {}, "commands": {}, "settings": {}}


def _value(value: Any) -> str | bool:
    text = str(value).lower()
    if not isinstance(value, bool) and text.isdecimal():
        return text
    return {**_YES, **_NO}.get(text, str(value))


def _meaning(unit: Unit) -> Unit:
    """Return a unit without what says the same in other words."""
    commands = {
        key: found
        for key, lines in unit["commands"].items()
        if (found := [words for line in lines if (words := command(line))])
    }
    settings = {}
    for key, values in unit["settings"].items():
        kept = [value for value in values if not re.match(r'"(LOCALE_ARCHIVE|PATH|TZDIR)=', value)]
        if kept and not key.startswith("X-"):
            settings[key] = kept
    lists = {key: names for key, names in unit["lists"].items() if names}
    return {"lists": lists, "commands": commands, "settings": settings}


def command(words: list[str]) -> list[str]:
    """Return a command line as both systems would write it: what runs, wherever it lies.

    What a container's client does with the container itself is no program of the node.
    """
    first = words[0].lstrip("+-")
    prefix = words[0][: len(words[0]) - len(first)]
    name = PurePosixPath(first).name
    if name in RUNTIMES:
        return []
    rest: list[str] = []
    inside = "--container" in words and "exec" in words
    tail = iter(words[1:])
    for word in tail:
        if word == "--":
            program, *arguments = tail
            return [PurePosixPath(program).name, *arguments]
        if word in WITH_VALUE:
            next(tail)
        elif inside and word in WITHIN_CONTAINER:
            if word == "--user":
                next(tail)
        else:
            rest.append(word)
    return [prefix + name, *rest]


def rails(machine: Machine) -> dict[str, dict[str, dict[str, list[str | bool]]]]:
    """Return the networkd files with one spelling of yes and no, empty sections left out."""
    return {
        name: {
            section: {key: [_value(v) for v in values] for key, values in pairs.items()}
            for section, pairs in file.items()
            if pairs
        }
        for name, file in machine.rails.items()
    }
