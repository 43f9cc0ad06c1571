"""What a plan says: the published command, the environment, exports, mounts, units, order."""

from __future__ import annotations

import json
import re

import pytest
from clusters import EXAMPLES, ROOT, changed, document, findings_of, rendering_of

from spark_appliance import lockfile
from spark_appliance.model.plan import NodePlan, Plan, read_plan
from spark_appliance.render.storage import escape_path
from spark_appliance.workspace import open_cluster

PUBLISHED = """
--model-path /models/DeepSeek-V4.1-Flash --served-model-name deepseek-v4.1-flash
--trust-remote-code --load-format safetensors --tp 4 --ep-size 1 --attention-backend dsv4
--moe-runner-backend flashinfer_mxfp4 --mem-fraction-static 0.78 --chunked-prefill-size 4096
--context-length 1048576 --max-running-requests 16 --cuda-graph-max-bs-decode 16 --random-seed 0
--enable-decoder-swa-bounded-replay --enable-cache-report --tool-call-parser deepseekv41
--reasoning-parser deepseek-v41 --host 0.0.0.0 --port 8888 --speculative-algorithm DSPARK
--speculative-dspark-block-size 5 --nnodes 4 --node-rank 0 --dist-init-addr 192.168.1.11:20000
--max-total-tokens 6000000 --fp8-gemm-backend flashinfer_cutlass --watchdog-timeout 600
"""


def plan_of(kind: str = "triangle", count: int = 3, profile: str | None = None) -> Plan:
    plan = rendering_of(document(kind, count, profile)).plan
    assert plan is not None
    return plan


def example(name: str) -> Plan:
    return open_cluster(ROOT / "examples" / name / "cluster.yaml").require_plan()


def test_the_published_four_spark_command() -> None:
    argv = example("four-spark-switch").nodes[0].argv
    assert argv[:3] == ["python3", "-m", "sglang.launch_server"]
    assert argv[3:] == PUBLISHED.split()


def test_workers_differ_from_the_head_in_rank_and_bind_address_alone() -> None:
    head, *workers = example("four-spark-switch").nodes
    for worker in workers:
        changes = [
            (old, new) for old, new in zip(head.argv, worker.argv, strict=True) if old != new
        ]
        assert changes == [("0.0.0.0", "127.0.0.1"), ("0", str(worker.rank))]


@pytest.mark.parametrize("name", EXAMPLES)
def test_committed_lock_is_what_the_example_renders(name: str) -> None:
    committed = (ROOT / "examples" / name / lockfile.LOCK_NAME).read_text(encoding="utf-8")
    assert committed == lockfile.dump(example(name))


@pytest.mark.parametrize("name", EXAMPLES)
def test_plan_survives_its_file(name: str) -> None:
    plan = example(name)
    again, findings = read_plan(json.loads(lockfile.dump(plan)))
    assert not findings
    assert again == plan


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_variable_is_empty_static_or_foreign(name: str) -> None:
    for node in example(name).nodes:
        assert "NCCL_IB_GID_INDEX" not in node.env
        assert all(value.strip() for value in node.env.values())
        assert not [key for key in node.env if key.startswith(("DSV41_", "B12X_"))]
        assert list(node.env) == sorted(node.env)


def test_environment_of_a_triangle_node() -> None:
    env = plan_of().nodes[0].env
    assert env["NCCL_IB_HCA"] == "=rocep1s0f0:1,roceP2p1s0f0:1,rocep1s0f1:1,roceP2p1s0f1:1"
    assert env["NCCL_SOCKET_IFNAME"] == env["GLOO_SOCKET_IFNAME"] == "enP7s7"
    assert env["NCCL_IB_SUBNET_AWARE_ROUTING"] == "1"
    assert env["NCCL_IB_MERGE_NICS"] == "0"
    assert env["SPARK_ENGRAM_DIR"] == "/var/lib/spark/engram"
    assert env["SPARK_TP_PAD"] == "1"
    assert env["SGLANG_PLUGINS"] == "spark_engram,spark_tp_pad"
    assert env["MAX_JOBS"] == "2"
    assert env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False"


def test_environment_by_topology() -> None:
    switch = plan_of("switch", 4).nodes[0].env
    assert switch["NCCL_IB_HCA"] == "=rocep1s0f0:1,roceP2p1s0f0:1"
    assert "NCCL_ALGO" not in switch
    assert "SPARK_TP_PAD" not in switch
    ring = plan_of("ring", 4).nodes[0].env
    assert ring["NCCL_ALGO"] == "Ring"
    assert ring["NCCL_SWITCHLESS_RING_ONLY"] == "1"
    assert ring["NCCL_IB_EXTENDED_IPV4_GIDS"] == "1"
    assert ring["LD_PRELOAD"] == ring["SGLANG_NCCL_SO_PATH"] == "/opt/libnccl.so.2"
    assert "LD_PRELOAD" not in switch
    assert ring["NCCL_MAX_NCHANNELS"] == ring["NCCL_MIN_NCHANNELS"] == "4"


