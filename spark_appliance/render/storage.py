"""Where the checkpoint and the packed Engram rows live on each node."""

from __future__ import annotations

from typing import Final, Literal

from spark_appliance.engram import shards
from spark_appliance.model.cluster import Cluster
from spark_appliance.model.facts import GIB, ModelFacts
from spark_appliance.model.plan import (
    EngramFile,
    EngramPlan,
    ExportPlan,
    MountPlan,
    WeightsPlan,
)
from spark_appliance.render.rules import NFS_RDMA_PORT
from spark_appliance.topology.addressing import Fabric

ENGRAM_MOUNT: Final = "/var/lib/spark/engram"
"""Where an Engram block device is mounted."""

NFS_THREADS: Final = 32
"""Eight, the usual default, starve three loading ranks (NestuFNG, ring notes)."""

_EXPORT_OPTIONS: Final = ["ro", "sync", "no_subtree_check", "root_squash", "fsid=0"]

_MOUNT_OPTIONS: Final = [
    "ro",
    "vers=4.2",
    "rsize=1048576",
    "wsize=1048576",
    "hard",
    "timeo=600",
    "noatime",
    "_netdev",
    "nofail",
]
"""MiaAI-Lab's worker mount; ``nofail`` so that a boot does not hang while the head is down."""


def weights_mode(cluster: Cluster) -> Literal["nfs", "local"]:
    """Return how workers get the checkpoint when the file does not say.

    A ring has no cable from the head to the opposite node, and eight readers of one head are
    slower than local copies (knapcio TP8 notes).
    """
    if cluster.weights.mode is not None:
        return cluster.weights.mode
    if len(cluster.nodes) in (1, 8) or cluster.topology.kind == "ring":
        return "local"
    return "nfs"


def weights_plan(cluster: Cluster, fabric: Fabric, rank: int) -> WeightsPlan:
    """Return export (head) or mount (worker); the export allows exactly the workers' rails."""
    if weights_mode(cluster) == "local":
        return WeightsPlan(mode="local", export=None, mount=None)
    if rank == 0:
        clients = sorted({peer.address for rail in fabric.of(0) for peer in rail.peers}, key=int)
        export = ExportPlan(
            path=cluster.model.path,
            clients=[str(address) for address in clients],
            options=_EXPORT_OPTIONS,
            threads=NFS_THREADS,
            rdma=cluster.weights.rdma,
        )
        return WeightsPlan(mode="nfs", export=export, mount=None)
    rail = fabric.between(rank, 0)[0]
    server = next(peer.address for peer in rail.peers if peer.rank == 0)
    transport = (
        ["proto=rdma", f"port={NFS_RDMA_PORT}"]
        if cluster.weights.rdma
        else ["proto=tcp", "nconnect=8"]
    )
    mount = MountPlan(
        unit=f"{escape_path(cluster.model.path)}.mount",
        what=f"{server}:/",
        where=cluster.model.path,
        type="nfs4",
        options=[*_MOUNT_OPTIONS, *transport],
    )
    return WeightsPlan(mode="nfs", export=None, mount=mount)


def engram_directory(cluster: Cluster, rank: int) -> str | None:
    """Return the directory of a node's packed files, None when it has no place."""
    place = cluster.nodes[rank].engram
    if place is None:
        return None
    return place.directory if place.directory is not None else ENGRAM_MOUNT


def engram_plan(
    cluster: Cluster, facts: ModelFacts, rank: int, cache_gib: float
) -> EngramPlan | None:
    """Return the packed files of a node with their exact sizes."""
    directory = engram_directory(cluster, rank)
    place = cluster.nodes[rank].engram
    if facts.engram is None or directory is None or place is None:
        return None
    tp = len(cluster.nodes)
    files = [
        EngramFile(
            name=shard.name,
            layer=shard.layer,
            layout=shard.layout,
            row_start=shard.row_start,
            row_end=shard.row_end,
            bytes=shard.bytes,
        )
        for shard in shards(facts.engram, rank, tp)
    ]
    pack = ["spark-engram", "pack", "--checkpoint", cluster.model.path, "--output", directory]
    pack += ["--tp", str(tp), "--rank", str(rank), "--layout", files[0].layout]
    if cluster.model.revision is not None:
        pack += ["--revision", cluster.model.revision]
    return EngramPlan(
        directory=directory,
        device=place.device,
        mount_unit=f"{escape_path(directory)}.mount" if place.device is not None else None,
        files=files,
        bytes=sum(file.bytes for file in files),
        cache_bytes=round(cache_gib * GIB),
        pack_argv=pack,
    )


def escape_path(path: str) -> str:
    """Return a path as systemd writes it in unit names (systemd.unit(5), systemd-escape -p)."""
    trimmed = "/".join(part for part in path.split("/") if part)
    if not trimmed:
        return "-"
    text = ""
    for position, byte in enumerate(trimmed.encode()):
        character = chr(byte)
        if character == "/":
            text += "-"
        elif character.isascii() and (
            character.isalnum() or character in ":_" or (character == "." and position)
        ):
            text += character
        else:
            text += f"\\x{byte:02x}"
    return text
