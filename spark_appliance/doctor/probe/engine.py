"""Facts about the engine: units, containers, and the installed packages, read without starting it.

Files are found below the prefix that the unit names, below the layers of its image, or below the
root of the running process.
"""

from __future__ import annotations

import glob
import hashlib
import json
import mmap
import os
import re
import struct
from typing import Any, Mapping

from spark_appliance.doctor.probe.core import Facts, Machine, ProbeError

_SITES = (
    "lib/python3*/site-packages",
    "usr/local/lib/python3*/site-packages",
    "usr/local/lib/python3*/dist-packages",
    "usr/lib/python3*/dist-packages",
    "opt/*/lib/python3*/site-packages",
    "nix/store/*/lib/python3*/site-packages",
)
_NCCL_VERSION = re.compile(rb"NCCL version (\d+\.\d+\.\d+)")
_IMAGE = re.compile(
    r"(?<![\w./:@-])((?:[\w.-]+(?::\d+)?(?:/[\w.-]+)*(?::[\w.-]+)?@)?sha256:[0-9a-f]{64})\b"
)
"""An image by its digest, or, where it was loaded from a file, by its id alone."""


def containers(machine: Machine, request: Mapping[str, Any], facts: Facts) -> None:
    """Images, running containers and NFS volumes; asks no daemon that does not run."""
    del request
    facts.put("docker", lambda: machine.has("docker"))
    facts.put("podman", lambda: machine.has("podman"))
    facts.put(
        "toolkit", lambda: machine.has("nvidia-ctk") or machine.exists("/etc/cdi/nvidia.yaml")
    )
    active = facts.put("docker_active", _docker_active, machine)
    if active:
        facts.put("images", _lines, machine, ("image", "ls", "--digests", "--no-trunc"))
        facts.put("running", _lines, machine, ("ps", "--no-trunc"))
        facts.put("volumes", _volumes, machine)
    facts.put("podman_images", _podman_images, machine)


def engine(machine: Machine, request: Mapping[str, Any], facts: Facts) -> None:
    """The engine's unit, and what is in its environment."""
    unit = facts.put("unit", _unit, machine, request["engine_unit"])
    if not unit or unit.get("LoadState") != "loaded":
        return
    roots = facts.put("roots", _roots, machine, unit)
    sites = _sites(machine, roots or [])
    if not sites:
        for key in ("packages", "nccl", "classes", "architectures"):
            facts.put(key, _unreadable)
        return
    facts.put("sites", lambda: sites)
    facts.put("packages", _packages, machine, sites, request["packages"])
    facts.put("nccl", _nccl, machine, sites)
    facts.put("classes", _classes, machine, sites, request["checkpoint"])
    if unit.get("ActiveState") == "inactive":
        # a scan of large libraries would crowd the page cache of a serving node
        facts.put("architectures", _architectures, machine, sites)


def _unreadable() -> None:
    raise ProbeError("the engine's files cannot be seen without starting it")


def _docker_active(machine: Machine) -> bool:
    if not machine.has("docker"):
        return False
    state = machine.run("systemctl", "is-active", "docker.service", check=False)
    return state.strip() == "active"


def _lines(machine: Machine, words: tuple[str, ...]) -> list[dict[str, str]]:
    text = machine.run("docker", *words, "--format", "{{json .}}", timeout=8)
    keep = ("Repository", "Tag", "Digest", "ID", "Names", "Image", "State", "Size", "Status")
    return [
        {key: value for key, value in json.loads(line).items() if key in keep}
        for line in text.splitlines()
        if line.strip()
    ]


def _volumes(machine: Machine) -> list[dict[str, str]]:
    """Return NFS volumes only: the options of others may hold passwords."""
    names = machine.run("docker", "volume", "ls", "-q").split()
    if not names:
        return []
    found = []
    text = machine.run("docker", "volume", "inspect", "--format", "{{json .}}", *names)
    for line in text.splitlines():
        volume = json.loads(line)
        options = volume.get("Options") or {}
        if str(options.get("type", "")).startswith("nfs"):
            found.append(
                {
                    "name": volume.get("Name"),
                    "device": options.get("device"),
                    "options": options.get("o"),
                }
            )
    return found


def _podman_images(machine: Machine) -> list[dict[str, Any]]:
    # podman itself writes locks; its table of images does for the digests
    path = "/var/lib/containers/storage/overlay-images/images.json"
    if not machine.exists(path):
        return []
    return [
        {
            "id": image.get("id"),
            "digest": image.get("digest"),
            "digests": list(image.get("big-data-digests", {}).values()),
            "names": image.get("names"),
        }
        for image in json.loads(machine.text(path))
    ]


def _unit(machine: Machine, name: str) -> dict[str, Any]:
    properties = "LoadState,ActiveState,ExecStart,LimitMEMLOCK,MainPID,UnitFileState"
    text = machine.run("systemctl", "show", f"--property={properties}", "--", name)
    unit: dict[str, Any] = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    match = _IMAGE.search(unit.get("ExecStart", ""))
    unit["image"] = match.group(1) if match else None
    return unit


