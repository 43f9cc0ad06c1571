"""The pure parts: statistics, stream reading, rates, and the check of a finished file."""

from __future__ import annotations

import json
import math
import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_appliance.bench import metrics, sse, stats, store, verify
from spark_appliance.bench.metrics import Prompt
from spark_appliance.bench.result import Timings
from spark_appliance.bench.wire import Recording
from spark_appliance.errors import InputError


def t_cdf(x: float, degrees: int) -> float:
    """Student's t by numerical integration of its density (Simpson), independent of the table."""
    log_norm = (
        math.lgamma((degrees + 1) / 2)
        - math.lgamma(degrees / 2)
        - 0.5 * math.log(degrees * math.pi)
    )

    def density(v: float) -> float:
        return math.exp(log_norm - (degrees + 1) / 2 * math.log1p(v * v / degrees))

    n = 2000
    step = x / n
    inner = sum((4 if i % 2 else 2) * density(i * step) for i in range(1, n))
    return 0.5 + step / 3 * (density(0) + inner + density(x))


@pytest.mark.parametrize("degrees", [*range(1, 31), 31, 45, 100, 1000])
def test_t_quantiles(degrees):
    assert t_cdf(stats.t975(degrees), degrees) == pytest.approx(0.975, abs=4e-5)  # three decimals


def test_summary_of_known_values():
    summary = stats.summarize([49.0, 51.0, 50.0])
    assert (summary.median, summary.mean, summary.min, summary.max) == (50, 50, 49, 51)
    assert summary.stddev == 1.0
    assert summary.ci95 == pytest.approx((50 - 4.303 / math.sqrt(3), 50 + 4.303 / math.sqrt(3)))


def test_one_value_has_no_spread():
    summary = stats.summarize([3.0])
    assert (summary.n, summary.stddev, summary.ci95) == (1, None, None)


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_is_between_the_extremes(values, percent):
    found = stats.percentile(values, percent)
    assert min(values) <= found <= max(values) or math.isclose(found, max(values))


def test_percentile_agrees_with_the_standard_library():
    values = [0.3, 0.1, 0.9, 0.4, 0.5, 0.7, 0.2]
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    assert stats.percentile(values, 50) == pytest.approx(statistics.median(values))
    assert stats.percentile(values, 95) == pytest.approx(cuts[18])


def stream(*events: object, done: bool = True) -> bytes:
    lines = [f"data: {e if isinstance(e, str) else json.dumps(e)}\n\n" for e in events]
    return ("".join(lines) + ("data: [DONE]\n\n" if done else "")).encode()


def delta(**fields: object) -> dict:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


FINISH = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}}
WHOLE = stream(
    delta(role="assistant", content=""), delta(content="a\n\ndata: [DONE]"), delta(content="é"),
    delta(reasoning_content="hm"), FINISH, USAGE,
)  # fmt: skip


@given(st.lists(st.integers(1, len(WHOLE) - 1), max_size=12))
def test_reading_does_not_depend_on_where_the_network_cuts(cuts):
    edges = [0, *sorted(set(cuts)), len(WHOLE)]
    reads = [(float(i), WHOLE[a:b]) for i, (a, b) in enumerate(pairwise(edges))]
    said = sse.parse(reads)
    assert said.content == ["a\n\ndata: [DONE]", "é"]
    assert said.reasoning == ["hm"]
    assert said.usage == USAGE["usage"]
    assert (said.finish_reason, said.done, said.malformed) == ("length", True, None)
    # An event is as late as the read that brought its last byte.
    assert said.text_times == sorted(said.text_times)
    assert len(said.text_times) == 3
    assert said.finish_time <= len(edges)


def test_events_of_one_read_share_its_time():
    said = sse.parse([(1.0, stream(delta(content="a"), done=False)), (2.5, stream(FINISH, USAGE))])
    assert said.text_times == [1.0]
    assert said.finish_time == 2.5


def test_comments_and_other_fields_are_ignored():
    raw = b": ping\n\nevent: message\nid: 4\n" + stream(delta(content="x"), FINISH, USAGE)
    said = sse.parse([(1.0, raw.replace(b"\n", b"\r\n"))])
    assert said.content == ["x"]


def test_tool_calls_are_generated_text():
    said = sse.parse([(1.0, stream(delta(tool_calls=[{"function": {"arguments": "{"}}])))])
    assert len(said.text_times) == 1


@given(st.integers(2, 5000), st.floats(0.001, 100), st.floats(0.01, 1000), st.integers(1, 300_000))
def test_rates_follow_their_definition(tokens, ttft, span, prompt_tokens):
    timings = Timings(
        start=1.0, connected=None, first=1 + ttft, last=1 + ttft + span, finish=None, end=9e9,
        chunk_us=[],
    )  # fmt: skip
    found = metrics.rates(timings, prompt_tokens, tokens)
    assert found.decode_tok_s == pytest.approx((tokens - 1) / span, rel=1e-6)
    assert found.ttft_s == pytest.approx(ttft, rel=1e-6, abs=1e-9)
    assert found.prefill_tok_s == pytest.approx(prompt_tokens / ttft, rel=1e-6)