def test_ring_library_is_on_every_node() -> None:
    libraries = {
        (node.nccl_library.path, node.nccl_library.sha256)
        for node in plan_of("ring", 4).nodes
        if node.nccl_library
    }
    assert libraries == {("/opt/libnccl.so.2", "a" * 64)}


def test_export_allows_exactly_the_addresses_that_mount() -> None:
    plan = plan_of()
    export = plan.nodes[0].weights.export
    assert export is not None
    assert export.clients == ["10.77.112.2", "10.77.113.3", "10.77.212.2", "10.77.213.3"]
    assert export.options == ["ro", "sync", "no_subtree_check", "root_squash", "fsid=0"]
    assert export.threads == 32
    workers = {rail.address.split("/")[0] for node in plan.nodes[1:] for rail in node.rails}
    assert set(export.clients) <= workers


def test_every_worker_mounts_over_its_own_cable() -> None:
    mounts = [node.weights.mount for node in plan_of().nodes[1:]]
    assert [mount.what for mount in mounts if mount] == ["10.77.112.1:/", "10.77.113.1:/"]
    assert mounts[0] is not None
    assert mounts[0].unit == r"models-DeepSeek\x2dV4.1\x2dFlash.mount"
    assert mounts[0].options == [
        "ro",
        "vers=4.2",
        "rsize=1048576",
        "wsize=1048576",
        "hard",
        "timeo=600",
        "noatime",
        "_netdev",
        "nofail",
        "proto=tcp",
        "nconnect=8",
    ]


def test_nfs_over_rdma() -> None:
    plan = rendering_of(changed(document(), "weights", to={"rdma": True})).plan
    assert plan is not None
    mount = plan.nodes[1].weights.mount
    assert mount is not None
    assert mount.options[-2:] == ["proto=rdma", "port=20049"]
    assert "rpcrdma" in plan.nodes[1].kernel_modules
    assert "svcrdma" in plan.nodes[0].kernel_modules


@pytest.mark.parametrize(("kind", "count"), [("ring", 4), ("single", 1)])
def test_local_copies_where_nfs_cannot_reach(kind: str, count: int) -> None:
    plan = plan_of(kind, count)
    assert {node.weights.mode for node in plan.nodes} == {"local"}
    assert plan.ports.nfs is None


def names(node: NodePlan) -> list[str]:
    return [unit.name for unit in node.units]


def test_units_of_head_and_worker() -> None:
    head, worker, _ = plan_of().nodes
    assert names(head) == [
        "spark-fabric.service",
        "nfs-server.service",
        "spark-engram-pack.service",
        "spark-guard.service",
        "spark-supervisor.service",
        "spark-engine.service",
        "spark-ready.service",
        "spark.target",
    ]
    assert names(worker) == [
        "spark-fabric.service",
        r"models-DeepSeek\x2dV4.1\x2dFlash.mount",
        "spark-engram-pack.service",
        "spark-guard.service",
        "spark-supervisor.service",
        "spark-engine.service",
        "spark.target",
    ]


@pytest.mark.parametrize("name", EXAMPLES)
def test_units_come_after_what_they_need(name: str) -> None:
    for node in example(name).nodes:
        own = names(node)
        for unit in node.units:
            assert set(unit.requires) <= set(unit.after)
            for other in unit.after:
                if other in own:
                    assert own.index(other) < own.index(unit.name)


def test_stop_leaves_export_and_mounts_up() -> None:
    for node in plan_of().nodes:
        for unit in node.units:
            lasting = unit.type in ("mount", "system")
            stopped = unit.name == "spark.target" or "spark.target" in unit.part_of
            assert stopped != lasting


def test_engram_disk_is_mounted_before_packing() -> None:
    plan = example("three-spark-triangle")
    engram = plan.nodes[0].engram
    assert engram is not None
    assert engram.directory == "/var/lib/spark/engram"
    assert engram.mount_unit == "var-lib-spark-engram.mount"
    pack = next(unit for unit in plan.nodes[0].units if unit.name == "spark-engram-pack.service")
    assert "var-lib-spark-engram.mount" in pack.requires


