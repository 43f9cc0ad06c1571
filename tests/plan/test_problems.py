"""Known problems of the field that a cluster file can show, each caught by a rule.

Numbers are rows of the problem catalogue, docs/problems.md.
"""

from __future__ import annotations

from typing import Any

import pytest
from clusters import addressed, changed, document, findings_of, rendering_of, rules_of


def with_args(**args: Any) -> dict[str, Any]:
    named = {name.replace("_", "-"): value for name, value in args.items()}
    return changed(document(), "engine", to={"args": named})


def with_env(**env: str | None) -> dict[str, Any]:
    return changed(document(), "engine", to={"env": env})


CASES: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "P10 twins in one subnet",
        changed(addressed(), "nodes", 0, "addresses", "enp1s0f0np0", to="10.77.212.9/24"),
        "error",
        "topology.twins-share-subnet",
    ),
    (
        "P11 half the rails",
        with_env(NCCL_IB_HCA="=rocep1s0f0:1,rocep1s0f1:1"),
        "error",
        "engine.variable-owned",
    ),
    (
        "P17 ring with stock NCCL",
        changed(document("ring", 4), "topology", "nccl_library", to=None),
        "error",
        "topology.ring-nccl",
    ),
    (
        "P25 NCCL buffers left at their defaults",
        with_env(NCCL_BUFFSIZE=None),
        "warning",
        "engine.nccl-buffers",
    ),
    (
        "P35 bootstrap interface unset",
        with_env(NCCL_SOCKET_IFNAME=None),
        "error",
        "engine.variable-owned",
    ),
    ("P03 static GID index", with_env(NCCL_IB_GID_INDEX="3"), "error", "engine.static-gid"),
    ("P04 empty variable", with_env(NCCL_IB_TC=" "), "error", "engine.empty-variable"),
    (
        "P44 many NFS reader threads",
        with_args(weight_loader_prefetch_num_threads=16),
        "warning",
        "engine.prefetch-threads",
    ),
    (
        "P43 a loader that reads the Engram tables",
        with_args(weight_loader_prefetch_checkpoints=True),
        "error",
        "engine.reads-engram-tables",
    ),
    (
        "another load format",
        with_args(load_format="fastsafetensors"),
        "error",
        "engine.reads-engram-tables",
    ),
    (
        "prefetch with mmap off",
        changed(
            document("single", 1),
            "engine",
            to={
                "args": {
                    "weight-loader-prefetch-checkpoints": True,
                    "weight-loader-disable-mmap": True,
                }
            },
        ),
        "error",
        "engine.prefetch-without-mmap",
    ),
    (
        "P62 P64 expandable segments",
        with_env(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:512,expandable_segments:True"),
        "error",
        "engine.expandable-segments",
    ),
    (
        "P65 fraction below the floor",
        with_args(mem_fraction_static=0.9),
        "error",
        "memory.fraction-too-low",
    ),
    (
        "P66 pool below one request",
        with_args(max_total_tokens=100_000),
        "error",
        "memory.pool-below-context",
    ),
    (
        "P76 too many slots",
        with_args(max_running_requests=64, cuda_graph_max_bs_decode=64),
        "error",
        "memory.does-not-fit",
    ),
    ("P67 Ray", with_args(use_ray=True), "error", "engine.ray"),
    ("P68 many compile jobs", with_env(MAX_JOBS="20"), "error", "engine.max-jobs"),
    ("P85 cargo probe", with_env(SGLANG_RUST_BUILD_MODE="auto"), "warning", "engine.rust-build"),
    (
        "P86 caches lost at boot",
        with_env(TRITON_CACHE_DIR="/tmp/triton"),
        "warning",
        "engine.cache-volatile",
    ),
    (
        "P88 ranks disagree",
        changed(document(), "nodes", 1, "engine", to={"args": {"chunked-prefill-size": 256}}),
        "error",
        "engine.ranks-disagree",
    ),
    ("P90 TP4 EP1 width", document("switch", 4, "million-tp4"), "note", "parallel.width-padded"),
    ("P93 prefix tails", document("switch", 4), "note", "engine.prefix-tails"),
    ("P95 admission delay", document("switch", 4, "million-tp4"), "note", "engine.admission-delay"),
    (
        "P97 fused finalize",
        with_env(SGLANG_FLASHINFER_MOE_FUSED_FINALIZE="1"),
        "warning",
        "engine.fused-finalize",
    ),
    ("P99 HiCache", with_args(enable_hierarchical_cache=True), "error", "engine.hicache"),
    ("P34 API without a key", changed(document(), "api", to={}), "warning", "api.no-key"),
    (
        "Engram tables in host memory",
        with_env(SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE="1"),
        "error",
        "engine.engram-host-table",
    ),
    ("variables of other forks", with_env(DSV41_TP_PAD="1"), "error", "engine.foreign-variable"),
    ("a secret in the plan", with_env(HF_TOKEN="x"), "error", "engine.secret"),
    (
        "a secret in a proxy address",
        with_env(HTTPS_PROXY="http://u:pw@h"),
        "error",
        "engine.secret",
    ),
    (
        "context beyond the model",
        with_args(context_length=1_100_000, max_total_tokens=1_100_000),
        "error",
        "engine.context-too-long",
    ),
    (
        "chunk that is no multiple of a page",
        with_args(chunked_prefill_size=800),
        "error",
        "engine.chunk-not-paged",
    ),
    (
        "fewer graphs than requests",
        with_args(cuda_graph_max_bs_decode=2),
        "warning",
        "engine.graphs-below-running",
    ),
    ("a size left to the engine", with_args(max_total_tokens=None), "error", "engine.size-unknown"),
    (
        "a size that is negative",
        with_args(swa_prefix_tails=-100_000),
        "error",
        "engine.size-not-a-number",
    ),
    (
        "a size beyond sense",
        with_args(max_total_tokens=10**400),
        "error",
        "engine.size-not-a-number",
    ),
    ("fraction out of range", with_args(mem_fraction_static=1.5), "error", "engine.mem-fraction"),
    ("a flag without a value", with_args(log_level=""), "error", "engine.bad-value"),
    ("a flag of two lines", with_args(log_level="info\n--host 1"), "error", "engine.bad-value"),
    ("not a number", with_args(soft_watchdog_timeout=float("nan")), "error", "engine.bad-value"),
    ("a misspelt flag", with_args(max_running_request=4), "error", "engine.unknown-flag"),
    ("a shortened flag of the plan", with_args(api_k="x"), "error", "engine.unknown-flag"),
    (
        "fraction of one node below the floor",
        changed(document(), "nodes", 1, "engine", to={"args": {"mem-fraction-static": 0.9}}),
        "error",
        "memory.fraction-too-low",
    ),
    (
        "a flag smuggled in as a value",
        with_args(tokenizer_path="--tp-size=1"),
        "error",
        "engine.bad-value",
    ),
    ("a switch with a value", with_args(enable_metrics=1), "error", "engine.bad-value"),
    ("a value left out", with_args(log_level=True), "error", "engine.bad-value"),
    ("a choice that is none", with_args(attention_backend="banana"), "error", "engine.bad-value"),
    ("EP as text", with_args(ep_size="3"), "error", "engine.bad-value"),
    ("EP under both its names", with_args(ep=3, ep_size=3), "error", "engine.flag-twice"),
    ("pipeline parallelism", with_args(pp_size=2), "error", "engine.flag-unplanned"),
    ("data parallelism", with_args(dp_size=3), "error", "engine.flag-unplanned"),
    ("another KV type", with_args(kv_cache_dtype="bfloat16"), "error", "engine.flag-unplanned"),
    (
        "a password on the command line",
        with_args(ssl_keyfile_password="x"),
        "error",
        "engine.secret",
    ),
    ("the plugins switched off", with_env(SPARK_TP_PAD="0"), "error", "engine.variable-owned"),
    ("sockets instead of RDMA", with_env(NCCL_NET="Socket"), "error", "engine.variable-owned"),
    (
        "P25 a huge NCCL buffer",
        with_env(NCCL_BUFFSIZE="999999999"),
        "warning",
        "engine.nccl-buffers",
    ),
    ("a variable nobody reads", with_env(SGLANG_TYPO="1"), "error", "engine.unknown-variable"),
    (
        "P88 a variable of one rank",
        changed(document(), "nodes", 1, "engine", to={"env": {"NCCL_PROTO": "LL"}}),
        "error",
        "engine.ranks-disagree",
    ),
    (
        "fraction of one node is no number",
        changed(document(), "nodes", 1, "engine", to={"args": {"mem-fraction-static": 1.5}}),
        "error",
        "engine.mem-fraction",
    ),
    (
        "a draft without its algorithm",
        with_args(speculative_algorithm=None),
        "error",
        "engine.draft-without-algorithm",
    ),
    ("a flag of the plan", with_args(nnodes=4), "error", "engine.flag-owned"),
    ("the key on the command line", with_args(api_key="sk-1"), "error", "engine.flag-owned"),
    (
        "profile for another size",
        document("switch", 4, "stable-tp3"),
        "error",
        "profile.node-count",
    ),
    (
        "two nodes of one name",
        changed(document(), "nodes", 2, "name", to="spark1"),
        "error",
        "nodes.name-used-twice",
    ),
    (
        "two nodes of one address",
        changed(document(), "nodes", 2, "address", to="192.168.1.11"),
        "error",
        "nodes.address-used-twice",
    ),
    (
        "one port for two services",
        changed(document(), "ports", to={"rendezvous": 8888}),
        "error",
        "ports.used-twice",
    ),
    (
        "the router on the engine's port",
        changed(
            document(),
            "router",
            to={"port": 8888, "replicas": [{"name": "east", "url": "http://192.168.1.21:8888"}]},
        ),
        "error",
        "ports.used-twice",
    ),
    ("the NFS port", changed(document(), "api", "port", to=2049), "error", "ports.used-twice"),
    (
        "no place for Engram",
        changed(document(), "nodes", 1, "engram", to=None),
        "error",
        "engram.place-missing",
    ),
    (
        "two places for Engram",
        changed(
            document(),
            "nodes",
            1,
            "engram",
            to={"device": "/dev/disk/by-id/x", "directory": "/data/x"},
        ),
        "error",
        "engram.one-place",
    ),
    (
        "Engram on an unstable device",
        changed(document(), "nodes", 1, "engram", to={"device": "/dev/nvme0n1"}),
        "error",
        "engram.device-unstable",
    ),
    (
        "NFS in a ring",
        changed(document("ring", 4), "weights", to={"mode": "nfs"}),
        "error",
        "weights.nfs-ring",
    ),
    (
        "NFS with one node",
        changed(document("single", 1), "weights", to={"mode": "nfs"}),
        "error",
        "weights.nfs-single",
    ),
    (
        "Engram place for a model without",
        changed(document("single", 1), "nodes", 0, "engram", to={"directory": "/data/x"}),
        "note",
        "engram.place-unused",
    ),
]