def make_sample(number: int, start: float, first: float, last: float, tokens: int):
    reads = [
        (start + first, stream(delta(content="a"), done=False)),
        (start + last, stream(delta(content="b"), FINISH, {
            "choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": tokens},
        })),
    ]  # fmt: skip
    recording = Recording(started=start, ended=start + last, reads=reads, events=4)
    made, output = metrics.sample(
        recording,
        Prompt("x"),
        stream=number,
        nonce=f"{number:032x}",
        origin=100.0,
        allowed_cached=0,
    )
    assert output == "ab"
    return made


def test_both_aggregates_by_hand():
    # Two streams: 0.0 start, 0.5 .. 2.5 s, 21 tokens; and 0.1 start, 1.0 .. 4.1 s, 41 tokens.
    samples = [make_sample(0, 100.0, 0.5, 2.5, 21), make_sample(1, 100.1, 0.9, 4.0, 41)]
    assert samples[0].decode_tok_s == pytest.approx(10.0)
    assert metrics.aggregate_wall(samples) == pytest.approx(62 / 4.1)
    assert metrics.aggregate_window(samples) == pytest.approx(60 / (4.1 - 0.5))


def test_the_round_is_the_unit_of_the_summary():
    rounds = [
        metrics.round_of(
            [make_sample(0, 100.0, 0.5, 2.5, tokens), make_sample(1, 100.0, 0.5, 2.5, 21)],
            started_s=0, ended_s=3,
        )
        for tokens in (21, 41, 61)
    ]  # fmt: skip
    summary = metrics.summary_of(rounds)["decode_tok_s"]
    assert summary.n == 3
    assert summary.median == pytest.approx((20 + 10) / 2)  # medians of (10,10) (20,10) (30,10)


def test_cut_after_the_answer_is_whole_counts():
    made = make_sample(0, 100.0, 0.5, 2.5, 21)
    assert made.status == "ok"


# ------------------------------------------------------------------------------- verify


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A real result, once for this file."""
    from bench_helpers import start_server

    from spark_appliance.bench import prompts, session
    from spark_appliance.bench.endpoint import parse_url
    from spark_appliance.bench.settings import Settings
    from spark_appliance.cli.bench_progress import ConsoleProgress

    folder = tmp_path_factory.mktemp("measured")
    with start_server(folder, rate=150, chunk=3) as endpoint, ConsoleProgress(quiet=True) as quiet:
        settings = Settings(
            address=parse_url(endpoint.url), mode="sweep", out=folder / "r.json",
            prompts={"prose": prompts.canonical("prose")}, concurrency=(1, 2), rounds=2, warmup=0,
            max_tokens=40,
        )  # fmt: skip
        session.run(settings, quiet)
    return folder / "r.json"


def test_verify_accepts_a_true_result(measured, bench):
    done = bench("verify", str(measured))
    assert done.status == 0
    assert "of 6 requests" in done.out


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("groups", 0, "summary", "decode_tok_s", "median"), 9999.0, "decode_tok_s median"),
        (("groups", 1, "rounds", 0, "aggregate_wall_tok_s"), 1.0, "aggregate_wall_tok_s"),
        (("groups", 0, "rounds", 0, "samples", 0, "decode_tok_s"), 1e6, "decode_tok_s"),
        (("groups", 0, "rounds", 0, "samples", 0, "completion_tokens"), 39, "decode_tok_s"),
        (("groups", 0, "rounds", 0, "samples", 0, "timings", "last"), 0.001, "timings.last"),
        (("groups", 0, "rounds", 0, "samples", 0, "cached_tokens"), 64, "64 cached tokens"),
        (("groups", 0, "rounds", 0, "samples", 0, "prompt_sha256"), "0" * 64, "another prompt"),
    ],
)
def test_verify_finds_what_was_changed(measured, path, value, words):
    data = json.loads(measured.read_text())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    changed = measured.with_name("changed.json")
    changed.write_text(json.dumps(data))
    problems = verify.verify(store.load(changed))
    assert any(words in problem for problem in problems)


def test_verify_finds_a_repeated_nonce(measured):
    result = store.load(measured)
    twice = result.model_copy(update={"groups": [result.groups[0], result.groups[0]]})
    assert any("nonce was used twice" in p for p in verify.verify(twice))


def test_the_file_is_the_same_after_reading(measured):
    assert store.dumps(store.load(measured)) == measured.read_text()


def test_a_broken_file_is_explained(tmp_path):
    path = tmp_path / "r.json"
    path.write_text('{"schema_id": "spark-appliance.bench/1", "surprise": 1}')
    with pytest.raises(InputError) as caught:
        store.load(path)
    assert "surprise" in str(caught.value)
    assert str(path) in str(caught.value)
    path.write_text("not json")
    with pytest.raises(InputError):
        store.load(path)


def test_every_result_follows_the_printed_schema(measured, bench):
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    done = bench("schema")
    schema = json.loads(done.out)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    data = json.loads(measured.read_text())
    assert list(validator.iter_errors(data)) == []
    del data["protocol"]["max_tokens"]
    data["groups"][0]["concurrency"] = 0
    assert len(list(validator.iter_errors(data))) == 2
