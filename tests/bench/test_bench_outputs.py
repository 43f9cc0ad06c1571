"""Tables, plots, lmx records, and the command line itself."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench_helpers import environment
from pydantic import ValidationError

from spark_appliance.bench import lmx, prompts, store, table
from spark_appliance.bench.result import Node, NodeUse
from spark_appliance.errors import InputError

# The exact fields of field notes section 7.6.
PAYLOAD_REQUIRED = {"hfId", "hardware", "engineName", "quantization", "tokSOut"}
PAYLOAD_ONE_OF = {"tokSPrefill", "tokSTotal", "ttftMs", "peakVramGb"}
PAYLOAD_OPTIONAL = {
    "modelRevision", "backend", "promptTokens", "outputTokens", "prefillTokens", "contextLength",
    "notes", "engineVersion", "engineRepository", "engineBuild", "engineCommit", "engineFlags",
    "promptSha256", "promptSample", "outputSha256", "outputSample", "engineTimingsRaw",
    "samples", "sampleStats",
}  # fmt: skip
FLAGS = {
    "commandSnippet", "tensorParallel", "concurrency", "temperature", "gpuMemUtil",
    "kvCacheDtype", "prefixCaching", "chunkedPrefill", "prefillChunkSize", "maxRunningSeqs",
    "specDraftTokens", "specAcceptedTokens", "specAcceptanceRate", "specMeanAcceptedLength",
}  # fmt: skip
HARDWARE = {
    "hwClass", "gpuName", "gpuCount", "vramGb", "gpus", "totalVramGb", "chipVendor", "chipFamily",
    "chipVariant", "unifiedMemoryGb", "cpu", "cpuThreads", "ramGb", "os", "powerWatts",
    "gpuPowerWatts",
}  # fmt: skip


def test_lmx_models_have_exactly_the_listed_fields():
    assert set(lmx.Payload.model_fields) == PAYLOAD_REQUIRED | PAYLOAD_ONE_OF | PAYLOAD_OPTIONAL
    required = {n for n, f in lmx.Payload.model_fields.items() if f.is_required()}
    assert required == PAYLOAD_REQUIRED
    assert set(lmx.EngineFlags.model_fields) == FLAGS
    assert set(lmx.Hardware.model_fields) == HARDWARE


def test_lmx_rules():
    hardware = lmx.Hardware(hwClass="CPU_ONLY", cpu="x")
    base = {"hfId": "a/b", "hardware": hardware, "engineName": "sglang", "quantization": "FP8",
            "tokSOut": 1.0}  # fmt: skip
    with pytest.raises(ValidationError, match="one of tokSPrefill"):
        lmx.Payload(**base)
    assert lmx.Payload(**base, ttftMs=1.0)
    for wrong in (
        {"hfId": "no-owner"},
        {"promptSample": "x" * 2001},
        {"outputSample": "x" * 4001},
        {"engineTimingsRaw": "x" * 8193},
        {"promptSha256": "xyz"},
        {"unknownField": 1},
    ):
        with pytest.raises(ValidationError):
            lmx.Payload(**{**base, "ttftMs": 1.0, **wrong})
    with pytest.raises(ValidationError, match="needs gpuName, gpuCount, vramGb"):
        lmx.Hardware(hwClass="DISCRETE_GPU")


SPARKS = [
    Node(
        name=f"spark{i}",
        facts={"gpu.name": "NVIDIA GB10", "os": "DGX OS 7"},
        use=NodeUse(
            readings=3, power_w=40.0 + i, sm_clock_mhz=2400.0, temperature_c=60.0,
            gpu_memory_used_mib="N/A", mem_available_kib=1.0, mem_available_min_kib=1.0,
        ),
    )
    for i in range(4)
]  # fmt: skip


def test_hardware_of_sparks():
    made = lmx.hardware_of(SPARKS, "DISCRETE_GPU")
    assert (made.gpuName, made.gpuCount, made.vramGb) == ("NVIDIA GB10", 4, 128)
    assert len(made.gpus) == 4
    assert made.totalVramGb == 512
    assert made.gpuPowerWatts == 166.0
    unified = lmx.hardware_of(SPARKS, "UNIFIED")
    assert (unified.chipFamily, unified.unifiedMemoryGb) == ("GB10", 512)
    no_power = [SPARKS[0].model_copy(update={"use": None}), *SPARKS[1:]]
    assert lmx.hardware_of(no_power, "UNIFIED").gpuPowerWatts is None


def test_hardware_is_not_guessed():
    with pytest.raises(InputError, match="--hardware"):
        lmx.hardware_of([], "UNIFIED")
    other = Node(name="x", facts={"gpu.name": "NVIDIA H200"})
    with pytest.raises(InputError, match="not every node"):
        lmx.hardware_of([*SPARKS, other], "UNIFIED")


def test_export_command(server, bench, tmp_path):
    hardware = {"hwClass": "UNIFIED", "chipVendor": "NVIDIA", "chipFamily": "GB10",
                "chipVariant": "DGX Spark", "unifiedMemoryGb": 128}  # fmt: skip
    (tmp_path / "mine.json").write_text(json.dumps(hardware))
    done = bench(
        "sweep", server(rate=150, chunk=3).url, "--streams", "1,2", "--kind", "code",
        "--max-tokens", "40", "--out", "r.json", "--export", "lmx",
        "--hf-id", "deepseek-ai/DeepSeek-V4.1-Flash", "--quantization", "FP8",
        "--hardware", "mine.json", "--export-dir", "out",
    )  # fmt: skip
    assert done.status == 0, done.err
    assert json.loads((tmp_path / "out" / "hardware.json").read_text()) == hardware
    result = store.load(tmp_path / "r.json")
    for streams, group in zip((1, 2), result.groups, strict=True):
        data = json.loads((tmp_path / "out" / f"r.code-c{streams}.lmx.json").read_text())
        assert set(data) >= PAYLOAD_REQUIRED
        metric = "decode_tok_s" if streams == 1 else "aggregate_window_tok_s"
        assert data["tokSOut"] == pytest.approx(group.summary[metric].median, abs=1e-3)
        assert data["ttftMs"] == pytest.approx(group.summary["ttft_s"].median * 1000, abs=1e-3)
        assert data["prefillTokens"] == 0
        assert (data["engineName"], data["engineVersion"]) == ("sglang", "0.5.23")
        flags = data["engineFlags"]
        assert flags["concurrency"] == streams
        assert flags["tensorParallel"] == 4
        assert flags["prefixCaching"] is True
        assert flags["prefillChunkSize"] == 2048
        assert flags["specMeanAcceptedLength"] > 2
        assert set(data["sampleStats"]["tokSOut"]) == {"min", "p50", "mean", "max", "stddev"}
        assert len(data["samples"]) == 3 * streams
        assert data["promptSha256"] == prompts.canonical("code").sha256
        assert prompts.canonical("code").text.startswith(data["promptSample"])
        assert len(json.loads(data["engineTimingsRaw"])) == 3 * streams
        lmx.Payload.model_validate(data)
    again = bench("export", "r.json", "--hf-id", "a/b", "--quantization", "FP8", "--hardware",
                  "mine.json")  # fmt: skip
    assert again.status == 0
    assert (tmp_path / "r.code-c1.lmx.json").exists()


def test_export_says_what_is_missing_before_measuring(server, bench):
    endpoint = server()
    done = bench(endpoint.url, "--export", "lmx")
    assert done.status == 2
    assert "--hf-id and --quantization" in done.err
    assert endpoint.truth() == []


def test_bad_hardware_file(bench, tmp_path):
    (tmp_path / "h.json").write_text('{"hwClass": "UNIFIED", "colour": "gold"}')
    done = bench("export", "r.json", "--hf-id", "a/b", "--quantization", "Q", "--hardware",
                 "h.json")  # fmt: skip
    assert done.status == 2
    assert "colour" in done.err
    assert "h.json" in done.err


# --------------------------------------------------------------------------------- plot, table


@pytest.mark.parametrize("name", ["out.png", "out.svg"])
def test_plots(server, bench, tmp_path, name):
    pytest.importorskip("matplotlib", reason="the extra `plot` (matplotlib) is not installed")
    done = bench(
        "sweep", server(rate=300, chunk=4).url, "--streams", "1,2,4", "--kind", "prose",
        "--kind", "code", "--max-tokens", "40", "--samples", "2", "--warmup", "0",
        "--plot", name, "--out", "r.json",
    )  # fmt: skip
    assert done.status == 0, done.err
    data = (tmp_path / name).read_bytes()
    if name.endswith("png"):
        assert data.startswith(b"\x89PNG\r\n")
    else:
        text = data.decode()
        assert text.count("<svg") == 1
        # Two axes, two kinds: four lines with markers and their error bars.
        assert text.count("PathCollection") + text.count("LineCollection") >= 4
    shown = bench("show", "r.json", "--plot", f"again-{name}")
    assert shown.status == 0
    assert (tmp_path / f"again-{name}").stat().st_size > 1000


def test_plot_mistakes_are_found_before_measuring(server, bench):
    endpoint = server()
    done = bench(endpoint.url, "--plot", "out.gif")
    assert done.status == 2
    assert "neither .png nor .svg" in done.err
    assert endpoint.truth() == []


def test_markdown_is_aligned():
    text = table.markdown(["a", "tok/s"], [["prose", "1.0"], ["x", "100.25"]], 1)
    assert text.splitlines() == [
        "| a     |  tok/s |",
        "| ----- | -----: |",
        "| prose |    1.0 |",
        "| x     | 100.25 |",
    ]


# -------------------------------------------------------------------------------- command line


def test_canonical_prompts_are_what_results_say_they_are():
    # A changed prompt is another protocol: a new digest here must be a decision.
    assert {kind: prompts.canonical(kind).sha256[:16] for kind in prompts.CANONICAL} == {
        "prose": "15d8b5668073e99c",
        "code": "fe84a9cf9c87ade2",
        "structured": "26adf7f04cd7f0b4",
        "json": "c74ee8e4098569b7",
    }


def test_prompt_file(server, bench, tmp_path):
    text = "Erzähle eine Geschichte.\n"
    (tmp_path / "p.txt").write_text(text)
    endpoint = server(rate=150)
    done = bench(endpoint.url, "--prompt-file", "p.txt", "--max-tokens", "20", "--out", "r.json")
    assert done.status == 0, done.err
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert store.load(tmp_path / "r.json").protocol.prompts == {"file": digest}
    assert {r["request"]["text_sha256"] for r in endpoint.truth()} == {digest}
    (tmp_path / "empty.txt").write_text(" \n")
    assert bench(endpoint.url, "--prompt-file", "empty.txt").status == 2
    assert bench(endpoint.url, "--prompt-file", "none.txt").status == 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"max_tokens": 5, "stream": false}', "may not set max_tokens, stream"),
        ('{"temperature": 1}', "may not set temperature"),
    ],
)
def test_extra_body_mistakes(bench, body, words):
    done = bench("http://127.0.0.1:9", "--extra-body", body)
    assert done.status == 2
    assert words in done.err


@pytest.mark.parametrize("streams", ["0", "1,1", "a", "1,,2", ""])
def test_bad_stream_lists(bench, streams):
    assert bench("sweep", "http://127.0.0.1:9", "--streams", streams).status == 2


@pytest.mark.parametrize("shape", ["4", "x5", "0x5", "4x0", "4x5,"])
def test_bad_shapes(bench, shape):
    assert bench("longcheck", "http://127.0.0.1:9", "--prompts", shape).status == 2


def test_unwritable_result_is_found_before_measuring(server, bench):
    endpoint = server()
    done = bench(endpoint.url, "--out", "no/such/folder/r.json")
    assert done.status == 2
    assert "cannot write" in done.err
    assert endpoint.truth() == []


def test_bad_node(bench):
    assert "NAME=DESTINATION" in bench("http://127.0.0.1:9", "--node", "spark1").err
    assert bench("http://127.0.0.1:9", "--node", "a=-oProxyCommand=x").status == 2


def test_no_url(bench):
    assert bench("speed").status == 2
    assert "Usage:" in bench("--help").out


def test_model_that_is_not_listed(server, bench):
    done = bench(server(rate=150).url, "--model", "fault:404", "--max-tokens", "20", "--warmup",
                 "0")  # fmt: skip
    assert done.status == 1
    assert "fault:404 is not in /v1/models (test-model)" in done.err
    assert "[not-found]" in done.err
    assert "--model" in done.err


@pytest.mark.parametrize(
    ("hidden", "arguments", "status", "words"),
    [
        ("aiohttp", ["http://127.0.0.1:9"], 1, "pip install '.[bench]' (in a checkout)"),
        ("aiohttp", ["schema"], 0, ""),
        ("matplotlib", ["http://127.0.0.1:9", "--plot", "x.png"], 1,
         "pip install '.[plot]' (in a checkout)"),
    ],
)  # fmt: skip
def test_missing_extra(tmp_path, hidden, arguments, status, words):
    code = (
        f"import sys; sys.modules[{hidden!r}] = None\n"
        f"sys.argv = ['spark-appliance', 'bench', *{arguments!r}]\n"
        "from spark_appliance.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(),
                          capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    assert done.returncode == status, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_documented_schema_is_the_printed_one(bench):
    committed = json.loads(
        (Path(__file__).parents[2] / "docs" / "bench-result.schema.json").read_text()
    )
    printed = json.loads(bench("schema").out)
    # Wording of generated parts may change with pydantic; fields and what is required may not.
    assert committed["$defs"].keys() == printed["$defs"].keys()
    for name, mine in [("", committed), *committed["$defs"].items()]:
        theirs = printed["$defs"][name] if name else printed
        assert mine.get("properties", {}).keys() == theirs.get("properties", {}).keys(), name
        assert set(mine.get("required", [])) == set(theirs.get("required", [])), name
