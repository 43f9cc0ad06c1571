"""What a person may not write into ``engine.args`` and ``engine.env``, and why.

Each rule stands for a failure that was met in the field; the number in brackets is its row in
the problem catalogue (docs/problems.md).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Final

from spark_appliance.memory import prefix_tails_gib
from spark_appliance.model.cluster import Cluster, Scalar
from spark_appliance.model.findings import Finding, Path, Severity
from spark_appliance.model.flags import Flag, closest, known_flags, known_variables
from spark_appliance.model.profile import Profile
from spark_appliance.render.agreement import MAY_DIFFER, flag_must_agree, variable_must_agree
from spark_appliance.render.arguments import ALIASES, OWNED, override_paths

_SECRET_VARIABLE: Final = re.compile(
    r"(^|_)(API_?KEY|ACCESS_?KEY(_ID)?|TOKEN|SECRET|PASS|PASSWORD|PASSWD|CREDENTIALS?|KEY)(_|$)"
)
_SECRET_FLAG: Final = re.compile(r"(^|-)(password|token|secret|keyfile)($|-)")
_FOREIGN: Final = (
    "DSV41_",
    "B12X_",
    "SPARK_PREFILL_",
    "LOOP_ABORT",
    "MXFP8_BACKEND",
    "PREFILL_EMPTY_CACHE_TOKENS",
    "SGLANG_ROCE_",
)
_UNPLANNED: Final = re.compile(
    r"(pp|pipeline|dp|data-parallel|attn-cp|attn-dp|attention-context|context-parallel|dcp|cp)-.*"
    r"|(enable-dp|enable-prefill-cp|enable-two-batch|disaggregation|encoder|grpc|ssl|lora)(-.*)?"
    r"|(base-gpu-id|gpu-id-step|device|nccl-port|cpu-offload-gb|page-size|kv-cache-dtype)"
    r"|(disable-cuda-graph|swa-full-tokens-ratio|enable-lora|moe-dense-tp-size|version)"
    r"|(gated-launch-port|engine-info-bootstrap-port|enable-lmcache)"
)
"""Flags that change ranks, ports or memory without the plan's knowing."""

_OWNED_VARIABLES: Final[Mapping[str, str]] = {
    "NCCL_NET": "topology (a fall-back to sockets is 20 times slower) [P13]",
    "NCCL_IB_DISABLE": "topology",
    "NCCL_IB_HCA": "topology.cables: every rail is listed [P11]",
    "NCCL_SOCKET_IFNAME": "nodes[].lan_interface [P35]",
    "GLOO_SOCKET_IFNAME": "nodes[].lan_interface [P35]",
    "SGLANG_HOST_IP": "nodes[].address",
    "SGLANG_PLUGINS": "model and nodes",
    "SGLANG_CACHE_DIR": "the plan's cache directory, which lasts [P86]",
    "SGLANG_JIT_CACHE_DIR": "the plan's cache directory, which lasts [P86]",
    "SGLANG_NCCL_SO_PATH": "topology.nccl_library",
    "LD_PRELOAD": "topology.nccl_library",
    "SPARK_TP_PAD": "nodes (padding follows from their number)",
    "SPARK_ENGRAM_DIR": "nodes[].engram",
    "SPARK_ENGRAM_REVISION": "model.revision",
    "SPARK_ENGRAM_CACHE_BYTES": "engram_cache_gib of the profile",
}
"""Variables that the plan sets itself -> what decides them."""

_PROFILE: Final[Path] = ("profile",)
_TRUE: Final = {"1", "true", "yes", "y"}
_SPECULATIVE_SLOTS: Final = 8

_LARGEST_NCCL_BUFFER: Final = 4 << 20
"""Bytes; the plan uses 1 MiB, the ring recipes up to 4 (christopherowen docs/nccl.md)."""

_LAZY_FORMATS: Final = ("auto", "safetensors", "dummy")
"""Load formats that read tensor by tensor (the Engram plugin refuses the others too)."""

_LONG_SESSION: Final = 250_000
"""Tokens from which re-computing a session hurts; shorter ones take seconds."""

_TAILS_PER_TOKEN: Final = 637 / 1_000_000
"""Prefix tails a cached session needs: about 637 for 1 M tokens (MiaAI-Lab #27, #43)."""


