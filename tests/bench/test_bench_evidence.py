"""Evidence: nodes over SSH, the engine's own words without secrets, the plan, the moment."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_appliance import lockfile
from spark_appliance.bench import (
    endpoint,
    engine,
    evidence,
    findings,
    nodes,
    planfile,
    preflight,
    store,
)
from spark_appliance.bench.result import LoadReading, NodeSample
from spark_appliance.errors import InputError, OperationError
from spark_appliance.ssh import Host
from spark_appliance.workspace import open_cluster

EXAMPLE = Path(__file__).parents[2] / "examples" / "three-spark-triangle" / "cluster.yaml"


@pytest.fixture
def spark(tmp_path, monkeypatch):
    """An ``ssh`` that runs the script here, and an ``nvidia-smi`` that answers as a GB10."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(
        "#!/bin/sh\n"
        f'for word; do printf "%s\\n" "$word" >> {tmp_path}/ssh-words; last="$word"; done\n'
        f'case "$*" in *unreachable*) echo "ssh: connect to host x: No route to host" >&2;'
        " exit 255;; esac\n"
        'exec sh -c "$last"\n'
    )
    (folder / "nvidia-smi").write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {tmp_path}/smi-calls\n'
        'case "$1 $2" in\n'
        '*utilization.gpu*) echo "96, 38.50, 61, 2411, [N/A], [N/A]" ;;\n'
        '*=name*) echo "NVIDIA GB10" ;;\n'
        '*driver_version*) echo "580.95.05" ;;\n'
        '*power.limit*) echo "[N/A]" ;;\n'
        '*) echo "[Not Supported]" ;;\n'
        "esac\n"
    )
    (folder / "docker").write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        "*container*) echo sha256:aaaa ;;\n"
        "*image*) echo lmsysorg/sglang@sha256:bbbb ;;\n"
        "esac\n"
    )
    for program in folder.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path


def test_facts_of_a_node(spark):
    facts = nodes.facts(Host("spark1"))
    assert facts["kernel"] == os.uname().release
    assert facts["gpu.name"] == "NVIDIA GB10"
    assert facts["gpu.driver_version"] == "580.95.05"
    assert facts["gpu.power.limit"] == "[N/A]"
    assert facts["image.digest"] == "lmsysorg/sglang@sha256:bbbb"
    assert int(facts["mem_total_kib"]) > 0
    words = (spark / "ssh-words").read_text()
    assert "BatchMode=yes" in words
    assert "nvidia-smi" not in words  # the script travels on standard input


def test_a_run_with_nodes(server, bench, tmp_path, spark):
    endpoint_ = server(rate=300)
    done = bench(
        endpoint_.url, "--max-tokens", "150", "--samples", "1", "--warmup", "0", "--out", "r.json",
        "--node", "spark1=admin@spark1", "--node", "spark2=unreachable",
    )  # fmt: skip
    assert done.status == 0, done.err
    one, two = store.load(tmp_path / "r.json").evidence.nodes
    assert one.name == "spark1"
    assert one.facts["gpu.name"] == "NVIDIA GB10"
    sample = one.samples[0]
    assert (sample.sm_utilization_pct, sample.power_w, sample.sm_clock_mhz) == (96, 38.5, 2411)
    assert sample.memory_clock_mhz == sample.gpu_memory_used_mib == "N/A"
    assert sample.mem_available_kib > 0
    # The sampler never asks more often than every 10 s: once, in a run this short.
    calls = (spark / "smi-calls").read_text().splitlines()
    assert sum("utilization.gpu" in call for call in calls) == 1
    assert "No route to host" in two.error
    assert "node spark2:" in done.err
    assert two.samples == []
    result = store.load(tmp_path / "r.json")
    assert result.evidence.image_digest == "lmsysorg/sglang@sha256:bbbb"
    assert "| spark1 |" in done.out


