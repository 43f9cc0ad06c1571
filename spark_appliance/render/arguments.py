"""The engine's command line: which flags, from where, in which order.

Precedence: profile < cluster < node; flags that follow from the cluster file belong to the plan
and cannot be given. Facts about flags are those of sglang 0.5.23's own parser; the test marked
``engine`` lets that parser judge every command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from spark_appliance.memory import Workload
from spark_appliance.model.cluster import Cluster, Scalar
from spark_appliance.model.facts import ModelFacts
from spark_appliance.model.findings import Finding, Path
from spark_appliance.model.flags import known_flags
from spark_appliance.model.profile import Profile

Arguments = dict[str, Scalar]

PROGRAM: Final = ("python3", "-m", "sglang.launch_server")

CONFIG_FILE: Final = "/run/spark-engine/config.yaml"
"""Private runtime file of the unit; carries the API key, so that argv does not."""

OWNED: Final[Mapping[str, str]] = {
    "model-path": "model.path",
    "model": "model.path",
    "served-model-name": "model.served_name",
    "tp": "nodes (TP is the number of nodes)",
    "tp-size": "nodes (TP is the number of nodes)",
    "tensor-parallel-size": "nodes (TP is the number of nodes)",
    "nnodes": "nodes",
    "node-rank": "nodes (rank is the order)",
    "dist-init-addr": "ports.rendezvous",
    "nccl-init-addr": "ports.rendezvous",
    "host": "api.bind",
    "port": "api.port",
    "api-key": "api.key_file",
    "admin-api-key": "api.key_file",
    "config": "api.key_file",
    "revision": "model.revision",
}
"""Flags that the plan sets itself -> the key of the cluster file that decides them."""

ALIASES: Final[Mapping[str, str]] = {
    "ep": "ep-size",
    "expert-parallel-size": "ep-size",
}
"""Other spellings that sglang accepts -> the one used here."""

ORDER: Final = (
    "model-path",
    "served-model-name",
    "trust-remote-code",
    "load-format",
    "tp",
    "ep-size",
    "attention-backend",
    "moe-runner-backend",
    "mem-fraction-static",
    "chunked-prefill-size",
    "context-length",
    "max-running-requests",
    "cuda-graph-max-bs-decode",
    "random-seed",
    "enable-decoder-swa-bounded-replay",
    "enable-cache-report",
    "tool-call-parser",
    "reasoning-parser",
    "host",
    "port",
    "speculative-algorithm",
    "speculative-dspark-block-size",
    "nnodes",
    "node-rank",
    "dist-init-addr",
    "max-total-tokens",
    "fp8-gemm-backend",
    "watchdog-timeout",
)
"""The order of the published four-Spark command; other flags follow sorted."""


def merge(profile: Profile, cluster: Cluster, rank: int) -> Arguments:
    """Return the free flags of one rank; false and null take a flag out."""
    merged: dict[str, Scalar | None] = {}
    for layer in (profile.args, cluster.engine.args, cluster.nodes[rank].engine.args):
        merged.update({ALIASES.get(name, name): value for name, value in layer.items()})
    return {
        name: value for name, value in merged.items() if value is not None and value is not False
    }


def arguments(profile: Profile, cluster: Cluster, rank: int) -> Arguments:
    """Return all flags of one rank: the free ones and the plan's own."""
    count = len(cluster.nodes)
    result = merge(profile, cluster, rank)
    result |= {
        "model-path": cluster.model.path,
        "served-model-name": cluster.model.served_name,
        "tp": count,
        # a worker's HTTP server only answers health checks, without a key: keep it local
        "host": cluster.api.bind if rank == 0 else "127.0.0.1",
        "port": cluster.api.port,
    }
    if cluster.model.revision is not None and not cluster.model.path.startswith("/"):
        result["revision"] = cluster.model.revision
    if count > 1:
        result |= {
            "nnodes": count,
            "node-rank": rank,
            "dist-init-addr": f"{cluster.nodes[0].address}:{cluster.ports.rendezvous}",
        }
    if cluster.api.key_file is not None and rank == 0:
        result["config"] = CONFIG_FILE
    return result


