"""Assemble the plan out of its parts, and collect every finding on the way."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final, Literal

from spark_appliance.memory import TOTAL_GIB, Budget, Workload, budget, check_budget
from spark_appliance.model.cluster import Cluster
from spark_appliance.model.facts import GIB, ModelFacts
from spark_appliance.model.findings import Finding, errors
from spark_appliance.model.plan import (
    ApiPlan,
    CableEnd,
    CablePlan,
    Checkpoint,
    Engine,
    HealthPlan,
    ImagePlan,
    MemoryPart,
    MemoryPlan,
    NcclLibrary,
    NodePlan,
    PaddedDimension,
    ParallelPlan,
    PeerPlan,
    Plan,
    PortsPlan,
    RailPlan,
    RestartPlan,
    Source,
    TopologyPlan,
    WeightsPlan,
)
from spark_appliance.names import PLAN_VERSION
from spark_appliance.parallel import Parallelism, judge
from spark_appliance.profiles import LoadedProfile
from spark_appliance.render import host, storage
from spark_appliance.render.agreement import agreement_sha256
from spark_appliance.render.arguments import CONFIG_FILE, arguments, argv, workload
from spark_appliance.render.environment import CACHE_DIRECTORY, environment, generated
from spark_appliance.render.overrides import check_effective, check_overrides
from spark_appliance.render.router import router_plan
from spark_appliance.render.rules import NFS_PORT, check_cluster
from spark_appliance.render.units import LIMITS, Rank, units
from spark_appliance.topology import Fabric, Rail, build_fabric
from spark_appliance.topology.drawing import Drawing, DrawnNode

ENGINE_PACKAGE: Final = ("sglang", "0.5.23")
"""Distribution and exact version."""

READY_TIMEOUT: Final = 3600
"""Seconds until a start is given up: published starts take 3 to 25 minutes, and up to 36 after a
change of topology (field notes of tonyd2wild)."""

PROBE_TIMEOUT: Final = 120
"""Seconds for one probe: a long prefill of another request delays the answer (field notes 6.4)."""

RESTART: Final = RestartPlan(limit=3, window=3600, backoff=[10, 60, 300])


@dataclass(frozen=True, slots=True)
class Rendering:
    """What became of a cluster: the plan when nothing stops it, the budgets, all findings.

    ``budgets`` are by rank and are there whenever they could be computed, also for a plan that
    does not fit; so is ``drawing``, when the cabling is right.
    """

    plan: Plan | None
    budgets: tuple[Budget, ...]
    findings: tuple[Finding, ...]
    drawing: Drawing | None


def render(cluster: Cluster, loaded: LoadedProfile) -> Rendering:
    """Render a validated cluster with its profile."""
    profile, facts = loaded.profile, loaded.facts
    count = len(cluster.nodes)
    findings = [*check_cluster(cluster, profile, facts), *check_overrides(cluster, profile)]
    fabric, topology_findings = build_fabric(cluster)
    findings += topology_findings
    drawing = None if fabric is None or errors(topology_findings) else _drawing(cluster, fabric)
    args = arguments(profile, cluster, 0)
    work, work_findings = workload(args, facts)
    findings += work_findings
    parallelism = None
    if work is not None:
        parallelism, parallel_findings = judge(facts, count, work.ep, ("engine", "args"))
        findings += parallel_findings
    budgets: tuple[Budget, ...] = ()
    if parallelism is not None and work is not None:
        budgets = tuple(
            budget(facts, parallelism, work, head=rank == 0, cache_gib=profile.engram_cache_gib)
            for rank in range(count)
        )
        findings += check_budget(facts, parallelism, work, budgets[0], ("profile",))
        for rank in range(1, count):
            path = ("nodes", rank, "engine", "args")
            own, own_findings = workload(arguments(profile, cluster, rank), facts, path)
            if own is None:
                findings += own_findings
            elif own != work:
                findings += check_budget(facts, parallelism, own, budgets[rank], path)
    if fabric is None or parallelism is None or work is None or errors(findings):
        return Rendering(None, budgets, tuple(findings), drawing)
    nodes = [
        _node(cluster, loaded, facts, fabric, parallelism, rank, budgets[rank])
        for rank in range(count)
    ]
    findings += check_effective(
        args,
        -budgets[0].missing_gib,
        model_v41=facts.deepseek_v41,
        engram=facts.engram is not None,
    )
    if errors(findings):
        return Rendering(None, budgets, tuple(findings), drawing)
    plan = _plan(cluster, loaded, fabric, parallelism, nodes)
    return Rendering(plan, budgets, tuple(findings), drawing)


def cluster_sha256(cluster: Cluster) -> str:
    """Return the sha256 of a cluster's content; comments and key order do not change it."""
    text = json.dumps(cluster.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _topology(cluster: Cluster, fabric: Fabric) -> TopologyPlan:
    names = [node.name for node in cluster.nodes]
    return TopologyPlan(
        kind=cluster.topology.kind,
        mtu=cluster.topology.mtu,
        cables=[
            CablePlan(
                a=CableEnd(node=names[cable.a.rank], cage=cable.a.cage),
                b=None
                if cable.b is None
                else CableEnd(node=names[cable.b.rank], cage=cable.b.cage),
            )
            for cable in fabric.cables
        ],
    )


def _drawing(cluster: Cluster, fabric: Fabric) -> Drawing:
    return Drawing(
        name=cluster.name,
        topology=_topology(cluster, fabric),
        nodes=tuple(
            DrawnNode(
                name=node.name,
                rank=rank,
                role=_role(rank),
                address=node.address,
                lan_interface=node.lan_interface,
                rails=tuple(_rail(cluster, rail) for rail in fabric.of(rank)),
            )
            for rank, node in enumerate(cluster.nodes)
        ),
    )


def _role(rank: int) -> Literal["head", "worker"]:
    return "head" if rank == 0 else "worker"


def _plan(
    cluster: Cluster,
    loaded: LoadedProfile,
    fabric: Fabric,
    parallelism: Parallelism,
    nodes: list[NodePlan],
) -> Plan:
    names = [node.name for node in cluster.nodes]
    nfs = storage.weights_mode(cluster) == "nfs"
    return Plan(
        version=PLAN_VERSION,
        name=cluster.name,
        source=Source(
            cluster_sha256=cluster_sha256(cluster),
            profile=loaded.profile.name,
            profile_sha256=loaded.sha256,
        ),
        engine=Engine(
            package=ENGINE_PACKAGE[0],
            version=ENGINE_PACKAGE[1],
            agreement_sha256=agreement_sha256(
                arguments(loaded.profile, cluster, 0), nodes[0].env, nodes[0].nccl_library
            ),
        ),
        model=Checkpoint(
            path=cluster.model.path,
            id=cluster.model.id,
            revision=cluster.model.revision,
            shards=cluster.model.shards,
            served_name=cluster.model.served_name,
        ),
        topology=_topology(cluster, fabric),
        parallel=ParallelPlan(
            tp=parallelism.tp,
            ep=parallelism.ep,
            padded=[
                PaddedDimension(
                    name=dimension.name,
                    size=dimension.size,
                    padded=dimension.padded,
                    per_rank=dimension.per_rank,
                )
                for dimension in parallelism.padded
            ],
        ),
        api=ApiPlan(
            bind=cluster.api.bind,
            port=cluster.api.port,
            key_file=cluster.api.key_file,
            url=f"http://{_client_host(cluster)}:{cluster.api.port}/v1",
        ),
        ports=PortsPlan(
            api=cluster.api.port,
            rendezvous=cluster.ports.rendezvous,
            supervisor=cluster.ports.supervisor,
            nfs=NFS_PORT if nfs else None,
        ),
        router=router_plan(cluster),
        image=_image(cluster),
        health=_health(cluster),
        restart=RESTART,
        # workers first: they wait for the head's rendezvous, the head does not wait for them
        start_order=[names[1:], names[:1]] if len(names) > 1 else [names],
        # behind NFS the head reads its own disk first, then the workers share it
        pack_order=[names[:1], names[1:]] if nfs else [names],
        nodes=nodes,
    )


def _node(
    cluster: Cluster,
    loaded: LoadedProfile,
    facts: ModelFacts,
    fabric: Fabric,
    parallelism: Parallelism,
    rank: int,
    node_budget: Budget,
) -> NodePlan:
    node = cluster.nodes[rank]
    profile = loaded.profile
    rails = fabric.of(rank)
    weights = (
        storage.weights_plan(cluster, fabric, rank)
        if rails or len(cluster.nodes) == 1
        else WeightsPlan(mode="local", export=None, mount=None)
    )
    engram = storage.engram_plan(cluster, facts, rank, profile.engram_cache_gib)
    base = generated(
        cluster,
        rank,
        rails,
        parallelism,
        None if engram is None else engram.directory,
        profile.engram_cache_gib,
    )
    library = cluster.topology.nccl_library
    return NodePlan(
        name=node.name,
        rank=rank,
        role=_role(rank),
        system=node.system,
        address=node.address,
        ssh=node.ssh or node.address,
        lan_interface=node.lan_interface,
        lan_address=host.lan_address(cluster, rank),
        serial=node.serial,
        mac=node.mac,
        argv=argv(arguments(profile, cluster, rank)),
        env=environment(base, profile, cluster, rank),
        config_file=CONFIG_FILE if cluster.api.key_file is not None and rank == 0 else None,
        nccl_library=None
        if library is None
        else NcclLibrary(path=library, sha256=cluster.topology.nccl_library_sha256),
        rails=[_rail(cluster, rail) for rail in rails],
        routes=[],
        sysctl=host.sysctl(cluster, rails),
        kernel_modules=host.kernel_modules(rails, weights, rdma=cluster.weights.rdma),
        firewall=host.firewall(cluster, rank, rails),
        weights=weights,
        engram=engram,
        memory=_memory(node_budget),
        guard=host.guard(),
        limits=LIMITS,
        cache_directory=CACHE_DIRECTORY,
        units=units(
            Rank(
                name=node.name,
                rank=rank,
                tp=parallelism.tp,
                system=node.system,
                cables=bool(rails),
                checkpoint=cluster.model.path,
                key_file=cluster.api.key_file,
                ready_timeout=READY_TIMEOUT,
                probe_timeout=PROBE_TIMEOUT,
                weights=weights,
                engram=engram,
                cache_directory=CACHE_DIRECTORY,
                router=rank == 0 and cluster.router is not None,
            )
        ),
    )


def _rail(cluster: Cluster, rail: Rail) -> RailPlan:
    return RailPlan(
        netdev=rail.netdev,
        rdma=rail.rdma,
        pci=rail.pci,
        cage=rail.cage,
        twin=rail.twin,
        address=str(rail.address),
        mtu=cluster.topology.mtu,
        peers=[
            PeerPlan(node=cluster.nodes[peer.rank].name, address=str(peer.address))
            for peer in rail.peers
        ],
    )


def _memory(node_budget: Budget) -> MemoryPlan:
    parts = [MemoryPart(name=part.name, bytes=round(part.gib * GIB)) for part in node_budget.parts]
    return MemoryPlan(
        total=round(TOTAL_GIB * GIB),
        used=sum(part.bytes for part in parts),
        reserve=round(node_budget.reserve_gib * GIB),
        parts=parts,
    )


def _client_host(cluster: Cluster) -> str:
    bind = cluster.api.bind
    return cluster.nodes[0].address if bind == "0.0.0.0" else bind  # noqa: S104


def _image(cluster: Cluster) -> ImagePlan | None:
    image = cluster.image
    if image is None:
        return None
    # a digest beside a tag is what the runtime goes by; the tag would only mislead a reader
    repository = image.reference
    if repository is not None and ":" in repository.rsplit("/", 1)[-1]:
        repository = repository.rpartition(":")[0]
    return ImagePlan(
        name=image.digest if repository is None else f"{repository}@{image.digest}",
        reference=image.reference,
        digest=image.digest,
        runtime=image.runtime,
    )


def _health(cluster: Cluster) -> HealthPlan:
    host_part = "127.0.0.1" if cluster.api.bind == "0.0.0.0" else cluster.api.bind  # noqa: S104
    return health_plan(f"http://{host_part}:{cluster.api.port}", cluster.model.served_name)


def health_plan(base: str, served_name: str) -> HealthPlan:
    """Return how readiness is judged of the endpoint at the URL ``base``."""
    body: dict[str, Any] = {
        "model": served_name,
        "messages": [{"role": "user", "content": "What is 19 + 23? Answer with the number."}],
        "max_tokens": 64,
        "temperature": 0,
        # two tokens instead of a train of thought (field notes 6.5; serving_chat.py of 0.5.23)
        "chat_template_kwargs": {"thinking": False},
    }
    return HealthPlan(
        live_url=f"{base}/health",
        generate_url=f"{base}/v1/chat/completions",
        generate_body=body,
        expect="42",
        interval=10,
        steady_interval=60,
        probe_timeout=PROBE_TIMEOUT,
        ready_timeout=READY_TIMEOUT,
    )


__all__ = ["Rendering", "Workload", "cluster_sha256", "render"]
