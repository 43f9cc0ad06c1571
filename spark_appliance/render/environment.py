"""The engine's environment: NCCL, Gloo, SGLang, CUDA, caches.

Precedence: generated < profile < cluster < node. ``NCCL_IB_GID_INDEX`` is never here: GID tables
move when links flap, so spark-fabric.service resolves it on the node at each start. No variable
is ever empty: an empty index means 0, a link-local address that connects to nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from spark_appliance.model.cluster import Cluster, TopologyKind, is_ipv4
from spark_appliance.model.facts import GIB
from spark_appliance.model.profile import Profile
from spark_appliance.parallel import Parallelism
from spark_appliance.topology.addressing import Rail
from spark_appliance.topology.hardware import RDMA_PORT

CACHE_DIRECTORY: Final = "/var/cache/spark-engine"

_HOST: Final[Mapping[str, str]] = {
    # the checkpoint is a local directory: never ask the hub
    "HF_HUB_OFFLINE": "1",
    # each compile job takes 3 to 8 GiB of the same memory that holds the model (flashinfer#3634)
    "MAX_JOBS": "2",
    # the engine's files are read-only: without a place for byte code every start compiles all
    "PYTHONPYCACHEPREFIX": f"{CACHE_DIRECTORY}/pyc",
    "PYTHONUNBUFFERED": "1",
    # sglang puts the caches of Triton, Inductor, FlashInfer and CUDA below the first
    "SGLANG_CACHE_DIR": CACHE_DIRECTORY,
    "SGLANG_JIT_CACHE_DIR": f"{CACHE_DIRECTORY}/jit",
}

_NCCL: Final[Mapping[str, str]] = {
    # fail rather than fall back to sockets at 1 GB/s
    "NCCL_NET": "IB",
    "NCCL_IB_DISABLE": "0",
    # one GPU a node: no peer-to-peer, no shared memory
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_CROSS_NIC": "1",
    # merged virtual NICs would mix rails of different subnets
    "NCCL_IB_MERGE_NICS": "0",
    # pair only devices of the same subnet
    "NCCL_IB_SUBNET_AWARE_ROUTING": "1",
    # cuMem buffers cost unified memory and gain nothing
    "NCCL_CUMEM_ENABLE": "0",
    # the defaults pin about 4.7 GiB, these 0.14 GiB (MiaAI-Lab .env)
    "NCCL_BUFFSIZE": "1048576",
    "NCCL_LL128_BUFFSIZE": "262144",
    "NCCL_MAX_NCHANNELS": "8",
    # decode uses LL, prefill Simple; LL128 never wins here
    "NCCL_PROTO": "^LL128",
    "NCCL_DEBUG": "WARN",
    "NCCL_DEBUG_SUBSYS": "INIT,ENV",
}
"""Source: MiaAI-Lab .env.example and docs (TP 3 and TP 4), christopherowen docs/nccl.md."""

_BY_TOPOLOGY: Final[Mapping[TopologyKind, Mapping[str, str]]] = {
    # one cable, two rails: merging them raised 98 to 161 Gb/s (NVIDIA playbooks #102)
    "pair": {"NCCL_IB_MERGE_NICS": "1"},
    "ring": {
        # a library with switchless-ring support (MiaAI-Lab docs/switchless-ring.md)
        "NCCL_ALGO": "Ring",
        "NCCL_SWITCHLESS_RING_ONLY": "1",
        "NCCL_SKIP_TREE_CONNECT": "1",
        "NCCL_IB_SUBNET_PREFIX_LEN": "24",
        "NCCL_MIN_NCHANNELS": "4",
        "NCCL_MAX_NCHANNELS": "4",
        "NCCL_P2P_LEVEL": "SYS",
        # without these the second PCI plane carries nothing (knapcio docs/r5-wired-profile.md)
        "NCCL_IB_EXTENDED_IPV4_GIDS": "1",
        "NCCL_IB_PRESERVE_PCI_DOMAIN": "1",
        "NCCL_IB_ROUTE_DIAGNOSTICS": "1",
        "NCCL_IB_QPS_PER_CONNECTION": "1",
    },
}


def hca_list(rails: tuple[Rail, ...]) -> str:
    """Return NCCL's device list; '=' makes it match names exactly instead of by prefix."""
    return "=" + ",".join(f"{rail.rdma}:{RDMA_PORT}" for rail in rails)


def generated(
    cluster: Cluster,
    rank: int,
    rails: tuple[Rail, ...],
    parallelism: Parallelism,
    engram_directory: str | None,
    engram_cache_gib: float,
) -> dict[str, str]:
    """Return the variables that follow from the cluster."""
    env = dict(_HOST)
    if len(cluster.nodes) > 1:
        lan = cluster.nodes[rank].lan_interface
        env |= _NCCL
        env |= _BY_TOPOLOGY.get(cluster.topology.kind, {})
        env |= {
            "NCCL_IB_HCA": hca_list(rails),
            # bootstrap needs every node to reach every other, which only the LAN gives
            "NCCL_SOCKET_IFNAME": lan,
            "GLOO_SOCKET_IFNAME": lan,
        }
        if is_ipv4(cluster.nodes[rank].address):
            # the head offers its message queue there. SGLANG_LOCAL_IP_NIC would name the netdev,
            # but needs the module netifaces, which sglang does not depend on
            env["SGLANG_HOST_IP"] = cluster.nodes[rank].address
    library = cluster.topology.nccl_library
    if library is not None:
        # torch finds its own libnccl by RPATH; a library of that name that is already loaded wins
        env |= {"LD_PRELOAD": library, "SGLANG_NCCL_SO_PATH": library}
    plugins = []
    if engram_directory is not None:
        plugins.append("spark_engram")
        env["SPARK_ENGRAM_DIR"] = engram_directory
        if cluster.model.revision is not None:
            env["SPARK_ENGRAM_REVISION"] = cluster.model.revision
        env["SPARK_ENGRAM_CACHE_BYTES"] = str(round(engram_cache_gib * GIB))
    if parallelism.needs_padding:
        plugins.append("spark_tp_pad")
        env["SPARK_TP_PAD"] = "1"
    if plugins:
        env["SGLANG_PLUGINS"] = ",".join(plugins)
    return env


def environment(
    base: Mapping[str, str], profile: Profile, cluster: Cluster, rank: int
) -> dict[str, str]:
    """Return the whole environment of one rank; null takes a variable out."""
    merged: dict[str, str | None] = dict(base)
    for layer in (profile.env, cluster.engine.env, cluster.nodes[rank].engine.env):
        merged.update(layer)
    return {name: value for name, value in sorted(merged.items()) if value is not None}
