"""Context sweep and long-context checks: real text, lengths by the endpoint's count, a needle."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_appliance.bench import context, corpus, needle, store
from spark_appliance.errors import InputError


@pytest.fixture
def text_dir(tmp_path):
    """Real text of this machine would do; this is smaller, and every part of it differs."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(60):
        lines = (f"value_{i}_{j} = compute({i * j})  # note {i ^ j}" for j in range(400))
        (folder / f"module_{i:02}.py").write_text("\n".join(lines))
    return folder


def test_context_sweep(server, bench, tmp_path, text_dir):
    endpoint = server(rate=4000, prefill=40_000, context=20_000)
    done = bench(
        "context", endpoint.url, "--tokens", "1000,4000,8000", "--samples", "2",
        "--max-tokens", "16", "--text-dir", str(text_dir), "--out", "r.json",
    )  # fmt: skip
    assert done.status == 0, done.err
    result = store.load(tmp_path / "r.json")
    assert [g.target_tokens for g in result.groups] == [1000, 4000, 8000]
    for group in result.groups:
        tokens = group.summary["prompt_tokens"].median
        assert tokens == pytest.approx(group.target_tokens, rel=0.05)
    # The server's prefill rate is 40000/s plus 0.02 s; hold the client against what was sent.
    truth = [t for t in endpoint.truth() if t["prompt_tokens"] > 3900][-4:]
    samples = [s for g in result.groups[1:] for r in g.rounds for s in r.samples]
    for real, sample in zip(truth, samples, strict=True):
        assert sample.prompt_tokens == real["prompt_tokens"]
        # A late wake-up makes a TTFT longer, never shorter than what the server took.
        assert sample.ttft_s >= real["first"] - real["received"]
    assert min(
        sample.ttft_s - (real["first"] - real["received"])
        for real, sample in zip(truth, samples, strict=True)
    ) == pytest.approx(0, abs=0.05)
    source = result.evidence.text_source
    assert source["folders"] == [str(text_dir)]
    assert source["sha256"] == result.protocol.prompts["code"]
    shas = [s.prompt_sha256 for g in result.groups for r in g.rounds for s in r.samples]
    assert len(set(shas)) == len(shas)  # every request has another part of the text
    assert "| target | prompt tokens |" in done.out


def test_lengths_beyond_the_context_are_said(server, bench, tmp_path, text_dir):
    endpoint = server(rate=4000, context=5000)
    done = bench(
        "context", endpoint.url, "--tokens", "1000,4800,9000", "--samples", "1",
        "--max-tokens", "8", "--text-dir", str(text_dir), "--out", "r.json",
    )  # fmt: skip
    assert done.status == 0, done.err
    result = store.load(tmp_path / "r.json")
    assert [g.target_tokens for g in result.groups] == [1000, 4800]
    assert "9000 tokens left out: the context length is 5000" in done.out
    assert "4800 tokens shortened to" in done.out


def test_an_answer_of_one_token_still_has_a_prefill_rate(server, bench, tmp_path, text_dir):
    done = bench(
        "context", server(tokens=1).url, "--tokens", "1000", "--samples", "1",
        "--text-dir", str(text_dir), "--out", "r.json",
    )  # fmt: skip
    assert done.status == 0, done.err
    (group,) = store.load(tmp_path / "r.json").groups
    assert group.summary["prefill_tok_s"].n == 1
    assert "decode_tok_s" not in group.summary


def test_nothing_fits(server, bench, text_dir):
    done = bench(
        "context", server(context=500).url, "--tokens", "4000", "--text-dir", str(text_dir)
    )
    assert done.status == 2
    assert "context length of 500" in done.err


def test_longcheck_finds_the_needle(server, bench, tmp_path, text_dir):
    endpoint = server(rate=4000)
    done = bench(
        "longcheck", endpoint.url, "--prompts", "1x6000,4x2000", "--max-tokens", "16",
        "--text-dir", str(text_dir), "--out", "r.json",
    )  # fmt: skip
    assert done.status == 0, done.err
    result = store.load(tmp_path / "r.json")
    one, four = result.groups
    assert [len(r.samples) for r in four.rounds] == [4]
    needles = [s.needle for g in result.groups for r in g.rounds for s in r.samples]
    assert all(n.found and n.where == "content" for n in needles)
    assert [n.depth for n in needles] == [0.5, 0.125, 0.375, 0.625, 0.875]
    assert len({n.expected for n in needles}) == 5
    assert one.summary["prompt_tokens"].median == pytest.approx(6000, rel=0.05)
    assert result.protocol.warmup == 0
    assert done.out.count("| found |") + done.out.count("  found |") == 5


def test_longcheck_fails_when_the_needle_is_lost(server, bench, text_dir):
    done = bench(
        "longcheck", server(rate=4000, forgetful=True).url, "--prompts", "2x2000",
        "--max-tokens", "16", "--text-dir", str(text_dir),
    )  # fmt: skip
    assert done.status == 1
    assert "2 needles were not found" in done.err
    assert "NOT FOUND" in done.out


def test_defaults_are_the_published_lengths():
    assert context.SWEEP[0] == 4096
    assert context.SWEEP[-1] == 262144
    assert context.CHECKS == ((1, 208_000), (4, 46_000))


def test_the_standard_library_is_enough_for_the_whole_sweep():
    needed = context.text_room([(1, t) for t in context.SWEEP], context.SWEEP_ROUNDS + 1)
    found = corpus.load("code", corpus.default_folders("code"), needed // 4)
    assert len(found.text) == needed // 4


@given(st.text(min_size=1, max_size=500), st.floats(0, 1))
def test_needle_keeps_the_text(text, depth):
    prompt = needle.hide(text, depth)
    _, code = prompt.needle
    assert prompt.text.count(f"The access code of the harbour office is {code}.\n") == 1
    line = f"The access code of the harbour office is {code}.\n"
    assert prompt.text.replace(line, "").startswith(text)


@given(st.integers(0, 10_000), st.integers(1, 5_000))
def test_cut_wraps_and_has_the_length(offset, length):
    source = corpus.Corpus("code", ("x",), 1, "".join(chr(65 + i % 26) for i in range(701)))
    piece = source.cut(offset, length)
    assert len(piece) == length
    assert all(piece[i] == source.text[(offset + i) % 701] for i in range(length))


def test_corpus_is_deterministic_and_skips_what_is_no_text(tmp_path):
    (tmp_path / "b.py").write_text("b = 1\n" * 100)
    (tmp_path / "a.py").write_text("a = 1\n" * 100)
    (tmp_path / "copy.py").write_text("a = 1\n" * 100)
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe" * 500)
    (tmp_path / "tiny.py").write_text("x")
    (tmp_path / "notes.txt").write_text("prose\n" * 100)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "c.py").write_text("c = 1\n" * 100)
    first = corpus.load("code", [tmp_path], 5000)
    assert first.files == 2
    assert first.text.startswith("=== a.py ===\na = 1")
    assert first.sha256 == hashlib.sha256(first.text.encode()).hexdigest()
    assert corpus.load("code", [tmp_path], 5000).sha256 == first.sha256
    assert corpus.load("prose", [tmp_path], 500).files == 1


def test_too_little_text_is_an_error(tmp_path):
    (tmp_path / "a.json").write_text('{"a": 1}' * 50)
    with pytest.raises(InputError, match=r"only \d+ characters of json text"):
        corpus.load("json", [tmp_path], 100_000)
    with pytest.raises(InputError, match="is not a folder"):
        corpus.load("json", [tmp_path / "none"], 100)