def argv(args: Arguments) -> list[str]:
    """Return the command line: true gives a bare flag, other values a flag and its text."""
    known = [name for name in ORDER if name in args]
    rest = sorted(set(args) - set(known))
    line = list(PROGRAM)
    for name in (*known, *rest):
        value = args[name]
        line.append(f"--{name}")
        if value is not True:
            flag = known_flags().get(name)
            many = flag is not None and flag.kind == "many"
            line += str(value).split() if many else [str(value)]
    return line


_LARGEST: Final = 10**9
"""Larger than any number of tokens or requests that makes sense."""


def workload(
    args: Arguments, facts: ModelFacts, path: Path = ("engine", "args")
) -> tuple[Workload | None, list[Finding]]:
    """Read the sizes that decide memory out of the flags of a rank.

    SGLang picks sizes that are left out by looking at the machine; a plan must know them.
    """
    findings: list[Finding] = []

    def number(name: str, default: int | None = None, least: int = 1) -> int:
        value = args.get(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LARGEST:
            return value
        missing = value is None
        findings.append(
            Finding(
                "engine.size-unknown" if missing else "engine.size-not-a-number",
                path,
                f"--{name} is not set"
                if missing
                else f"--{name} is {str(value)[:40]}, no whole number from {least} to {_LARGEST}",
                f"give engine.args.{name}: a whole number (the memory budget needs it)",
            )
        )
        return 1

    context = number("context-length")
    chunk = number("chunked-prefill-size")
    tokens = number("max-total-tokens")
    running = number("max-running-requests")
    graph = number("cuda-graph-max-bs-decode")
    block = number("speculative-dspark-block-size") if "speculative-algorithm" in args else 0
    fraction = args.get("mem-fraction-static")
    if not isinstance(fraction, int | float) or isinstance(fraction, bool) or not 0 < fraction < 1:
        findings.append(
            Finding(
                "engine.mem-fraction",
                path,
                f"--mem-fraction-static is {fraction!r}, not between 0 and 1",
                "give engine.args.mem-fraction-static, for example 0.8",
            )
        )
        fraction = 0.5
    tails = number("swa-prefix-tails", least=0) if "swa-prefix-tails" in args else None
    ep = number("ep-size", 1)
    if findings:
        return None, findings
    return Workload(
        context=context,
        chunk=chunk,
        kv_tokens=tokens,
        running=running,
        graph_batch=graph,
        draft_tokens=block + 1,
        fraction=float(fraction),
        prefix_tails=tails,
        ep=ep,
    ), _check_sizes(facts, context, chunk, running, graph)


def _check_sizes(
    facts: ModelFacts, context: int, chunk: int, running: int, graph: int
) -> list[Finding]:
    findings = []
    path = ("engine", "args")
    if context > facts.max_context:
        findings.append(
            Finding(
                "engine.context-too-long",
                path,
                f"--context-length {context} is more than the {facts.max_context} of {facts.name}",
                f"set context-length to {facts.max_context} or less",
            )
        )
    if chunk % facts.page_size:
        findings.append(
            Finding(
                "engine.chunk-not-paged",
                path,
                f"--chunked-prefill-size {chunk} is no multiple of the page size "
                f"{facts.page_size}; SGLang refuses it",
                f"set it to {max(facts.page_size, chunk // facts.page_size * facts.page_size)}",
            )
        )
    if graph < running:
        findings.append(
            Finding(
                "engine.graphs-below-running",
                path,
                f"CUDA graphs are captured up to batch size {graph}, but {running} requests may "
                "run: larger batches run without a graph, slowly",
                f"set cuda-graph-max-bs-decode to {running}",
                "warning",
            )
        )
    return findings


def override_paths(cluster: Cluster) -> list[tuple[Path, Mapping[str, Scalar | None]]]:
    """Return every place of the cluster file that gives flags, with what it gives."""
    places: list[tuple[Path, Mapping[str, Scalar | None]]] = [
        (("engine", "args"), cluster.engine.args)
    ]
    places += [
        (("nodes", rank, "engine", "args"), node.engine.args)
        for rank, node in enumerate(cluster.nodes)
    ]
    return places
