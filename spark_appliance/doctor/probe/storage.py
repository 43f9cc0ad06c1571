"""Facts about disks, mounts, NFS, the checkpoint and the packed Engram files.

Of the checkpoint only names, sizes and extents are read, and the two small JSON files.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import mmap
import os
import re
import struct
from typing import Any, Mapping

from spark_appliance.doctor.probe.core import Facts, Machine, ProbeError

_FIEMAP = 0xC020660B
"""FS_IOC_FIEMAP: _IOWR('f', 11, struct fiemap of 32 bytes) (linux/fs.h)."""


_JSON_LIMIT = 8 << 20

_PSEUDO = frozenset(
    (
        "autofs",
        "binfmt_misc",
        "bpf",
        "cgroup",
        "cgroup2",
        "configfs",
        "debugfs",
        "devpts",
        "devtmpfs",
        "efivarfs",
        "fusectl",
        "hugetlbfs",
        "mqueue",
        "nsfs",
        "proc",
        "pstore",
        "rpc_pipefs",
        "securityfs",
        "sysfs",
        "tracefs",
    )
)
"""File systems that hold no files of ours."""


def disks(machine: Machine, request: Mapping[str, Any], facts: Facts) -> None:
    """Which file system holds each asked path, and what is free there."""
    facts.put("mounts", _mounts, machine)
    facts.put("nvme", _nvme, machine)
    facts.put("coalescing", _coalescing, machine)
    # last: a dead NFS server hangs it
    facts.put("free", lambda: {path: _free(machine, path) for path in request["paths"]})


def nfs(machine: Machine, request: Mapping[str, Any], facts: Facts) -> None:
    """What this node exports, and whether the asked server answers."""
    facts.put("exports", _exports, machine)
    facts.put("threads", lambda: _nfsd(machine, "threads"))
    facts.put("versions", lambda: _nfsd(machine, "versions"))
    server = request.get("nfs_server")
    if server:
        # RPC null procedure of program nfs, version 4
        facts.put("rpc", lambda: machine.run("rpcinfo", "-T", "tcp", server, "nfs", "4").strip())


def checkpoint(machine: Machine, request: Mapping[str, Any], facts: Facts) -> None:
    """The checkpoint as this node sees it, through its mount where it has one."""
    base = request["checkpoint"]
    facts.put("directory", lambda: machine.exists(base))
    facts.put("config", _config, machine, base)
    names = facts.put("files", lambda: _sizes(machine, base))
    facts.put("index", _index, machine, base)
    facts.put("extents", _extents, machine, base, list(names or ()))


def files(machine: Machine, request: Mapping[str, Any], facts: Facts) -> None:
    """Size and SHA-256 of each asked file; null where there is none."""
    for path in request["hashes"]:
        facts.put(path, _hash, machine, path)


def engram(machine: Machine, request: Mapping[str, Any], facts: Facts) -> None:
    """The packed files: sizes, header pages, receipts; and whether direct reads work."""
    place = request.get("engram")
    if not place:
        return
    base = place["directory"]
    facts.put("directory", lambda: machine.exists(base))
    if place["device"]:
        facts.put("device", _device, machine, place["device"])
    present = facts.put("present", lambda: _all_sizes(machine, base)) or {}
    facts.put(
        "headers", lambda: {n: _header(machine, f"{base}/{n}") for n in _wanted(place, present)}
    )
    facts.put(
        "receipts", lambda: {n: _receipt(machine, f"{base}/{n}") for n in _wanted(place, present)}
    )
    facts.put("direct", _direct, machine, base, _wanted(place, present))


def _wanted(place: Mapping[str, Any], present: Mapping[str, int]) -> list[str]:
    return [name for name in place["files"] if name in present]


def _mounts(machine: Machine) -> list[dict[str, Any]]:
    mounts = []
    for line in machine.text("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if len(fields) < 6 or len(tail) < 3 or tail[0] in _PSEUDO:
            continue
        options = [*fields[5].split(","), *tail[2].split(",")]
        mounts.append(
            {
                "where": _unescape(fields[4]),
                "what": _unescape(tail[1]),
                "type": tail[0],
                "device": fields[2],
                "options": sorted(set(options)),
            }
        )
    return mounts


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def _free(machine: Machine, path: str) -> dict[str, Any]:
    """Return the space of the file system that holds a path or its nearest parent."""
    nearest = path
    while not machine.exists(nearest) and nearest != "/":
        nearest = os.path.dirname(nearest)
    space = os.statvfs(machine.path(nearest))
    return {
        "nearest": nearest,
        "total": space.f_blocks * space.f_frsize,
        "free": space.f_bavail * space.f_frsize,
    }


def _nvme(machine: Machine) -> dict[str, dict[str, Any]]:
    found = {}
    for name in machine.listing("/sys/block"):
        if not re.match(r"nvme\d+n\d+$", name):
            continue
        base = f"/sys/block/{name}"
        queue = {
            key: machine.maybe(f"{base}/queue/{key}")
            for key in ("read_ahead_kb", "max_sectors_kb", "logical_block_size", "scheduler")
        }
        found[name] = {
            "model": machine.maybe(f"{base}/device/model"),
            "firmware": machine.maybe(f"{base}/device/firmware_rev"),
            "device": machine.maybe(f"{base}/dev"),
            "sectors": machine.maybe(f"{base}/size"),
            **queue,
        }
    return found


def _coalescing(machine: Machine) -> dict[str, str]:
    if not machine.has("nvme"):
        raise ProbeError("nvme-cli is not installed")
    controllers = [n for n in machine.listing("/dev") if re.match(r"nvme\d+$", n)]
    return {
        name: machine.run("nvme", "get-feature", f"/dev/{name}", "-f", "8").strip()
        for name in controllers
    }


def _exports(machine: Machine) -> list[dict[str, Any]]:
    """Return the table that the kernel's server works from, one entry a client."""
    exports = []
    for line in (machine.maybe("/var/lib/nfs/etab") or "").splitlines():
        path, _, clients = line.partition("\t")
        match = re.match(r"(\S+)\(([^)]*)\)$", clients.strip())
        if match:
            exports.append(
                {
                    "path": _unescape(path),
                    "client": match.group(1),
                    "options": match.group(2).split(","),
                }
            )
    return exports