def _roots(machine: Machine, unit: Mapping[str, Any]) -> list[str]:
    """Return directories below which the engine's Python may lie."""
    roots = []
    pid = str(unit.get("MainPID", "0"))
    if pid.isdigit() and pid != "0" and unit.get("image") is None:
        roots.append(f"/proc/{pid}/root")
    for prefix in re.findall(r"(/\S+)/bin/python3[\w.]*", str(unit.get("ExecStart", ""))):
        roots.append(prefix)
        real = os.path.realpath(machine.path(f"{prefix}/bin/python3"))[len(machine.root) :]
        roots.append(os.path.dirname(os.path.dirname(real)))
    if unit.get("image") is not None:
        roots += _layers(machine, str(unit["image"]))
    return [root for root in dict.fromkeys(roots) if machine.exists(root)]


def _layers(machine: Machine, image: str) -> list[str]:
    if not _docker_active(machine):
        return []
    text = machine.run("docker", "image", "inspect", "--format", "{{json .GraphDriver}}", image)
    data = (json.loads(text) or {}).get("Data") or {}
    layers = [data.get("UpperDir", ""), *str(data.get("LowerDir", "")).split(":")]
    return [layer for layer in layers if layer]


def _sites(machine: Machine, roots: list[str]) -> list[str]:
    found = []
    for root in roots:
        for pattern in _SITES:
            for path in sorted(glob.glob(f"{glob.escape(machine.path(root))}/{pattern}")):
                found.append(path[len(machine.root) :])
    return list(dict.fromkeys(found))


def _packages(machine: Machine, sites: list[str], wanted: list[str]) -> dict[str, list[str]]:
    """Return the versions of each wanted distribution; more than one is telling."""
    found: dict[str, list[str]] = {}
    for site in sites:
        for entry in machine.listing(site):
            match = re.match(r"(.+?)-(\d[^-]*)\.dist-info$", entry)
            name = re.sub(r"[-_.]+", "-", match.group(1)).lower() if match else ""
            if match and name in wanted and match.group(2) not in found.get(name, []):
                found.setdefault(name, []).append(match.group(2))
    return found


def _nccl(machine: Machine, sites: list[str]) -> list[dict[str, Any]]:
    found = []
    for site in sites:
        for path in sorted(
            glob.glob(f"{glob.escape(machine.path(site))}/**/libnccl.so.2*", recursive=True)
        ):
            digest, version = hashlib.sha256(), None
            tail = b""
            with open(path, "rb") as file:
                # in pieces: the memory belongs to the model
                for block in iter(lambda: file.read(1 << 20), b""):
                    digest.update(block)
                    version = version or _NCCL_VERSION.search(tail + block)
                    tail = block[-64:]
            found.append(
                {
                    "path": path[len(machine.root) :],
                    "sha256": digest.hexdigest(),
                    "version": version.group(1).decode() if version else None,
                }
            )
    return found


def _classes(machine: Machine, sites: list[str], checkpoint: str) -> dict[str, Any]:
    """Return which architectures of the checkpoint the engine's sources name."""
    config = json.loads(machine.read(f"{checkpoint}/config.json"))
    names = [name for name in config.get("architectures") or [] if isinstance(name, str)]
    known: set[str] = set()
    seen = 0
    for site in sites:
        for folder in ("models", "configs"):
            for path in glob.glob(f"{glob.escape(machine.path(site))}/sglang/srt/{folder}/*.py"):
                with open(path, "rb") as file:
                    text = file.read()
                seen += 1
                known |= {
                    name for name in names if re.search(rb"\b" + name.encode() + rb"\b", text)
                }
    if not seen:
        raise ProbeError("no sources of sglang below the engine's prefix")
    return {"wanted": names, "known": sorted(known)}


def _architectures(machine: Machine, sites: list[str]) -> dict[str, list[int]]:
    """Return the GPU architectures of sgl_kernel's libraries (120 for sm_120)."""
    found = {}
    for site in sites:
        for path in glob.glob(
            f"{glob.escape(machine.path(site))}/sgl_kernel/**/*.so", recursive=True
        ):
            found[path[len(machine.root) + len(site) + 1 :]] = fatbin_architectures(path)
    if not found:
        raise ProbeError("no sgl_kernel below the engine's prefix")
    return found


def fatbin_architectures(path: str) -> list[int]:
    """Return the architectures of all device code in a library.

    A fat binary is a header (magic, u16 version, u16 header size, u64 size) and entries: u16
    kind, u16 version, u32 header size, u64 payload size, ..., u32 architecture at byte 28.
    """
    magic = struct.pack("<I", 0xBA55ED50)
    found: set[int] = set()
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return []
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = data.find(magic)
            while 0 <= at <= len(data) - 16:
                _, _, header, size = struct.unpack_from("<IHHQ", data, at)
                entry, end = at + header, min(at + header + size, len(data))
                while entry + 32 <= end:
                    _, _, entry_header, payload = struct.unpack_from("<HHIQ", data, entry)
                    found.add(struct.unpack_from("<I", data, entry + 28)[0])
                    if entry_header + payload == 0:
                        break
                    entry += entry_header + payload
                at = data.find(magic, at + 16)
    return sorted(found)