def check_overrides(cluster: Cluster, profile: Profile) -> list[Finding]:
    """Judge everything that the cluster file and the profile give to the engine."""
    findings: list[Finding] = []
    for name, value in profile.args.items():
        path = (*_PROFILE, "args", name)
        findings += _flag(cluster, path, ALIASES.get(name, name), value, profile.args)
    for name, text in profile.env.items():
        findings += _variable((*_PROFILE, "env", name), name, text)
    for where, args in override_paths(cluster):
        for name, value in args.items():
            findings += _flag(cluster, (*where, name), ALIASES.get(name, name), value, args)
        findings += _given_twice(where, args)
    findings += _ranks_agree(cluster)
    places: list[tuple[Path, Mapping[str, str | None]]] = [(("engine", "env"), cluster.engine.env)]
    places += [
        (("nodes", rank, "engine", "env"), node.engine.env)
        for rank, node in enumerate(cluster.nodes)
    ]
    for path, env in places:
        for name, text in env.items():
            findings += _variable((*path, name), name, text)
    return findings


def _flag(
    cluster: Cluster,
    path: Path,
    name: str,
    value: Scalar | None,
    layer: Mapping[str, Scalar | None],
) -> Iterator[Finding]:
    def finding(rule: str, message: str, remedy: str, severity: Severity = "error") -> Finding:
        return Finding(rule, path, message, remedy, severity)

    flag = known_flags().get(name)
    given = value is not None and value is not False
    if name in OWNED:
        yield finding(
            "engine.flag-owned",
            f"--{name} follows from the cluster file",
            f"remove it and set {OWNED[name]}",
        )
    elif flag is None:
        near = closest(name, known_flags())
        yield finding(
            "engine.unknown-flag",
            f"sglang 0.5.23 has no flag --{name}",
            f"did you mean {near}?" if near else "see: python3 -m sglang.launch_server --help",
        )
    elif _SECRET_FLAG.search(name):
        yield finding(
            "engine.secret",
            f"--{name} carries a secret; the plan and argv are world-readable",
            "remove it; the API key belongs in a file (api.key_file)",
        )
    elif _UNPLANNED.fullmatch(name) and given:
        yield finding(
            "engine.flag-unplanned",
            f"--{name} changes ranks, ports or memory in a way that the plan does not know",
            "remove it",
        )
    elif name in {"use-ray", "ray-address"} and given:
        yield finding(
            "engine.ray",
            "Ray's memory monitor kills the engine at 95 % of unified memory [P67]",
            "remove it; systemd starts the ranks",
        )
    elif name.startswith(("enable-hierarchical-cache", "hicache-")) and given:
        yield finding(
            "engine.hicache",
            "host offload of KV stalls (sglang#32356), and host memory is GPU memory here [P99]",
            f"remove {name}",
        )
    elif value is not None:
        yield from _flag_value(path, name, value, flag)
    if (
        name == "weight-loader-prefetch-checkpoints"
        and value
        and layer.get("weight-loader-disable-mmap")
    ):
        yield finding(
            "engine.prefetch-without-mmap",
            "prefetching with mmap disabled ran a head out of memory (cqingwang fast-load.md)",
            "keep one of the two",
        )
    shared = len(cluster.nodes) > 1 and cluster.weights.mode != "local"
    many = isinstance(value, int) and value > 2
    if name == "weight-loader-prefetch-num-threads" and shared and many:
        yield finding(
            "engine.prefetch-threads",
            "many reader threads dead-lock against NFS (TensorRT-LLM PR#14655) [P44]",
            "use 2",
            "warning",
        )


def _flag_value(path: Path, name: str, value: Scalar, flag: Flag) -> Iterator[Finding]:
    if isinstance(value, float) and not math.isfinite(value):
        yield Finding("engine.bad-value", path, f"--{name} is {value}", "give a finite number")
    elif isinstance(value, str) and (not value.strip() or not value.isprintable()):
        yield Finding(
            "engine.bad-value",
            path,
            f"--{name} is empty or has control characters: {value!r}",
            "give one line of text, or null to leave the flag out",
        )
    elif complaint := flag.complaint(value):
        yield Finding(
            "engine.bad-value",
            path,
            f"--{name} is {value!r}; it {complaint}",
            "change the value, or null to leave the flag out",
        )


