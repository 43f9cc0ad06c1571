"""The cluster file, version 1, as pydantic models: what a person writes.

Only shapes and single values are checked here. What takes two values to judge (cables, subnets,
memory) is judged by the rules in ``topology``, ``parallel`` and ``memory``.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from spark_appliance.model.findings import Finding, Path

TopologyKind = Literal["single", "pair", "triangle", "switch", "ring"]
System = Literal["nixos", "dgx-os"]
CageName = Literal["p0", "p1"]
Scalar = str | int | float | bool
"""A value of ``engine.args``: true gives the bare flag, false leaves it out."""


def _absolute(value: str) -> str:
    """Accept a simple absolute path: what systemd, NFS and a shell all take without quoting."""
    if not re.fullmatch(r"(/[A-Za-z0-9._+@~,=-]+)+", value):
        raise ValueError(
            "must be an absolute path of letters, digits and ._+@~,=- without a slash at the end"
        )
    if {".", ".."} & set(value.split("/")):
        raise ValueError("must not contain the parts '.' and '..'")
    return value


def _directory(value: str) -> str:
    _absolute(value)
    top = value.split("/")[1]
    if value.count("/") < 2 or top in _SYSTEM_DIRECTORIES:
        raise ValueError("must be a directory of its own, not one of the system")
    return value


def _device(value: str) -> str:
    if not re.fullmatch(r"/dev(/[A-Za-z0-9._:+@~,=-]+)+", value) or "/../" in value:
        raise ValueError("must be a device below /dev")
    return value


def _no_control(value: str) -> str:
    if any(ord(character) < 0x20 or ord(character) == 0x7F for character in value):
        raise ValueError("must not contain control characters")
    return value


def _network(value: str) -> str:
    return str(ipaddress.IPv4Network(value))


def _interface_address(value: str) -> str:
    if "/" not in value:
        raise ValueError("needs a prefix length, for example 192.168.0.1/24")
    return str(ipaddress.IPv4Interface(value))


def _ipv4(value: str) -> str:
    return str(ipaddress.IPv4Address(value))


def is_ipv4(text: str) -> bool:
    """Tell whether a management address is an IPv4 address and not a host name."""
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def _host(value: str) -> str:
    """Accept an IPv4 address or a host name (RFC 1123), as OpenSSH and torch resolve it."""
    if re.fullmatch(r"[0-9.]+", value):
        return _ipv4(value)
    label = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
    if len(value) > 253 or not re.fullmatch(rf"{label}(\.{label})*", value):
        raise ValueError("must be an IPv4 address or a host name")
    return value


def _mac(value: str) -> str:
    if not re.fullmatch(r"[0-9A-Fa-f]{2}([:-][0-9A-Fa-f]{2}){5}", value):
        raise ValueError("must be a MAC address such as 4c:bb:47:00:00:01, in quotes")
    mac = value.lower().replace("-", ":")
    if mac in ("00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff"):
        raise ValueError("is no machine's MAC address; take it from the node's ip link")
    return mac


def _serial(value: str) -> str:
    # what firmware without a number says (node/identity.py)
    if value.lower() in ("0", "none"):
        raise ValueError(
            "is what a machine without a serial number says; leave it out and give mac instead"
        )
    return value


_SYSTEM_DIRECTORIES = frozenset(
    [
        "bin",
        "boot",
        "dev",
        "etc",
        "lib",
        "lib64",
        "proc",
        "root",
        "run",
        "sbin",
        "sys",
        "usr",
    ]
)

DevicePath = Annotated[str, Field(max_length=4096), AfterValidator(_device)]
Directory = Annotated[str, Field(max_length=4096), AfterValidator(_directory)]
AbsolutePath = Annotated[
    str,
    Field(min_length=2, max_length=4096),
    AfterValidator(_no_control),
    AfterValidator(_absolute),
]
Host = Annotated[str, Field(min_length=1), AfterValidator(_host)]
Ipv4 = Annotated[str, AfterValidator(_ipv4)]
Ipv4Network = Annotated[str, AfterValidator(_network)]
Ipv4Interface = Annotated[str, AfterValidator(_interface_address)]
MacAddress = Annotated[str, AfterValidator(_mac)]
Netdev = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,14}$")]
NodeName = Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$")]
Port = Annotated[int, Field(ge=1, le=65535)]
FlagName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
EnvName = Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")]
EnvValue = Annotated[str, AfterValidator(_no_control)]
CageRef = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*\.p[01]$")]
CablePeer = Annotated[str, Field(pattern=r"^([a-z][a-z0-9-]*\.p[01]|switch)$")]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSpec(_Model):
    """The checkpoint and the name under which it is served."""

    path: Directory = Field(
        "/models/DeepSeek-V4.1-Flash",
        description="Directory of the checkpoint on every node (mounted there on workers).",
    )
    id: str = Field(
        "deepseek-ai/DeepSeek-V4.1-Flash",
        pattern=r"^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+$",
        description="Hugging Face repository of the checkpoint.",
    )
    revision: str | None = Field(
        None,
        pattern=r"^[0-9a-f]{7,64}$",
        description="Commit of the checkpoint; quote it, a number-like hash is else a number.",
    )
    shards: Annotated[int, Field(ge=1, le=9999)] = Field(
        48, description="How many .safetensors files the checkpoint has; doctor counts them."
    )
    served_name: str = Field(
        "deepseek-v4.1-flash",
        pattern=r"^[A-Za-z0-9._/-]+$",
        description="Model name that clients send.",
    )


class Topology(_Model):
    """How the Sparks are cabled and addressed."""

    kind: TopologyKind = Field(
        description="single (1), pair (2), triangle (3), switch (2-8), ring (4)."
    )
    prefix: Ipv4Network = Field(
        "10.77.0.0/16",
        description="A /16 from which every rail gets its own /24 when nodes give no addresses.",
    )
    mtu: Annotated[int, Field(ge=1280, le=9978)] = Field(
        9000,
        description="MTU of every rail; RDMA uses 4096-byte packets from 4200 up.",
    )
    cables: dict[CageRef, CablePeer] | None = Field(
        None,
        description="Cage to cage (spark1.p0: spark2.p1) or cage to 'switch'; the customary "
        "cabling of the topology when absent. Giving a cable from both ends is allowed.",
    )
    nccl_library: AbsolutePath | None = Field(
        None,
        description="ring only: libnccl.so.2 built with switchless-ring support, same file on "
        "every node; stock NCCL cannot start on a ring of four.",
    )
    nccl_library_sha256: str | None = Field(
        None, pattern=r"^[0-9a-f]{64}$", description="ring only: sha256 of nccl_library."
    )


class EngramPlace(_Model):
    """Where a node keeps its packed Engram rows: exactly one of the two."""

    device: DevicePath | None = Field(
        None,
        description="Block device by stable id (/dev/disk/by-id/...) with an ext4 or xfs file "
        "system, mounted at /var/lib/spark/engram. It is never formatted unless you ask the node's "
        "adapter for it, and then only when it is empty.",
    )
    directory: Directory | None = Field(
        None, description="Directory on a local ext4 or xfs file system that allows O_DIRECT."
    )


class EngineOverrides(_Model):
    """Free arguments and variables for SGLang; precedence: profile < cluster < node."""

    args: dict[FlagName, Scalar | None] = Field(
        default_factory=dict,
        description="SGLang flags without '--'. true: bare flag; false or null: flag left out.",
    )
    env: dict[EnvName, EnvValue | None] = Field(
        default_factory=dict,
        description="Environment variables of the engine; null: variable left out.",
    )


class Node(_Model):
    """One Spark. The order of nodes is the rank order; the first is the head."""

    name: NodeName = Field(description="Short host name; also the name in the plan.")
    address: Host = Field(
        description="Management (LAN) address or host name, used for SSH and rendezvous."
    )
    system: System = Field("dgx-os", description="nixos or dgx-os.")
    ssh: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@:%-]*$",
        description="OpenSSH destination (user@host, an alias of ssh_config); address when absent.",
    )
    lan_interface: Netdev = Field(
        "enP7s7",
        description="Netdev of the management network: bootstrap traffic of NCCL and Gloo.",
    )
    serial: Annotated[str, AfterValidator(_serial)] | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="Serial number of the machine (/sys/class/dmi/id/product_serial), by which a "
        "disk image for all nodes finds out which node it booted on.",
    )
    mac: MacAddress | None = Field(
        None,
        description="MAC address of a network port of the machine, for the same purpose.",
    )
    engram: EngramPlace | None = Field(
        None,
        description="Local NVMe place for packed Engram rows; needed when the model has Engram.",
    )
    addresses: dict[Netdev, Ipv4Interface] | None = Field(
        None, description="Explicit rail addresses by netdev; then every node must give them."
    )
    engine: EngineOverrides = Field(
        default_factory=EngineOverrides, description="Overrides for this node only."
    )


class Api(_Model):
    """The OpenAI-compatible endpoint on the head."""

    bind: Ipv4 = Field("0.0.0.0", description="Address that the head listens on.")  # noqa: S104
    port: Port = Field(8888, description="TCP port of the endpoint.")
    key_file: AbsolutePath | None = Field(
        None,
        description="File on the head that holds the API key. Only its path enters the plan.",
    )


class Ports(_Model):
    """Ports between nodes."""

    rendezvous: Port = Field(20000, description="torch.distributed rendezvous on the head.")
    supervisor: Port = Field(20010, description="Start and stop signals between the ranks' units.")


class Weights(_Model):
    """How workers get the checkpoint."""

    mode: Literal["nfs", "local"] | None = Field(
        None,
        description="nfs: the head exports, workers mount over the rails. local: every node has "
        "its own copy. Default: local for a ring, for eight nodes and for one; nfs otherwise.",
    )
    rdma: bool = Field(False, description="NFS over RDMA (port 20049) instead of TCP.")


class Image(_Model):
    """The engine's container image on DGX OS nodes.

    Only a digest says which image runs: a tag may mean another one tomorrow.
    """

    reference: str | None = Field(
        None,
        pattern=r"^[a-z0-9]([a-z0-9._-]*[a-z0-9])?(:[0-9]{1,5})?(/[a-z0-9]([a-z0-9._-]*[a-z0-9])?)*"
        r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$",
        max_length=255,
        description="Registry name of the image, for example registry.lan:5000/spark-engine; a "
        "tag is allowed but the digest decides. Without it the digest is the ID of an image that "
        "was loaded on every node (docker load).",
    )
    digest: str = Field(
        pattern=r"^sha256:[0-9a-f]{64}$",
        description="Digest of the manifest for linux/arm64, or the image ID without a reference.",
    )
    runtime: Literal["docker", "podman"] = Field(
        "docker", description="Container runtime of the nodes; DGX OS brings docker."
    )


class Replica(_Model):
    """The endpoint of another cluster that serves the same model."""

    name: NodeName = Field(description="Name of the other cluster.")
    url: str = Field(
        pattern=r"^http://[A-Za-z0-9.-]+(:[0-9]{1,5})?$",
        description="Its base URL without /v1, for example http://192.168.1.21:8888.",
    )


class Router(_Model):
    """One address for several clusters: sglang-router on this cluster's head.

    This cluster's own endpoint is always the first replica. All replicas must have the same API
    key, which is also that of the router.
    """

    bind: Ipv4 = Field("0.0.0.0", description="Address that the router listens on.")  # noqa: S104
    port: Port = Field(8000, description="TCP port of the router.")
    policy: Literal["cache_aware", "round_robin", "power_of_two", "random"] = Field(
        "cache_aware",
        description="cache_aware sends a prompt to the replica that has its beginning cached.",
    )
    replicas: Annotated[list[Replica], Field(min_length=1, max_length=32)] = Field(
        description="The other clusters."
    )


class Cluster(_Model):
    """A cluster file, ``version: 1``."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, title="spark-appliance cluster file, version 1"
    )

    version: Literal[1] = Field(description="Version of this file format.")
    name: NodeName = Field(description="Name of the cluster.")
    profile: str = Field(
        min_length=1,
        description="Name of a bundled profile, or path (with a '/') of a profile file.",
    )
    model: ModelSpec = Field(default_factory=ModelSpec, description="The checkpoint.")
    topology: Topology = Field(description="Cabling and addressing.")
    management_network: Ipv4Network | None = Field(
        None,
        description="Network of the management addresses; rails must not overlap it. Needed for "
        "that check when nodes are given by host name.",
    )
    nodes: Annotated[list[Node], Field(min_length=1, max_length=8)] = Field(
        description="The Sparks in rank order."
    )
    weights: Weights = Field(default_factory=Weights, description="Checkpoint distribution.")
    api: Api = Field(default_factory=Api, description="The endpoint.")
    ports: Ports = Field(
        default_factory=Ports, description="TCP ports that nodes use among themselves."
    )
    router: Router | None = Field(
        None, description="Serve several clusters under one address from this head."
    )
    image: Image | None = Field(
        None, description="Engine image of DGX OS nodes; NixOS nodes do not use it."
    )
    engine: EngineOverrides = Field(
        default_factory=EngineOverrides, description="Overrides for every node."
    )


def read_cluster(data: Any) -> tuple[Cluster | None, list[Finding]]:
    """Validate plain data against the schema.

    Returns the cluster and no findings, or None and one finding for each thing that is wrong.
    """
    if not isinstance(data, dict):
        return None, [
            Finding(
                "schema.type", (), "the file must be a mapping of keys", "start with 'version: 1'"
            )
        ]
    try:
        return Cluster.model_validate(data), []
    except ValidationError as error:
        from spark_appliance.model.schema_errors import findings_of  # only on failure

        return None, findings_of(error, Cluster)


def node_path(index: int, *rest: str | int) -> Path:
    """Return the path of a key of the node at ``index``."""
    return ("nodes", index, *rest)