def test_a_node_that_answers_late_does_not_hold_up_an_interrupt(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(nodes, "facts", lambda _host: release.wait(60) or {})
    monkeypatch.setattr(nodes, "_STOP_S", 0.01)
    sampler = nodes.Sampler([("a", Host("a"))])
    sampler.start(0.0)
    assert not sampler.ready
    sampler.stop()  # returns although the node has not answered
    release.set()


def test_nodes_are_not_read_more_often(bench):
    with pytest.raises(OperationError, match="every 10 s at most"):
        nodes.Sampler([("a", Host("a"))], interval_s=5)
    done = bench("http://127.0.0.1:1", "--sample-interval", "2")
    assert done.status == 2


def reading(t: float, **more: object) -> NodeSample:
    values = {"sm_utilization_pct": 96.0, "power_w": 40.0, "temperature_c": 60.0,
              "sm_clock_mhz": 2400.0, "memory_clock_mhz": "N/A", "gpu_memory_used_mib": "N/A",
              "mem_available_kib": 1000.0, **more}  # fmt: skip
    return NodeSample(t=t, **values)


def test_means_are_over_generating_readings_only():
    samples = [
        reading(5, power_w=10.0),  # before the first timed round
        reading(15, power_w=40.0, mem_available_kib=900.0),
        reading(25, power_w=50.0, mem_available_kib=700.0),
        reading(27, power_w=99.0, sm_utilization_pct=49.0),
        reading(28, power_w=99.0, sm_utilization_pct="N/A"),
        reading(45, power_w=99.0),  # between rounds
    ]
    use = nodes.use(samples, [(10, 30), (50, 60)])
    assert use.readings == 2
    assert use.power_w == 45.0
    assert use.mem_available_kib == 800.0
    assert use.mem_available_min_kib == 700.0
    assert use.gpu_memory_used_mib == "N/A"  # and not 0
    assert nodes.use(samples, []) is None


def test_na_power_stays_na():
    use = nodes.use([reading(1, power_w="N/A"), reading(2, power_w="N/A")], [(0, 9)])
    assert use.power_w == "N/A"
    mixed = nodes.use([reading(1, power_w="N/A"), reading(2, power_w=30.0)], [(0, 9)])
    assert mixed.power_w == 30.0


@pytest.mark.parametrize(
    "line",
    ["", "Welcome to DGX Spark", "sample 1, 2", "sample", "other 1, 2, 3, 4, 5, 6, 7"],
)
def test_other_lines_are_no_samples(line):
    assert nodes.parse_sample(line, 0.0) is None


def test_all_spellings_of_no_number():
    line = "sample [N/A], N/A, [Not Supported], [Unknown Error], , 5, 7"
    found = nodes.parse_sample(line, 1.5)
    assert found.t == 1.5
    assert found.sm_utilization_pct == found.power_w == found.temperature_c == "N/A"
    assert found.sm_clock_mhz == found.memory_clock_mhz == "N/A"
    assert (found.gpu_memory_used_mib, found.mem_available_kib) == (5, 7)


def test_resumed_readings_are_joined():
    old = nodes.Node(name="a", facts={"kernel": "1"}, samples=[reading(1)])
    gone = nodes.Node(name="b", facts={})
    new = nodes.Node(name="a", facts={"kernel": "2"}, samples=[reading(100)])
    merged = {n.name: n for n in evidence.merge_nodes([old, gone], [new], [(0, 200)])}
    assert merged["a"].facts == {"kernel": "2"}
    assert [s.t for s in merged["a"].samples] == [1, 100]
    assert merged["a"].use.readings == 2
    assert "b" in merged


# ------------------------------------------------------------------------------ the plan


def test_plan(server, bench, tmp_path, spark):
    plan = open_cluster(EXAMPLE).require_plan()
    path = tmp_path / "cluster.lock.json"
    path.write_text(lockfile.dump(plan))
    facts = planfile.read(path)
    assert [name for name, _ in facts.nodes] == [node.name for node in plan.nodes]
    assert facts.api_url == plan.api.url
    endpoint_ = server(rate=150, model=plan.model.served_name)
    done = bench(endpoint_.url, "--plan", "cluster.lock.json", "--max-tokens", "20", "--samples",
                 "1", "--out", "r.json")  # fmt: skip
    assert done.status == 0, done.err
    result = store.load(tmp_path / "r.json")
    assert result.evidence.plan_sha256 == facts.sha256
    assert [n.name for n in result.evidence.nodes] == [node.name for node in plan.nodes]
    assert result.endpoint.model == plan.model.served_name
    words = (spark / "ssh-words").read_text().splitlines()
    assert {node.ssh for node in plan.nodes} <= set(words)


def test_plan_names_the_endpoint(bench, tmp_path):
    plan = open_cluster(EXAMPLE).require_plan()
    gone = plan.api.model_copy(update={"url": "http://127.0.0.1:9"})
    text = lockfile.dump(plan.model_copy(update={"api": gone}))
    (tmp_path / "cluster.lock.json").write_text(text)
    done = bench("--plan", "cluster.lock.json", "--no-nodes")
    assert done.status == 1
    assert "http://127.0.0.1:9/v1" in done.err


def test_no_plan(bench, tmp_path):
    (tmp_path / "x.json").write_text("{")
    assert bench("http://127.0.0.1:9", "--plan", "x.json").status == 2
    assert bench("http://127.0.0.1:9", "--plan", "none.json").status == 2


# ------------------------------------------------------------------- the engine's own words


@given(st.text("abcdefghij0123456789-", min_size=8, max_size=40))
def test_redaction(secret):
    info = {
        "api_key": secret,
        "admin_api_key": None,
        "launch_command": f"python -m sglang --api-key {secret} --tokenizer-path x --tp 4",
        "argv": ["--admin-api-key", secret, "--port", "30000"],
        "note": f"key={secret}",
        "env_vars": {"HF_TOKEN": "hf_abc", "NCCL_NET": "IB"},
        "max_total_num_tokens": 750000,
        "tokenizer_path": "/models/x",
    }
    clean = engine.redact(info, (secret,))
    assert secret not in str(clean)
    assert "hf_abc" not in str(clean)
    assert clean["admin_api_key"] is None
    assert clean["max_total_num_tokens"] == 750000
    assert clean["tokenizer_path"] == "/models/x"
    assert clean["env_vars"]["NCCL_NET"] == "IB"
    assert clean["launch_command"].endswith("--tokenizer-path x --tp 4")
    assert engine.redact(info)["argv"] == ["--admin-api-key", "***", "--port", "30000"]


def test_metrics_are_summed_over_labels():
    text = (
        "# HELP x y\n# TYPE sglang:num_running_reqs gauge\n"
        'sglang:num_running_reqs{model_name="m",tp_rank="0"} 2.0\n'
        'sglang:num_running_reqs{model_name="m",tp_rank="0",dp="1"} 1\n'
        "sglang:num_queue_reqs NaN\nprocess_cpu 1e3\n"
    )
    found = engine.parse_metrics(text)
    assert found["sglang:num_running_reqs"] == 3
    assert "sglang:num_queue_reqs" not in found
    assert found["process_cpu"] == 1000


# --------------------------------------------------------------------------- moment and place


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_busy_endpoint_is_refused(server, bench, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(preflight, "_SETTLE_S", 0.01)
    endpoint_ = server(strangers=2, engine=kind)
    for arguments in ([endpoint_.url], ["check", endpoint_.url], ["--check", endpoint_.url]):
        done = bench(*arguments)
        assert done.status == 1
        assert "the endpoint is busy: 2 requests running, 0 waiting" in done.err
    assert list(tmp_path.glob("*.json")) == []
    assert endpoint_.truth() == []  # nothing was sent
    done = bench(endpoint_.url, "--no-check", "--max-tokens", "20", "--out", "r.json")
    assert done.status == 0
    assert "(--no-check)" in done.out


def test_an_endpoint_that_does_not_tell(server, bench):
    endpoint_ = server(engine="other", rate=150)
    done = bench(endpoint_.url, "--max-tokens", "20")
    assert done.status == 0
    assert "does not say whether other requests run" in done.out
    done = bench("--check", endpoint_.url, "--max-tokens", "20")
    assert done.status == 1
    assert "[load-unknown]" in done.err


def test_check_says_what_is_there(server, bench):
    done = bench("check", server(context=4096).url)
    assert done.status == 0
    assert done.out == "test-model: sglang 0.5.23, context length 4096\n"
    assert "runs on the machine that serves" in done.err  # 127.0.0.1 is this machine


def test_whose_address_it_is():
    assert preflight.is_this_machine("127.0.0.1", 80)
    assert preflight.is_this_machine("localhost", 80)
    assert preflight.is_this_machine("127.0.0.2", 80)  # all of 127.0.0.0/8
    assert not preflight.is_this_machine("192.0.2.1", 80)  # RFC 5737: nobody's
    assert not preflight.is_this_machine("no-such-host.invalid", 80)


def test_strangers_during_the_run_are_found(make_group):
    group = make_group(concurrency=2, started=10.0, ended=20.0)
    ours = LoadReading(t=15, running=2, waiting=0)
    theirs = LoadReading(t=16, running=2, waiting=1)
    elsewhere = LoadReading(t=25, running=9, waiting=0)

    def doubts(*loads: LoadReading) -> list[str]:
        return findings.findings([group], loads, mode="sweep", max_tokens=100)

    assert doubts(ours, elsewhere) == []
    assert doubts(ours, theirs) == ["the engine had 3 requests while 2 were ours: others used it"]


@pytest.fixture
def make_group():
    from test_bench_compare import make

    def build(*, concurrency: int, started: float, ended: float):
        group = make([50.0]).groups[0]
        one = group.rounds[0].model_copy(update={"started_s": started, "ended_s": ended})
        return group.model_copy(update={"concurrency": concurrency, "rounds": [one]})

    return build


# -------------------------------------------------------------------------------- URL and key


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://spark1:30000", "http://spark1:30000"),
        ("http://spark1:30000/", "http://spark1:30000"),
        ("http://spark1:30000/v1", "http://spark1:30000"),
        ("http://spark1:30000/v1/chat/completions", "http://spark1:30000"),
        ("https://gate/llm/v1/", "https://gate/llm"),
    ],
)
def test_urls(url, root):
    address = endpoint.parse_url(url)
    assert (address.root, address.api) == (root, root + "/v1")


