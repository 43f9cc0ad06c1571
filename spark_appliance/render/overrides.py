"""What a person may not write into ``engine.args`` and ``engine.env``, and why.

Each rule stands for a failure that was met in the field; the number in brackets is its row in
the problem catalogue (docs/problems.md).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Final

from spark_appliance.model.cluster import Cluster, Scalar
from spark_appliance.model.findings import Finding, Path, Severity
from spark_appliance.model.flags import closest_flag, known_flags
from spark_appliance.model.profile import Profile
from spark_appliance.render.arguments import ALIASES, OWNED, RANK_LOCAL, override_paths

_SECRET: Final = re.compile(r"(^|_)(API_?KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)")
_FOREIGN: Final = (
    "DSV41_",
    "B12X_",
    "SPARK_PREFILL_",
    "LOOP_ABORT",
    "MXFP8_BACKEND",
    "PREFILL_EMPTY_CACHE_TOKENS",
    "SGLANG_ROCE_",
)
_SPECULATIVE_SLOTS: Final = 8
_PROFILE: Final[Path] = ("profile",)


def check_overrides(cluster: Cluster, profile: Profile) -> list[Finding]:
    """Judge everything that the cluster file and the profile give to the engine."""
    findings: list[Finding] = []
    for name, value in profile.args.items():
        findings += _flag(cluster, _PROFILE, ALIASES.get(name, name), value, profile.args)
    for name, text in profile.env.items():
        findings += _variable(_PROFILE, name, text)
    for path, args in override_paths(cluster):
        for name, value in args.items():
            findings += _flag(cluster, (*path, name), ALIASES.get(name, name), value, args)
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


def _flag(  # one rule a paragraph
    cluster: Cluster,
    path: Path,
    name: str,
    value: Scalar | None,
    layer: Mapping[str, Scalar | None],
) -> Iterator[Finding]:
    if isinstance(value, float) and not math.isfinite(value):
        yield Finding("engine.not-a-number", path, f"--{name} is {value}", "give a finite number")
    if isinstance(value, str) and (not value.strip() or not value.isprintable()):
        yield Finding(
            "engine.bad-text",
            path,
            f"--{name} is empty or has control characters: {value!r}",
            "give one line of text, or null to leave the flag out",
        )
    if name in OWNED:
        yield Finding(
            "engine.flag-owned",
            path,
            f"--{name} follows from the cluster file",
            f"remove it and set {OWNED[name]}",
        )
    elif name not in known_flags():
        close = closest_flag(name)
        yield Finding(
            "engine.unknown-flag",
            path,
            f"sglang 0.5.23 has no flag --{name}",
            f"did you mean {close}?" if close else "see: python3 -m sglang.launch_server --help",
        )
    if name in {"use-ray", "ray-address"}:
        yield Finding(
            "engine.ray",
            path,
            "Ray's memory monitor kills the engine at 95 % of unified memory [P67]",
            "remove it; systemd starts the ranks",
        )
    if name in {"enable-hierarchical-cache", "hicache-size", "hicache-ratio"} and value:
        yield Finding(
            "engine.hicache",
            path,
            "host offload of KV stalls (sglang#32356), and host memory is GPU memory here [P99]",
            f"remove {name}",
        )
    if (
        name == "weight-loader-prefetch-checkpoints"
        and value
        and layer.get("weight-loader-disable-mmap")
    ):
        yield Finding(
            "engine.prefetch-without-mmap",
            path,
            "prefetching with mmap disabled ran a head out of memory (cqingwang fast-load.md)",
            "keep one of the two",
        )
    shared = len(cluster.nodes) > 1 and cluster.weights.mode != "local"
    many = isinstance(value, int) and value > 2
    if name == "weight-loader-prefetch-num-threads" and shared and many:
        yield Finding(
            "engine.prefetch-threads",
            path,
            "many reader threads dead-lock against NFS (TensorRT-LLM PR#14655) [P44]",
            "use 2",
            "warning",
        )


def _ranks_agree(cluster: Cluster) -> Iterator[Finding]:
    if len(cluster.nodes) == 1:
        return
    for rank, node in enumerate(cluster.nodes):
        for name in node.engine.args:
            plain = ALIASES.get(name, name)
            if plain not in RANK_LOCAL and plain not in OWNED:
                yield Finding(
                    "engine.ranks-disagree",
                    ("nodes", rank, "engine", "args", name),
                    f"--{plain} must be the same on every rank, else they wait for each other "
                    "forever [P88]",
                    "move it to engine.args, for all nodes; per node may differ: "
                    + ", ".join(sorted(RANK_LOCAL)),
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
    if _SECRET.search(name):
        yield finding(
            "engine.secret",
            f"{name} looks like a secret; the plan is world-readable",
            "remove it; the API key belongs in a file (api.key_file)",
        )
        return
    if value is None:
        if name in {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}:
            yield finding(
                "engine.socket-interface",
                f"without {name} the bootstrap picks any interface, a docker bridge included [P35]",
                "remove the line",
            )
        if name in {"NCCL_BUFFSIZE", "NCCL_MAX_NCHANNELS", "NCCL_PROTO"}:
            yield finding(
                "engine.nccl-buffers",
                f"without {name} NCCL pins up to 5 GiB of unified memory [P25]",
                "remove the line",
                "warning",
            )
        return
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
    if name in {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} and re.search(
        r"expandable_segments:\s*true", value, re.IGNORECASE
    ):
        yield finding(
            "engine.expandable-segments",
            "expandable segments give NaN logits for longer prompts and hard resets [P62, P64]",
            "use expandable_segments:False",
        )
    if name == "SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE" and value.lower() in {
        "1",
        "true",
        "yes",
        "y",
    }:
        yield finding(
            "engine.engram-host-table",
            "host memory is GPU memory on a Spark: the tables take 47 to 94 GiB of it",
            "remove it; rows are read from NVMe",
        )
    if name == "MAX_JOBS" and value.isdigit() and int(value) > 4:
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
    if name == "SGLANG_FLASHINFER_MOE_FUSED_FINALIZE" and value.lower() in {
        "1",
        "true",
        "yes",
        "y",
    }:
        yield finding(
            "engine.fused-finalize",
            "the fused finalize is not deterministic [P97]",
            'use "0"',
            "warning",
        )
    if name in {
        "SGLANG_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "FLASHINFER_WORKSPACE_BASE",
    } and value.startswith(
        ("/tmp", "/run", "/dev/shm")  # noqa: S108
    ):
        yield finding(
            "engine.cache-volatile",
            f"{value} is lost at reboot: every boot compiles and tunes again [P86]",
            "use a directory on disk",
            "warning",
        )
    if name == "NCCL_IB_HCA" and not value.startswith("="):
        yield finding(
            "engine.hca-prefix",
            "without a leading '=' names match by prefix: rocep1s0f0 also matches others",
            f"write ={value}",
        )


def check_effective(
    args: Mapping[str, Scalar],
    env: Mapping[str, str],
    rails: int,
    *,
    model_v41: bool,
    engram: bool,
) -> list[Finding]:
    """Judge the settings of rank 0 as they come out of all layers."""
    findings = []
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
    if engram:
        findings += _engram_loading(args)
    context = args.get("context-length")
    tails = args.get("swa-prefix-tails", 4 * running if isinstance(running, int) else None)
    if (
        model_v41
        and isinstance(context, int)
        and isinstance(tails, int)
        and context >= _LONG_SESSION
        and context * _TAILS_PER_TOKEN > 2 * tails
    ):
        findings.append(
            Finding(
                "engine.prefix-tails",
                ("engine", "args"),
                f"a cached session of {context:,} tokens keeps about "
                f"{round(context * _TAILS_PER_TOKEN)} prefix tails, the pool has {tails}: long "
                "sessions are computed again [P93]",
                f"set swa-prefix-tails: {round(context * _TAILS_PER_TOKEN)} "
                "(takes memory, see the budget)",
                "note",
            )
        )
    listed = env.get("NCCL_IB_HCA", "").lstrip("=").split(",")
    if rails and len([name for name in listed if name]) < rails:
        findings.append(
            Finding(
                "engine.half-rails",
                ("engine", "env", "NCCL_IB_HCA"),
                f"NCCL uses {len(listed)} of {rails} rails: about half the bandwidth [P11]",
                "remove NCCL_IB_HCA, the plan lists every rail",
                "warning",
            )
        )
    return findings


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


_LAZY_FORMATS: Final = ("auto", "safetensors", "dummy")
"""Load formats that read tensor by tensor (the Engram plugin refuses the others too)."""

_LONG_SESSION: Final = 250_000
"""Tokens from which re-computing a session hurts; shorter ones take seconds."""

_TAILS_PER_TOKEN: Final = 637 / 1_000_000
"""Prefix tails a cached session needs: about 637 for 1 M tokens (MiaAI-Lab #27, #43)."""
