"""The plan, ``cluster.lock.json``: pure data that says everything about every node.

Whoever holds a plan needs nothing else: adapters (NixOS modules, DGX OS files) and commands
translate it and decide nothing. Sizes are bytes, times are seconds.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spark_appliance.model.findings import Finding
from spark_appliance.names import PLAN_VERSION


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(_Model):
    """What the plan was rendered from."""

    cluster_sha256: str = Field(
        description="sha256 of the cluster file's content as canonical JSON, defaults filled in; "
        "comments and the order of keys do not change it."
    )
    cluster_lines_sha256: str | None = Field(
        None,
        description="sha256 of the cluster file's lines without comments and blank lines, which "
        "Nix can compute too: mkFleet compares it. Null for a plan that was made of no file.",
    )
    profile: str = Field(description="Name of the profile.")
    profile_sha256: str = Field(description="sha256 of the profile's content, likewise.")


class Engine(_Model):
    """The engine that the argv is for."""

    package: str = Field(description="Distribution name.")
    version: str = Field(description="Exact version.")
    agreement_sha256: str = Field(
        description="sha256 of the flags, variables and NCCL library that must be the same on "
        "every rank. The supervisors compare it, with all else that the nodes' own plans share."
    )


class Checkpoint(_Model):
    """The model as served."""

    path: str = Field(description="Directory on every node.")
    id: str = Field(description="Hugging Face repository.")
    revision: str | None = Field(description="Commit, when the cluster file pins one.")
    shards: int = Field(description="Number of .safetensors files.")
    served_name: str = Field(description="Name that clients send.")


class CableEnd(_Model):
    """A cage of a node."""

    node: str
    cage: str


class CablePlan(_Model):
    """A cable; ``b`` is null when it goes to the switch."""

    a: CableEnd
    b: CableEnd | None


class TopologyPlan(_Model):
    """Cabling of the whole cluster."""

    kind: str
    mtu: int
    cables: list[CablePlan]


class PaddedDimension(_Model):
    """A size that the padding plugin changes."""

    name: str
    size: int
    padded: int
    per_rank: int


class ParallelPlan(_Model):
    """Sizes of the parallel groups and what is padded for them."""

    tp: int
    ep: int
    padded: list[PaddedDimension]


class ApiPlan(_Model):
    """The endpoint on the head."""

    bind: str
    port: int
    key_file: str | None = Field(description="Path on the head; the key itself is never here.")
    url: str = Field(description="Base URL for clients on the management network.")


class PortsPlan(_Model):
    """TCP ports in use."""

    api: int
    rendezvous: int
    supervisor: int
    nfs: int | None


class ImagePlan(_Model):
    """The engine's image on DGX OS nodes."""

    name: str = Field(description="What is given to the runtime: reference@digest or the ID.")
    reference: str | None = Field(description="Where to pull it from; null: loaded by hand.")
    digest: str
    runtime: Literal["docker", "podman"]


class ReplicaPlan(_Model):
    """One endpoint behind the router."""

    name: str
    url: str = Field(description="Base URL without /v1.")


class RouterPlan(_Model):
    """sglang-router on the head: one address for several clusters."""

    package: str = Field(description="Distribution name.")
    version: str = Field(description="Exact version.")
    url: str = Field(description="Base URL for clients on the management network.")
    port: int
    readiness_url: str = Field(description="Asked on the head; counts healthy replicas, no key.")
    argv: list[str] = Field(description="Arguments of the router; the key is added on the node.")
    replicas: list[ReplicaPlan]


class HealthPlan(_Model):
    """How readiness is judged: not by a status code alone but by a generation."""

    live_url: str = Field(description="Asked on the head itself; 200 while the engine answers.")
    generate_url: str = Field(description="Chat completions endpoint, asked on the head itself.")
    generate_body: dict[str, Any] = Field(description="Request of the probe.")
    expect: str = Field(description="Word that a right answer of the probe contains.")
    interval: int = Field(description="Seconds between probes while starting.")
    steady_interval: int = Field(
        description="Seconds between generations while serving: a wedged engine still answers "
        "its health route."
    )
    probe_timeout: int = Field(description="Seconds for one probe.")
    ready_timeout: int = Field(description="Seconds from start to ready before giving up.")