def _given_twice(path: Path, args: Mapping[str, Scalar | None]) -> Iterator[Finding]:
    for name in args:
        if name in ALIASES and ALIASES[name] in args:
            yield Finding(
                "engine.flag-twice",
                (*path, name),
                f"--{name} and --{ALIASES[name]} are the same flag",
                "keep one of the two",
            )


def _ranks_agree(cluster: Cluster) -> Iterator[Finding]:
    if len(cluster.nodes) == 1:
        return
    for rank, node in enumerate(cluster.nodes):
        for name in node.engine.args:
            plain = ALIASES.get(name, name)
            if flag_must_agree(plain) and plain not in OWNED:
                yield Finding(
                    "engine.ranks-disagree",
                    ("nodes", rank, "engine", "args", name),
                    f"--{plain} must be the same on every rank, else they wait for each other "
                    "forever [P88]",
                    "move it to engine.args, for all nodes; per node may differ: "
                    + ", ".join(sorted(MAY_DIFFER)),
                )
        for name in node.engine.env:
            judged_elsewhere = name in _OWNED_VARIABLES or name.startswith("NCCL_IB_GID_INDEX")
            if variable_must_agree(name) and not judged_elsewhere:
                yield Finding(
                    "engine.ranks-disagree",
                    ("nodes", rank, "engine", "env", name),
                    f"{name} must be the same on every rank, else they wait for each other "
                    "forever [P88]",
                    "move it to engine.env, for all nodes",
                )


def _variable(path: Path, name: str, value: str | None) -> Iterator[Finding]:
    def finding(rule: str, message: str, remedy: str, severity: Severity = "error") -> Finding:
        return Finding(rule, path, message, remedy, severity)

    if name == "NCCL_IB_GID_INDEX":
        yield finding(
            "engine.static-gid",
            "the GID index moves when links flap; a fixed one fails or spins [P03, P04, P05]",
            "remove it: it is resolved on the node at each start",
        )
        return
    if name in _OWNED_VARIABLES:
        yield finding(
            "engine.variable-owned",
            f"{name} follows from the cluster file",
            f"remove it; it is decided by {_OWNED_VARIABLES[name]}",
        )
        return
    if _SECRET_VARIABLE.search(name) or (value and re.search(r"://[^/@\s]+:[^/@\s]+@", value)):
        yield finding(
            "engine.secret",
            f"{name} looks like a secret; the plan is world-readable",
            "remove it; the API key belongs in a file (api.key_file)",
        )
        return
    large = name == "NCCL_BUFFSIZE" and (
        value is None or not value.isdigit() or int(value) > _LARGEST_NCCL_BUFFER
    )
    if large or (value is None and name in {"NCCL_MAX_NCHANNELS", "NCCL_PROTO"}):
        yield finding(
            "engine.nccl-buffers",
            f"with {name} at {value or 'its default'} NCCL pins gigabytes of unified memory [P25]",
            "remove the line",
            "warning",
        )
    if value is not None:
        yield from _variable_value(path, name, value)