@pytest.mark.parametrize(
    "url", ["spark1:30000", "ftp://x", "http://", "http://x:port", "http://x/?a=1", "", "http://[x"]
)
def test_bad_urls(url, bench):
    with pytest.raises(InputError):
        endpoint.parse_url(url)
    done = bench("speed", url)
    assert done.status == 2
    assert "http://HOST:PORT" in done.err or "give its URL" in done.err


def test_a_credential_in_the_url_is_refused_and_not_repeated(bench):
    done = bench("http://user:hunter2@spark1:30000")
    assert done.status == 2
    assert "hunter2" not in done.err
    assert "SPARK_API_KEY" in done.err


def test_key_order_and_mistakes(tmp_path):
    file = tmp_path / "key"
    file.write_text("from-file\n")
    file.chmod(0o600)
    variable = {"SPARK_API_KEY": "from-variable"}
    assert endpoint.load_key(file, variable)[0].get_secret_value() == "from-file"
    assert endpoint.load_key(None, variable, file)[0].get_secret_value() == "from-variable"
    assert endpoint.load_key(None, {}, file)[0].get_secret_value() == "from-file"
    assert endpoint.load_key(None, {}, tmp_path / "on-the-head")[0] is None
    assert endpoint.load_key(None, {}) == (None, [])
    file.chmod(0o644)
    assert "chmod 600" in endpoint.load_key(file, {})[1][0]
    for bad in ("", "two words", "schlüssel"):
        file.write_text(bad)
        with pytest.raises(InputError) as caught:
            endpoint.load_key(file, {})
        assert not bad or bad not in str(caught.value)
    with pytest.raises(InputError):
        endpoint.load_key(tmp_path / "none", {})