class RestartPlan(_Model):
    """Ranks live and die together; this bounds how often."""

    limit: int = Field(description="Restarts of the whole group within the window.")
    window: int = Field(description="Seconds.")
    backoff: list[int] = Field(description="Seconds to wait before the 1st, 2nd, ... restart.")


class PeerPlan(_Model):
    """Another node on the same subnet."""

    node: str
    address: str


class RailPlan(_Model):
    """One netdev with its RDMA device."""

    netdev: str
    rdma: str
    pci: str
    cage: str
    twin: int
    address: str = Field(description="IPv4 address with prefix length.")
    mtu: int
    peers: list[PeerPlan]


class NcclLibrary(_Model):
    """A replacement of the engine's libnccl.so.2, the same file on every rank."""

    path: str
    sha256: str | None


class ExportPlan(_Model):
    """NFS export of the checkpoint on the head."""

    path: str
    clients: list[str] = Field(description="Rail addresses allowed to mount, nothing else.")
    options: list[str]
    threads: int
    rdma: bool


class MountPlan(_Model):
    """NFS mount of the checkpoint on a worker."""

    unit: str = Field(description="Name of the systemd mount unit.")
    what: str
    where: str
    type: str
    options: list[str]


class WeightsPlan(_Model):
    """How this node gets the checkpoint."""

    mode: Literal["nfs", "local"]
    export: ExportPlan | None
    mount: MountPlan | None


class EngramFile(_Model):
    """One packed file."""

    name: str
    layer: int
    layout: Literal["columns", "rows"]
    row_start: int
    row_end: int
    bytes: int


class EngramPlan(_Model):
    """Packed Engram rows on this node's NVMe."""

    directory: str
    device: str | None
    mount_unit: str | None
    files: list[EngramFile]
    bytes: int = Field(description="Sum of the files.")
    cache_bytes: int = Field(description="Row cache in host memory.")
    pack_argv: list[str] = Field(description="Command that packs this node's files.")


class MemoryPart(_Model):
    """One row of the memory budget."""

    name: str
    bytes: int


class MemoryPlan(_Model):
    """Memory of the node at its worst moment."""

    total: int
    used: int
    reserve: int
    parts: list[MemoryPart]


class GuardPlan(_Model):
    """Thresholds of the memory guard on MemAvailable."""

    start_bytes: int
    steady_bytes: int
    interval: int = Field(description="Seconds between samples.")


class UnitPlan(_Model):
    """A systemd unit of this node, complete: adapters write it down and decide nothing.

    ``started_by`` says who starts it: ``boot`` (its own life, ``stop`` leaves it up), ``target``
    (spark.target wants it) or ``supervisor`` (spark-supervisor.service, once every rank may
    start).

    Words of command lines may hold placeholders, whole words that the adapter replaces by the
    path on its system: ``@spark-node@`` (this project's node program), ``@python@`` (the engine's
    interpreter), ``@spark-engram@`` (the packer), ``@container-runtime@`` (docker or podman),
    ``@image@`` (engine image by digest), ``@router-python@`` (interpreter with
    sglang_router). The first word may begin with systemd's prefixes
    ``+`` and ``-`` before the placeholder.
    """

    name: str
    description: str
    type: Literal["oneshot", "notify", "exec", "target", "mount", "system"] = Field(
        description="Type= of a service; 'target'; 'mount': the mount is described elsewhere in "
        "the node (weights.mount, engram); 'system': the unit comes with the operating system."
    )
    after: list[str]
    requires: list[str]
    wants: list[str]
    part_of: list[str]
    conflicts: list[str]
    wanted_by: list[str] = Field(description="Units that start it: [Install] WantedBy=.")
    started_by: Literal["boot", "target", "supervisor"]
    exec_start_pre: list[list[str]]
    exec_start: list[str] = Field(description="Empty for units that are no service of ours.")
    exec_stop_post: list[list[str]]
    unit_settings: dict[str, str] = Field(description="Further settings of [Unit].")
    settings: dict[str, str | list[str]] = Field(
        description="Further settings of [Service] as systemd writes them; a list is one line for "
        "each value, an empty string is written as it is (it empties a list)."
    )