def _variable_value(path: Path, name: str, value: str) -> Iterator[Finding]:
    def finding(rule: str, message: str, remedy: str, severity: Severity = "error") -> Finding:
        return Finding(rule, path, message, remedy, severity)

    if not value.strip():
        yield finding(
            "engine.empty-variable",
            f"{name} is empty, which is not the same as not set",
            "give a value, or null to leave it out",
        )
        return
    if name.startswith(_FOREIGN):
        yield finding(
            "engine.foreign-variable",
            f"{name} belongs to another engine fork and does nothing in sglang 0.5.23",
            "remove it",
        )
    elif name.startswith("SGLANG_") and name not in known_variables():
        near = closest(name, known_variables())
        yield finding(
            "engine.unknown-variable",
            f"sglang 0.5.23 reads no variable {name}",
            f"did you mean {near}?" if near else "remove it",
        )
    if name in {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} and re.search(
        r"expandable_segments\s*:\s*true", value, re.IGNORECASE
    ):
        yield finding(
            "engine.expandable-segments",
            "expandable segments give NaN logits for longer prompts and hard resets [P62, P64]",
            "use expandable_segments:False",
        )
    if name == "SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE" and value.lower() in _TRUE:
        yield finding(
            "engine.engram-host-table",
            "host memory is GPU memory on a Spark: the tables take 47 to 94 GiB of it",
            "remove it; rows are read from NVMe",
        )
    if name == "MAX_JOBS" and (not value.isdigit() or int(value) > 4):
        yield finding(
            "engine.max-jobs",
            f"{value} compile jobs take 3 to 8 GiB each of the memory that holds the model [P68]",
            "use 2",
        )
    if name == "SGLANG_RUST_BUILD_MODE" and value != "never":
        yield finding(
            "engine.rust-build",
            "probing for cargo can hang the head before HTTP is up [P85]",
            "use never",
            "warning",
        )
    if name == "SGLANG_FLASHINFER_MOE_FUSED_FINALIZE" and value.lower() in _TRUE:
        yield finding(
            "engine.fused-finalize",
            "the fused finalize is not deterministic [P97]",
            'use "0"',
            "warning",
        )
    if name in {"TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"} and value.startswith(
        ("/tmp", "/run", "/dev/shm")  # noqa: S108
    ):
        yield finding(
            "engine.cache-volatile",
            f"{value} is lost at reboot: every boot compiles and tunes again [P86]",
            "use a directory on disk",
            "warning",
        )


def check_effective(
    args: Mapping[str, Scalar], free_gib: float, *, model_v41: bool, engram: bool
) -> list[Finding]:
    """Judge the settings of rank 0 as they come out of all layers.

    ``free_gib`` is what the memory budget leaves beyond the reserve.
    """
    findings = list(_draft(args))
    if engram:
        findings += _engram_loading(args)
    running = args.get("max-running-requests")
    if (
        model_v41
        and isinstance(running, int)
        and running >= _SPECULATIVE_SLOTS
        and "min-free-slots-delay" not in args
    ):
        findings.append(
            Finding(
                "engine.admission-delay",
                ("engine", "args"),
                f"with {running} slots the engine holds small requests back until several slots "
                "are free [P95]",
                "set min-free-slots-delay: 1 for short waits",
                "note",
            )
        )
    context = args.get("context-length")
    tails = args.get("swa-prefix-tails", 4 * running if isinstance(running, int) else None)
    if model_v41 and isinstance(context, int) and isinstance(tails, int):
        wanted = round(context * _TAILS_PER_TOKEN)
        fits = prefix_tails_gib(wanted - tails) < free_gib
        if context >= _LONG_SESSION and wanted > 2 * tails and fits:
            findings.append(
                Finding(
                    "engine.prefix-tails",
                    ("engine", "args"),
                    f"a cached session of {context:,} tokens keeps about {wanted} prefix tails, "
                    f"the pool has {tails}: long sessions are computed again [P93]",
                    f"set swa-prefix-tails: {wanted} "
                    f"({prefix_tails_gib(wanted - tails):.1f} GiB more)",
                    "note",
                )
            )
    return findings


def _draft(args: Mapping[str, Scalar]) -> Iterator[Finding]:
    if "speculative-algorithm" in args:
        return
    for name in args:
        if name.startswith("speculative-"):
            yield Finding(
                "engine.draft-without-algorithm",
                ("engine", "args"),
                f"--{name} is set but no speculative-algorithm",
                f"set {name}: null as well",
            )


def _engram_loading(args: Mapping[str, Scalar]) -> Iterator[Finding]:
    """Refuse loaders that read whole shards: the Engram tables are 203 GB of them."""
    reads_all = [
        f"--{name}"
        for name in ("weight-loader-disable-mmap", "weight-loader-prefetch-checkpoints")
        if args.get(name)
    ]
    if args.get("load-format", "auto") not in _LAZY_FORMATS:
        reads_all.append(f"--load-format {args['load-format']}")
    for flag in reads_all:
        yield Finding(
            "engine.reads-engram-tables",
            ("engine", "args"),
            f"{flag} reads whole checkpoint shards, the 203 GB of Engram tables included",
            "leave it out; with safetensors and mmap the tables are never read",
        )
