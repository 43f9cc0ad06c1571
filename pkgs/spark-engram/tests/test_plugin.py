"""The plugin inside the engine's real Engram code, on the CPU, in a fresh process each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REVISION
from engine_files import engine_root

torch = pytest.importorskip("torch", reason="needs torch (a CPU build will do)")
pytestmark = pytest.mark.engine
TESTS = Path(__file__).parent

PRELUDE = """
import logging, os, sys
from pathlib import Path
logging.basicConfig(level=logging.INFO, format="%(message)s")
sys.path.insert(0, os.environ["TESTS"])
import torch
import engine_stub
engine = engine_stub.install(Path(os.environ["ROOT"]))
engine.model.model_path = os.environ["MODEL"]
engine.parallel.tp_size, engine.parallel.tp_rank = 3, 1
from sglang.srt.plugins import load_plugins
from spark_engram import fake, layout
from spark_engram.checkpoint import Checkpoint
table = Checkpoint.read(Path(os.environ["MODEL"])).tables[0]

def embedding():
    from sglang.srt.layers import engram
    return engram.EngramEmbedding(
        table.total_rows, 256, table.layer, column_bounds=table.column_bounds)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return engine_root(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def served(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    for rank in range(3):
        model.pack(folder, tp=3, rank=rank)
    return folder


def engine(root, model, code, **environment):
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        capture_output=True, text=True, check=False,
        env={
            "PATH": os.environ["PATH"], "TESTS": str(TESTS), "ROOT": str(root),
            "MODEL": str(model.folder), "CUDA_VISIBLE_DEVICES": "", **environment,
        },
    )  # fmt: skip


SAME = """
load_plugins()
from sglang.srt.layers import engram
packed = embedding()
assert type(packed).__name__ == "PackedEngramEmbedding"
assert isinstance(packed, engram.EngramEmbedding)
weights, scales = fake.table_arrays(table, 0)
w = torch.from_numpy(weights).view(torch.float8_e4m3fn)
s = torch.from_numpy(scales).view(torch.float8_e8m0fnu)
# The loader hands the checkpoint's tensors over; nothing of them is kept.
packed.weight.weight_loader(packed.weight, w)
packed.scale.weight_loader(packed.scale, s)
assert sum(p.numel() for p in packed.parameters()) == 0
packed.finish_load("layer 1")

# The engine's own class in memory, past the guard that forbids it beside the plugin.
memory = engram.EngramEmbedding.__mro__[1].__new__(engram.EngramEmbedding.__mro__[1])
torch.nn.Module.__init__(memory)
memory.dim, memory.tp_size, memory.peer, memory.host_table = 256, 3, None, None
memory.row_start, memory.rows = packed.row_start, packed.rows
memory._sort_host_reads = False
owned = slice(packed.row_start, packed.row_start + packed.rows)
memory.weight = torch.nn.Parameter(w[owned].clone(), requires_grad=False)
memory.scale = torch.nn.Parameter(s[owned].clone(), requires_grad=False)

generator = torch.Generator().manual_seed(1)
for shape in ((1, 24), (7, 24), (300, 24), (0, 24)):
    ids = torch.randint(0, table.total_rows, shape, generator=generator)
    ours, theirs = packed(ids), memory(ids)
    assert ours.dtype == theirs.dtype == torch.bfloat16 and ours.shape == theirs.shape
    assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
print("SAME", packed.store.stats().batches > 0)
"""


def test_lookups_equal_the_engines_bit_for_bit(root, model, served):
    done = engine(root, model, SAME, SPARK_ENGRAM_DIR=str(served), SPARK_ENGRAM_REVISION=REVISION)
    assert done.stdout == "SAME True\n", done.stderr
    assert "checkpoint tensors skipped: scale, weight" in done.stderr
    assert "of table memory not allocated" in done.stderr


def test_without_the_variable_the_engine_is_untouched(root, model):
    code = "load_plugins()\nembed = embedding()\nprint(type(embed).__module__, embed.weight.shape)"
    done = engine(root, model, code)
    assert "sglang.srt.layers.engram torch.Size([" in done.stdout, done.stderr


FOREIGN = """
served = Path(os.environ["SPARK_ENGRAM_DIR"])
(served / "engram-l1-r0of3.bin").rename(served / "engram-l1-r2of3.bin")
engine.parallel.tp_rank = 2
"""
OTHER_CONFIG = """
config = Path(os.environ["MODEL"]) / "config.json"
config.write_text(config.read_text() + " ")
"""
TWO_PLACES = "exclude each other"
REFUSED = {
    "other tp": ({}, "engine.parallel.tp_size = 4", "engram-l1-r1of4.bin: missing; the folder"),
    "foreign file": ({}, FOREIGN, "rank is 0, needed 2"),
    "other revision": (
        {"SPARK_ENGRAM_REVISION": "other"}, "", f"revision is '{REVISION}', needed 'other'",
    ),
    "other config": ({}, OTHER_CONFIG, "config_sha256 is"),
    "host table": ({"SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE": "1"}, "", TWO_PLACES),
    "peer shards": ({"SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS": "1"}, "", TWO_PLACES),
    "no mmap": (
        {}, "engine.model.weight_loader_disable_mmap = True",
        "--weight-loader-disable-mmap would read the whole Engram tables",
    ),
    "eager loader": (
        {}, "engine.model.load_format = 'fastsafetensors'", "--load-format fastsafetensors",
    ),
    "backend": ({"SPARK_ENGRAM_BACKEND": "aio"}, "", "must be one of auto, io_uring, pread"),
}  # fmt: skip
EACH = """
import json, shutil, tempfile
# The imports are the slow part: every case is a fork of the process that has them.
for name, (environment, setup, _) in json.loads(os.environ["CASES"]).items():
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.dup2(writer, 2)
        os.dup2(writer, 1)
        private = Path(tempfile.mkdtemp(dir=os.environ["SCRATCH"]))
        for variable in ("SPARK_ENGRAM_DIR", "MODEL"):
            os.environ[variable] = str(shutil.copytree(os.environ[variable], private / variable))
        engine.model.model_path = os.environ["MODEL"]
        os.environ.update(environment)
        exec(setup)
        load_plugins()
        try:
            embedding()
            last = "STARTED"
        except BaseException as error:
            last = f"{type(error).__name__}: {error}"
        os.write(writer, ("\\n" + last).encode())
        os._exit(0)
    os.close(writer)
    os.wait()
    with os.fdopen(reader) as stream:
        print("RESULT", json.dumps([name, stream.read().splitlines()[-1]]), flush=True)
"""


@pytest.fixture(scope="module")
def refusals(root, model, served, tmp_path_factory):
    done = engine(
        root, model, EACH, CASES=json.dumps(REFUSED), SPARK_ENGRAM_DIR=str(served),
        SCRATCH=str(tmp_path_factory.mktemp("cases")),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return dict(json.loads(line) for line in lines)


@pytest.mark.parametrize("name", REFUSED)
def test_a_start_that_must_not_happen_does_not(refusals, name):
    assert REFUSED[name][2] in refusals[name]
    assert refusals[name].startswith(("MismatchError: ", "UsageError: "))


def test_a_swallowed_plugin_error_still_stops_the_start(root, model, served):
    code = """
sys.modules["spark_engram.engine.embedding"] = None  # its import fails
load_plugins()
print("load_plugins went on")
embedding()
print("STARTED")
"""
    done = engine(root, model, code, SPARK_ENGRAM_DIR=str(served))
    assert done.stdout == "load_plugins went on\n"
    assert "was not replaced by the spark_engram plugin" in done.stderr.splitlines()[-1]


def test_a_checkpoint_with_other_shapes_is_refused_while_loading(root, model, served):
    code = """
load_plugins()
packed = embedding()
packed.weight.weight_loader(packed.weight, torch.empty(5, 256))
"""
    done = engine(root, model, code, SPARK_ENGRAM_DIR=str(served))
    assert "the checkpoint's weight has shape (5, 256)" in done.stderr


def test_counters_are_reported(root, model, served, tmp_path):
    code = """
load_plugins()
packed = embedding()
from spark_engram.engine import reporting
packed.finish_load("layer 1")
before = {}
reporting.report(before, None)
packed(torch.arange(packed.row_start, packed.row_start + 240).view(10, 24))
reporting.report(before, Path(os.environ["FILE"]))
"""
    file = tmp_path / "engram.prom"
    done = engine(
        root, model, code, SPARK_ENGRAM_DIR=str(served), FILE=str(file),
        SPARK_ENGRAM_STATS_SECONDS="0",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Engram layer 1: 1 batches, 240 lookups, 240 own rows, 0 % from the cache" in done.stderr
    assert 'spark_engram_owned_total{layer="1",rank="1",backend=' in file.read_text()