def test_start_and_pack_order() -> None:
    assert plan_of().start_order == [["spark2", "spark3"], ["spark1"]]
    assert plan_of().pack_order == [["spark1"], ["spark2", "spark3"]]
    ring = plan_of("ring", 4)
    assert ring.pack_order == [["spark1", "spark2", "spark3", "spark4"]]
    assert plan_of("single", 1).start_order == [["spark1"]]


def test_key_is_a_path_in_a_config_file_of_the_head_alone() -> None:
    plan = plan_of()
    head, *workers = plan.nodes
    assert head.argv[-2:] != ["--api-key"]
    place = head.argv.index("--config")
    assert head.argv[place + 1] == head.config_file == "/run/spark-engine/config.yaml"
    assert all(worker.config_file is None and "--config" not in worker.argv for worker in workers)
    assert plan.api.key_file == "/etc/spark/api-key"


def test_firewall_trusts_rails_and_peers_only() -> None:
    head, worker, _ = plan_of().nodes
    assert head.firewall.trusted_interfaces == [rail.netdev for rail in head.rails]
    assert head.firewall.api_port == 8888
    assert worker.firewall.api_port is None
    assert worker.firewall.peer_addresses == ["192.168.1.11", "192.168.1.13"]
    local = rendering_of(changed(document(), "api", "bind", to="127.0.0.1")).plan
    assert local is not None
    assert local.nodes[0].firewall.api_port is None


def test_health_asks_for_a_generation_on_the_head_itself() -> None:
    health = plan_of().health
    assert health.generate_url == "http://127.0.0.1:8888/v1/chat/completions"
    assert health.live_url == "http://127.0.0.1:8888/health"
    assert health.generate_body["model"] == "deepseek-v4.1-flash"
    bound = rendering_of(changed(document(), "api", "bind", to="192.168.1.11")).plan
    assert bound is not None
    assert bound.health.live_url == "http://192.168.1.11:8888/health"


def test_sysctl_keeps_twins_from_answering_for_each_other() -> None:
    values = plan_of().nodes[0].sysctl
    assert values["net.ipv4.conf.enP2p1s0f1np1.arp_ignore"] == "1"
    assert values["net.ipv4.conf.enP2p1s0f1np1.arp_announce"] == "2"
    assert plan_of("ring", 4).nodes[0].sysctl["net.ipv4.conf.enp1s0f0np0.rp_filter"] == "2"


def test_memory_in_the_plan_is_the_budget_in_bytes() -> None:
    rendering = rendering_of(document())
    assert rendering.plan is not None
    for node, budget in zip(rendering.plan.nodes, rendering.budgets, strict=True):
        assert node.memory.used == sum(part.bytes for part in node.memory.parts)
        assert node.memory.used == pytest.approx(budget.used_gib * (1 << 30), abs=16)


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        ("/", "-"),
        ("/models/A-b", r"models-A\x2db"),
        ("/var//lib/", "var-lib"),
        ("/a b/é", r"a\x20b-\xc3\xa9"),
        ("/.hidden/x.y", r"\x2ehidden-x.y"),
    ],
)
def test_mount_unit_names_are_those_of_systemd(path: str, unit: str) -> None:
    # expected values: systemd-escape --path
    assert escape_path(path) == unit


def test_cluster_name_and_hashes_are_in_the_plan() -> None:
    source = plan_of().source
    assert re.fullmatch(r"[0-9a-f]{64}", source.cluster_sha256)
    assert re.fullmatch(r"[0-9a-f]{64}", source.profile_sha256)
    other = rendering_of(changed(document(), "api", "port", to=8889)).plan
    assert other is not None
    assert other.source.cluster_sha256 != source.cluster_sha256


def test_the_image_goes_by_its_digest() -> None:
    digest = "sha256:" + "a" * 64
    data = document()
    data["image"] = {"reference": "registry.lan:5000/spark-engine:v1", "digest": digest}
    plan = rendering_of(data).plan
    assert plan is not None and plan.image is not None
    assert plan.image.name == f"registry.lan:5000/spark-engine@{digest}"
    assert plan.image.reference == "registry.lan:5000/spark-engine:v1"
    data["image"] = {"digest": digest}
    plan = rendering_of(data).plan
    assert plan is not None and plan.image is not None
    assert plan.image.name == digest


def test_an_image_by_tag_alone_is_refused() -> None:
    data = document()
    data["image"] = {"reference": "registry.lan:5000/spark-engine:v1"}
    assert [(f.rule, f.path) for f in findings_of(data)] == [
        ("schema.missing", ("image", "digest"))
    ]
