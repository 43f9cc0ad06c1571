"""Bad endpoints: each has a clear message, and what was finished is kept and marked."""

from __future__ import annotations

import socket

import pytest

from spark_appliance.bench import store

FAULTS = {
    # fault: (kind, words of the message)
    "html": ("not-sse", "It works!"),
    "plain-json": ("not-sse", "a whole answer instead of a stream"),
    "redirect": ("not-found", "redirects to http://elsewhere/v1"),
    "no-usage": ("no-usage", "sends no usage"),
    "endless": ("endless", "went on after"),
    "cut": ("cut", "was cut after"),
    "short": ("cut", "ended in the middle"),
    "hang-up": ("cut", "closed the connection without an answer"),
    "engine-error": ("engine-error", "a rank died"),
    "malformed": ("malformed", "{not json"),
    "500": ("server-error", "made to fail with 500"),
    "429": ("overloaded", "too many requests"),
    "400": ("rejected", "made to fail with 400"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_from_the_start(server, bench, tmp_path, fault):
    kind, words = FAULTS[fault]
    endpoint = server(rate=150, fault=fault)
    done = bench(endpoint.url, "--max-tokens", "20", "--warmup", "0", "--out", "r.json")
    assert done.status == 1
    assert f"[{kind}]" in done.err
    assert words in done.err
    assert "remedy:" in done.err
    assert "Traceback" not in done.err
    result = store.load(tmp_path / "r.json")
    assert result.status == "partial"
    assert {s.failure.kind for g in result.groups for r in g.rounds for s in r.samples} == {kind}
    assert all(not g.summary for g in result.groups)


@pytest.mark.parametrize("fault", ["cut", "html", "500"])
def test_fault_in_the_middle_keeps_finished_samples(server, bench, tmp_path, fault):
    # One warm-up and two samples are fine, then every request fails.
    endpoint = server(rate=150, chunk=2, fault=fault, fault_after=3)
    done = bench(endpoint.url, "--max-tokens", "40", "--samples", "5", "--out", "r.json")
    assert done.status == 1
    result = store.load(tmp_path / "r.json")
    assert result.status == "partial"
    (group,) = result.groups
    assert [r.status for r in group.rounds][:2] == ["ok", "ok"]
    assert group.rounds[2].status == "failed"
    assert group.summary["decode_tok_s"].n == 2
    assert any("requests failed" in p for p in result.problems)
    assert "PARTIAL" in done.out
    assert "--resume r.json" in done.err


def test_a_passing_fault_does_not_end_the_run_and_can_be_resumed(server, bench, tmp_path):
    endpoint = server(rate=150, fault="500", fault_after=3)
    # The third timed request fails, and so does the next: two in a row end the run.
    first = bench(endpoint.url, "--max-tokens", "20", "--samples", "5", "--out", "r.json")
    assert first.status == 1
    healthy = server(rate=150)
    done = bench(healthy.url, "--max-tokens", "20", "--samples", "5", "--resume", "r.json")
    assert done.status == 0, done.err
    result = store.load(tmp_path / "r.json")
    assert result.status == "complete"
    (group,) = result.groups
    assert [r.status for r in group.rounds] == ["ok"] * 5
    assert len(healthy.truth()) == 1 + 3  # a warm-up, and only what was missing
    assert len(result.resumed) == 1
    assert [r.started_s for r in group.rounds] == sorted(r.started_s for r in group.rounds)


def test_resume_refuses_another_protocol(server, bench, tmp_path):
    endpoint = server(rate=150)
    bench(endpoint.url, "--max-tokens", "20", "--samples", "1", "--out", "r.json")
    before = (tmp_path / "r.json").read_text()
    done = bench(endpoint.url, "--max-tokens", "30", "--samples", "2", "--resume", "r.json")
    assert done.status == 2
    assert "max_tokens: 20 / 30" in done.err
    assert (tmp_path / "r.json").read_text() == before


def test_one_failed_stream_spoils_only_its_round(server, bench, tmp_path):
    # Requests 0..3 warm-up of c4, 4..7 the first round; of the second round all but one fail.
    endpoint = server(rate=150, fault="cut", fault_after=9)
    done = bench(
        "sweep", endpoint.url, "--streams", "4", "--kind", "code", "--max-tokens", "20",
        "--samples", "2", "--out", "r.json",
    )  # fmt: skip
    assert done.status == 1
    (group,) = store.load(tmp_path / "r.json").groups
    assert [r.status for r in group.rounds] == ["ok", "failed"]
    assert sorted(s.status for s in group.rounds[1].samples) == ["failed"] * 3 + ["ok"]
    assert group.rounds[1].aggregate_wall_tok_s is None
    assert group.summary["decode_tok_s"].n == 1


def test_connection_refused(bench):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        done = bench(f"http://127.0.0.1:{port}", "--out", "r.json")
    assert done.status == 1
    assert "connection refused" in done.err
    assert "[refused]" in done.err
    assert "--wait" in done.err


def test_unknown_host(bench):
    done = bench("http://no-such-host.invalid:1")
    assert done.status == 1
    assert "[unresolved]" in done.err or "[unreachable]" in done.err


def test_loading(server, bench):
    done = bench(server(loading=True).url)
    assert done.status == 1
    assert "[loading]" in done.err
    assert "503" in done.err


def test_wait_gives_up_in_words(server, bench):
    done = bench(server(loading=True).url, "--wait", "0.1")
    assert done.status == 1
    assert "not ready after 0.1 s" in done.err


@pytest.mark.parametrize("key", [None, "wrong"])
def test_wrong_key(server, bench, tmp_path, key):
    endpoint = server(key="right-key")
    done = bench(endpoint.url, env={"SPARK_API_KEY": key} if key else {})
    assert done.status == 1
    assert "[auth]" in done.err
    assert "--api-key-file" in done.err
    assert "wrong" not in done.err.replace("missing or wrong", "")
    assert list(tmp_path.glob("*.json")) == []


@pytest.mark.parametrize("how", ["file", "variable"])
def test_key_is_used_and_never_written(server, bench, tmp_path, how):
    endpoint = server(key="right-key-42", rate=150)
    key_file = tmp_path / "key"
    key_file.write_text("right-key-42\n")
    key_file.chmod(0o600)
    arguments = ["--api-key-file", "key"] if how == "file" else []
    env = {"SPARK_API_KEY": "right-key-42"} if how == "variable" else {}
    done = bench(
        endpoint.url, *arguments, "--max-tokens", "20", "--out", "r.json", env=env
    )  # fmt: skip
    assert done.status == 0, done.err
    # The server gives its key away in /server_info, twice; the result must not.
    text = (tmp_path / "r.json").read_text()
    assert "right-key-42" not in text + done.out + done.err
    info = store.load(tmp_path / "r.json").evidence.server_info
    assert info["api_key"] == "***"
    assert info["launch_command"] == "sglang serve --api-key *** --tp 4"


def test_silent_server(server, bench):
    done = bench(
        server(fault="silent").url, "--first-token-timeout", "0.3", "--warmup", "0",
        "--samples", "1",
    )  # fmt: skip
    assert done.status == 1
    assert "[no-first-token]" in done.err
    assert "sent nothing for 0.3 s" in done.err


def test_stalled_stream(server, bench):
    done = bench(
        server(fault="stall").url, "--stall-timeout", "0.3", "--warmup", "0", "--samples", "1"
    )  # fmt: skip
    assert done.status == 1
    assert "[stalled]" in done.err


def test_request_timeout(server, bench):
    done = bench(server(rate=5).url, "--request-timeout", "0.5", "--warmup", "0", "--samples", "1")
    assert done.status == 1
    assert "not finished after 0.5 s" in done.err


def test_a_stream_that_never_closes_but_is_finished_counts(server, bench, tmp_path):
    done = bench(
        server(fault="never-closes", rate=150).url, "--max-tokens", "20", "--stall-timeout", "0.3",
        "--samples", "1", "--warmup", "0", "--out", "r.json",
    )  # fmt: skip
    assert done.status == 0, done.err
    assert store.load(tmp_path / "r.json").status == "complete"


def test_cached_tokens_are_refused(server, bench, tmp_path):
    endpoint = server(cached=3, rate=150)
    done = bench(endpoint.url, "--max-tokens", "20", "--warmup", "0", "--out", "r.json")
    assert done.status == 1
    assert "3 prompt tokens came from the prefix cache" in done.err
    allowed = bench(endpoint.url, "--max-tokens", "20", "--allow-cached", "3", "--out", "s.json")
    assert allowed.status == 0, allowed.err
    result = store.load(tmp_path / "s.json")
    assert result.protocol.allowed_cached_tokens == 3
    assert {s.cached_tokens for r in result.groups[0].rounds for s in r.samples} == {3}


def test_the_nonce_defeats_a_prefix_cache(server, bench, tmp_path):
    # The server remembers first pages; the same prompt without a nonce would hit.
    endpoint = server(rate=150)
    assert bench(endpoint.url, "--max-tokens", "20", "--out", "r.json").status == 0
    result = store.load(tmp_path / "r.json")
    assert {s.cached_tokens for r in result.groups[0].rounds for s in r.samples} == {0}


def test_cache_not_reported_is_said(server, bench, tmp_path):
    done = bench(
        server(cache_report=0, rate=150).url, "--max-tokens", "20", "--out", "r.json"
    )  # fmt: skip
    assert done.status == 0
    assert "--enable-cache-report" in done.out
    result = store.load(tmp_path / "r.json")
    assert {s.cached_tokens for r in result.groups[0].rounds for s in r.samples} == {None}


def test_answers_that_end_early_are_said(server, bench):
    done = bench(server(tokens=20, rate=150).url, "--max-tokens", "400")
    assert done.status == 0
    assert "answers ended before a quarter of max_tokens" in done.out


def test_one_token_is_no_rate(server, bench):
    done = bench(server(tokens=1).url, "--warmup", "0", "--samples", "1")
    assert done.status == 1
    assert "[too-short]" in done.err