def _nfsd(machine: Machine, name: str) -> str | None:
    # empty unless the server runs; mounting it would be a change
    return machine.maybe(f"/proc/fs/nfsd/{name}")


def _config(machine: Machine, base: str) -> dict[str, Any]:
    raw = machine.read(f"{base}/config.json")
    document = json.loads(raw)
    return {
        "sha256": hashlib.sha256(raw).hexdigest(),
        "architectures": document.get("architectures"),
        "model_type": document.get("model_type"),
    }


def _sizes(machine: Machine, base: str) -> dict[str, int]:
    return {n: s for n, s in _all_sizes(machine, base).items() if n.endswith(".safetensors")}


def _all_sizes(machine: Machine, base: str) -> dict[str, int]:
    sizes = {}
    for name in machine.listing(base):
        try:
            sizes[name] = os.stat(machine.path(f"{base}/{name}")).st_size
        except OSError as error:
            raise ProbeError(f"{base}/{name}: {error.strerror}") from None
    return sizes


def _index(machine: Machine, base: str) -> dict[str, Any]:
    raw = machine.read(f"{base}/model.safetensors.index.json", 64 << 20)
    document = json.loads(raw)
    return {
        "sha256": hashlib.sha256(raw).hexdigest(),
        "total_size": document["metadata"]["total_size"],
        "shards": sorted(set(document["weight_map"].values())),
        "tensors": len(document["weight_map"]),
    }


def _extents(machine: Machine, base: str, names: list[str]) -> dict[str, int]:
    counts = {}
    for name in names:
        # struct fiemap: start, length, flags, mapped extents, room for extents (0: only count)
        ask = struct.pack("=QQIIII", 0, (1 << 64) - 1, 0, 0, 0, 0)
        try:
            handle = os.open(machine.path(f"{base}/{name}"), os.O_RDONLY)
            try:
                told = fcntl.ioctl(handle, _FIEMAP, ask)
            finally:
                os.close(handle)
        except OSError as error:
            raise ProbeError(f"{name}: {error.strerror}") from None
        counts[name] = struct.unpack("=QQIIII", told)[3]
    return counts


def _hash(machine: Machine, path: str) -> dict[str, Any] | None:
    if not machine.exists(path):
        return None
    digest = hashlib.sha256()
    size = 0
    markers = {"ring": b"NCCL_SWITCHLESS_RING_ONLY"}
    found = dict.fromkeys(markers, False)
    tail = b""
    with open(machine.path(path), "rb") as file:
        while True:
            block = file.read(1 << 20)
            if not block:
                break
            digest.update(block)
            size += len(block)
            for name, marker in markers.items():
                found[name] = found[name] or marker in tail + block
            tail = block[-64:]
    told = {"sha256": digest.hexdigest(), "bytes": size, "markers": found}
    if path.endswith(".json") and size <= _JSON_LIMIT:
        told["canonical_sha256"] = _canonical(machine.read(path))
    return told


def _canonical(raw: bytes) -> str:
    """Return the hash of the content, whoever wrote it and with whatever white space."""
    text = json.dumps(json.loads(raw), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _device(machine: Machine, path: str) -> dict[str, Any]:
    real = os.path.realpath(machine.path(path))
    info = os.stat(real)
    return {
        "real": real[len(machine.root) :],
        "device": f"{os.major(info.st_rdev)}:{os.minor(info.st_rdev)}",
    }


def _header(machine: Machine, path: str) -> str:
    return base64.b64encode(machine.read(path, 4096)).decode()


def _receipt(machine: Machine, path: str) -> dict[str, Any] | None:
    text = machine.maybe(f"{path}.receipt.json")
    if text is None:
        return None
    document = json.loads(text)
    # the list of segments is long and says nothing without reading the file
    return {k: v for k, v in document.items() if k not in ("segments", "source", "column_bounds")}


def _direct(machine: Machine, base: str, names: list[str]) -> str:
    if not names:
        return "nothing to read"
    try:
        handle = os.open(machine.path(f"{base}/{names[0]}"), os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        return f"open: {error.strerror}"
    try:
        with mmap.mmap(-1, 4096) as page:
            return "ok" if os.preadv(handle, [page], 0) == 4096 else "short read"
    except OSError as error:
        return f"read: {error.strerror}"
    finally:
        os.close(handle)