@pytest.mark.parametrize(
    ("data", "severity", "rule"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_problem_is_caught(data: dict[str, Any], severity: str, rule: str) -> None:
    found = [f for f in findings_of(data) if f.rule == rule]
    assert found, rules_of(data, "error", "warning", "note")
    assert {f.severity for f in found} == {severity}
    assert all(f.remedy for f in found)
    if severity == "error":
        assert rendering_of(data).plan is None
        # nothing but what was broken; a second rule may follow from the same value
        assert set(rules_of(data)) <= {rule, "engine.size-not-a-number"}


def test_a_clean_cluster_has_nothing_to_say() -> None:
    assert rules_of(document("single", 1), "error", "warning", "note") == []
    assert rules_of(document(), "error", "warning") == []


def test_dgx_os_without_an_image_is_said() -> None:
    data = document()
    del data["image"]
    assert rules_of(data, "error", "warning") == ["image.missing"]
    for node in data["nodes"]:
        node["system"] = "nixos"
    assert rules_of(data, "error", "warning") == []


def test_precedence_is_profile_then_cluster_then_node() -> None:
    data = document()
    data["engine"] = {
        "args": {"log-level": "info", "watchdog-timeout": 700},
        "env": {"NCCL_DEBUG": "INFO", "NCCL_PROTO": None},
    }
    data["nodes"][1]["engine"] = {
        "args": {"log-level": "debug", "sleep-on-idle": False},
        "env": {"NCCL_DEBUG": "TRACE"},
    }
    plan = rendering_of(data).plan
    assert plan is not None
    head, second, _ = plan.nodes
    assert head.argv[head.argv.index("--log-level") + 1] == "info"
    assert second.argv[second.argv.index("--log-level") + 1] == "debug"
    assert head.argv[head.argv.index("--watchdog-timeout") + 1] == "700"
    assert "--sleep-on-idle" in head.argv
    assert "--sleep-on-idle" not in second.argv
    assert head.env["NCCL_DEBUG"] == "INFO"
    assert second.env["NCCL_DEBUG"] == "TRACE"
    assert "NCCL_PROTO" not in head.env


def test_aliases_of_a_flag_are_one_flag() -> None:
    data = changed(document("switch", 4, "million-tp4"), "engine", to={"args": {"ep": 2}})
    plan = rendering_of(data).plan
    assert plan is not None
    assert plan.parallel.ep == 2
    assert plan.nodes[0].argv.count("--ep-size") == 1
    assert "--ep" not in plan.nodes[0].argv
