"""Comparison: a verdict only when intervals separate, a refusal that names the difference."""

from __future__ import annotations

import json

import pytest

from spark_appliance.bench import compare, metrics, store
from spark_appliance.bench.result import (
    Client,
    Endpoint,
    Evidence,
    Protocol,
    Result,
    Round,
    Sample,
    Timings,
)
from spark_appliance.errors import InputError

PROTOCOL = Protocol(
    mode="speed", prompts={"prose": "a" * 64}, concurrency=[1], max_tokens=100, warmup=1, rounds=3
)


def make(rates: list[float], *, protocol: Protocol = PROTOCOL, ttft: float = 0.25) -> Result:
    """A result with the given decode rates."""
    rounds = []
    for number, rate in enumerate(rates):
        timings = Timings(
            start=0, connected=None, first=ttft, last=ttft + 99 / rate, finish=None,
            end=ttft + 99 / rate, chunk_us=[round(ttft * 1e6), round((ttft + 99 / rate) * 1e6)],
        )  # fmt: skip
        derived = metrics.rates(timings, 10, 100)
        sample = Sample(
            stream=0, status="ok", nonce=f"{number:032x}", prompt_sha256="a" * 64,
            output_sha256="b" * 64, finish_reason="length", prompt_tokens=10,
            completion_tokens=100, cached_tokens=0, reasoning_tokens=None, chunks=2,
            ttft_s=derived.ttft_s, prefill_tok_s=derived.prefill_tok_s,
            decode_tok_s=derived.decode_tok_s, timings=timings,
        )  # fmt: skip
        rounds.append(metrics.round_of([sample], started_s=0, ended_s=1))
    assert all(isinstance(r, Round) for r in rounds)
    return Result(
        tool_version="0", status="complete", started="2026-01-01T00:00:00Z",
        finished="2026-01-01T00:00:00Z", endpoint=Endpoint(url="http://x/v1", model="m"),
        protocol=protocol, groups=[metrics.group_of("prose", 1, rounds)],
        evidence=Evidence(
            client=Client(system="x", python="3", http_library="x", cpus=2,
                          on_serving_machine=False),
            engine=None, server_info=None, models=None,
        ),
    )  # fmt: skip


def decode_line(a: Result, b: Result) -> compare.Line:
    return next(line for line in compare.compare(a, b) if line.metric == "decode_tok_s")


def test_separate_intervals_give_a_verdict():
    line = decode_line(make([50, 50.2, 49.8]), make([60, 60.2, 59.8]))
    assert line.verdict == "B is better"
    assert line.change_pct == pytest.approx(20, abs=0.1)
    assert decode_line(make([60, 60.2, 59.8]), make([50, 50.2, 49.8])).verdict == "A is better"


def test_overlap_gives_none():
    # 10 % faster by the median, but three noisy repetitions do not prove it.
    line = decode_line(make([50, 53, 47]), make([55, 58, 52]))
    assert line.verdict == "no verdict"
    assert line.reason == "intervals overlap"


def test_one_repetition_gives_none():
    assert decode_line(make([50]), make([500])).reason.startswith("one repetition")


def test_less_is_better_for_ttft():
    lines = compare.compare(make([50, 50.1, 50.2], ttft=0.2), make([50, 50.1, 50.2], ttft=0.4))
    assert next(x for x in lines if x.metric == "ttft_s").verdict == "A is better"
    assert next(x for x in lines if x.metric == "decode_tok_s").verdict == "no verdict"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"prompts": {"prose": "c" * 64}}, "prompt sha256 (prose)"),
        ({"prompts": {"code": "a" * 64}}, "prompt kinds"),
        ({"max_tokens": 200}, "max_tokens: 100 / 200"),
        ({"concurrency": [1, 2]}, "concurrency: 1 / 1,2"),
        ({"definitions": "other/2"}, "definitions"),
        ({"warmup": 0}, "warmup: 1 / 0"),
        ({"extra_body": {"ignore_eos": True}}, "extra_body"),
        ({"allowed_cached_tokens": 5}, "allowed_cached_tokens: 0 / 5"),
        ({"mode": "sweep"}, "mode: speed / sweep"),
    ],
)
def test_other_protocols_are_refused_by_name(change, name):
    other = make([50, 51], protocol=PROTOCOL.model_copy(update=change))
    with pytest.raises(InputError) as caught:
        compare.compare(make([50, 51]), other)
    assert name in str(caught.value)
    assert caught.value.exit_status == 2


def test_more_repetitions_are_the_same_protocol():
    more = make([50, 51, 52, 53, 54], protocol=PROTOCOL.model_copy(update={"rounds": 5}))
    assert compare.compare(make([50, 51, 52]), more)


def test_command(bench, tmp_path):
    store.save(make([50, 50.2, 49.8]), tmp_path / "a.json")
    store.save(make([60, 60.2, 59.8]), tmp_path / "b.json")
    done = bench("compare", "a.json", "b.json")
    assert done.status == 0
    assert "+20.0 %" in done.out
    assert "B is better (intervals separate)" in done.out
    lines = json.loads(bench("compare", "a.json", "b.json", "--json").out)
    assert {line["metric"] for line in lines} == {"decode_tok_s", "prefill_tok_s", "ttft_s"}
    assert lines[0]["a"]["n"] == 3


def test_command_refuses(bench, tmp_path):
    store.save(make([50, 51]), tmp_path / "a.json")
    other = PROTOCOL.model_copy(update={"max_tokens": 7})
    store.save(make([50, 51], protocol=other), tmp_path / "b.json")
    done = bench("compare", "a.json", "b.json")
    assert done.status == 2
    assert "max_tokens: 100 / 7" in done.err
    assert bench("compare", "a.json", "none.json").status == 2