class FirewallPlan(_Model):
    """What the node accepts beyond its own rules."""

    trusted_interfaces: list[str]
    api_port: int | None = Field(description="Open to everyone who reaches the bind address.")
    peer_addresses: list[str] = Field(
        description="Management addresses of the other nodes: rendezvous, Gloo and NCCL bootstrap "
        "use ephemeral TCP ports between them."
    )


class NodePlan(_Model):
    """Everything about one node."""

    name: str
    rank: int
    role: Literal["head", "worker"]
    system: Literal["nixos", "dgx-os"]
    address: str
    ssh: str
    lan_interface: str
    lan_address: str | None = Field(
        description="IPv4 address with the prefix length of management_network; null when the "
        "cluster file does not tell both, and the node then has what DHCP gives it."
    )
    serial: str | None = Field(description="DMI serial number of the machine, when given.")
    mac: str | None = Field(description="MAC address of a port of the machine, when given.")
    argv: list[str] = Field(description="The engine's whole command line.")
    env: dict[str, str] = Field(description="The engine's environment; never a secret.")
    config_file: str | None = Field(
        description="YAML file given to the engine by --config; the unit writes the key into it."
    )
    nccl_library: NcclLibrary | None
    rails: list[RailPlan]
    routes: list[str] = Field(description="Extra routes, 'destination via gateway dev netdev'.")
    sysctl: dict[str, str]
    kernel_modules: list[str]
    firewall: FirewallPlan
    weights: WeightsPlan
    engram: EngramPlan | None
    memory: MemoryPlan
    guard: GuardPlan
    limits: dict[str, str] = Field(description="systemd Limit* settings of the engine's unit.")
    cache_directory: str = Field(description="Compiled kernels; kept between starts.")
    units: list[UnitPlan] = Field(description="In start order.")


class Plan(_Model):
    """``cluster.lock.json``."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, title="spark-appliance plan (cluster.lock.json), version 1"
    )

    version: Literal[1] = Field(description="Version of this schema.")
    name: str
    source: Source
    engine: Engine
    model: Checkpoint
    topology: TopologyPlan
    parallel: ParallelPlan
    api: ApiPlan
    ports: PortsPlan
    router: RouterPlan | None = Field(description="Null unless this head routes.")
    image: ImagePlan | None = Field(description="Null until the cluster file names one.")
    health: HealthPlan
    restart: RestartPlan
    start_order: list[list[str]] = Field(description="Groups of nodes; a group starts at once.")
    pack_order: list[list[str]] = Field(
        description="Groups of nodes that pack at once: the head first where workers read from it."
    )
    nodes: list[NodePlan] = Field(description="In rank order.")

    def node(self, name: str) -> NodePlan | None:
        """Return a node by name, or None."""
        return next((node for node in self.nodes if node.name == name), None)


def read_plan(data: Any) -> tuple[Plan | None, list[Finding]]:
    """Validate plain data; returns the plan, or None and what is wrong."""
    if not isinstance(data, dict) or data.get("version") != PLAN_VERSION:
        found = data.get("version") if isinstance(data, dict) else None
        return None, [
            Finding(
                "plan.version",
                ("version",),
                f"this is no plan of version {PLAN_VERSION} (version: {found!r})",
                "render it anew: spark-appliance render cluster.yaml",
            )
        ]
    try:
        return Plan.model_validate(data), []
    except ValidationError as error:
        from spark_appliance.model.schema_errors import findings_of  # only on failure

        return None, findings_of(error, Plan)
