"""Proof on a CUDA GPU that packed tables give the engine's own results, bit for bit.

    python tests/gpu/proof.py --sglang DIR --work DIR [--json FILE] [--rows-per-column N]

``--sglang`` is the folder that holds ``sglang/`` (an unpacked wheel of 0.5.23). The engine's
embedding, hashing, gathering, gating, hook registry and breakable graph are its real files;
`engine_stub` says what is stubbed. Prints a PASS or FAIL line for each proof, then the numbers
as JSON; ends with status 1 if anything failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import engine_stub
import numpy as np
import torch
from spark_engram import fake, pack
from spark_engram.checkpoint import Checkpoint
from spark_engram.fake import FakeSpec

VOCAB = 2000
HIDDEN, COPIES = 1024, 4
DRAFT = 6
STREAMS = (1, 4, 8)  # x 6 verify tokens x 24 columns = 144, 576, 1152 ids
COLUMNS = 24


class Mode:
    """A forward mode of the engine."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_idle(self) -> bool:
        return False

    def is_decode(self) -> bool:
        return self.name == "decode"

    def is_target_verify(self) -> bool:
        return self.name == "verify"

    def is_extend(self) -> bool:
        return self.name in ("extend", "verify")

    def is_extend_without_speculative(self) -> bool:
        return self.name == "extend"


@dataclass
class World:
    """What every proof uses."""

    engine: engine_stub.Engine
    memory_class: type
    checkpoint: Checkpoint
    config: engine_stub.Bag
    layout: object
    arrays: dict[int, tuple[torch.Tensor, torch.Tensor]]


def build_world(sglang: Path, work: Path, rows_per_column: int) -> World:
    engine = engine_stub.install(sglang)
    model = work / "ckpt"
    spec = FakeSpec(rows_per_column=rows_per_column)
    if not (model / "config.json").exists():
        fake.write_checkpoint(model, spec)
    served = work / "packed"
    served.mkdir(exist_ok=True)
    for tp, ranks in ((1, 1), (4, 4)):
        for rank in range(ranks):
            options = pack.PackOptions(checkpoint=model, output=served, tp=tp, rank=rank)
            pack.pack(options)
    os.environ["SPARK_ENGRAM_DIR"] = str(served)
    engine.model.model_path = str(model)

    from sglang.srt.layers import engram

    original, init = engram.EngramEmbedding, engram.EngramEmbedding.__init__
    import sglang.srt.models.deepseek_v4
    from sglang.srt.plugins import load_plugins

    load_plugins()
    assert engram.EngramEmbedding.__name__ == "PackedEngramEmbedding", "the plugin did not load"
    original.__init__ = init  # the guard is proved elsewhere; here both live side by side
    checkpoint = Checkpoint.read(model)
    config = engine_stub.Bag(**fake.config_for(spec), rms_norm_eps=1e-6, hc_mult=COPIES)
    config.hidden_size = HIDDEN
    arrays = {}
    for table in checkpoint.tables:
        weights, scales = fake.table_arrays(table, spec.seed)
        arrays[table.layer] = (
            torch.from_numpy(weights).view(torch.float8_e4m3fn),
            torch.from_numpy(scales).view(torch.float8_e8m0fnu),
        )
    layout = engram.EngramLayout.from_config(config)
    return World(engine, original, checkpoint, config, layout, arrays)


def embeddings(world: World, kind: type, tp: int = 1, rank: int = 0) -> list[torch.nn.Module]:
    world.engine.parallel.tp_size, world.engine.parallel.tp_rank = tp, rank
    made = []
    with torch.device("cuda"):
        for table in world.checkpoint.tables:
            embed = kind(table.total_rows, 256, table.layer, column_bounds=table.column_bounds)
            for name, loaded in zip(("weight", "scale"), world.arrays[table.layer], strict=True):
                parameter = getattr(embed, name)
                parameter.weight_loader(parameter, loaded)
            embed.finish_load(f"layer {table.layer}")
            made.append(embed)
    return made


def packed_class() -> type:
    from sglang.srt.layers import engram

    return engram.EngramEmbedding


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype == torch.bfloat16, (ours.dtype, theirs.dtype)
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    different = int((ours.view(torch.int16) != theirs.view(torch.int16)).sum())
    assert different == 0, f"{different} of {ours.numel()} values differ"


def random_ids(world: World, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Hash ids [T, 2, 24] as the hasher lays them out."""
    limit = min(table.total_rows for table in world.checkpoint.tables)
    shape = (tokens, len(world.checkpoint.tables), COLUMNS)
    return torch.randint(0, limit, shape, generator=generator).cuda()


def prove_eager(world: World) -> dict[str, object]:
    """Lookups of 0 to 2048 tokens, every rank of TP 1 and 4, more than the staging holds."""
    generator = torch.Generator().manual_seed(0)
    os.environ["SPARK_ENGRAM_MAX_TOKENS"] = "64"
    count = 0
    for tp in (1, 4):
        sums: dict[tuple[int, int], torch.Tensor] = {}
        for rank in range(tp):
            ours = embeddings(world, packed_class(), tp, rank)
            theirs = embeddings(world, world.memory_class, tp, rank)
            for tokens in (0, 1, 6, 24, 48, 63, 64, 65, 300, 2048):
                generator.manual_seed(tokens)
                ids = random_ids(world, tokens, generator)
                for index in range(2):
                    view = ids[:, index]
                    found = ours[index]._owned_rows(view) if tokens else ours[index](view)
                    want = theirs[index]._owned_rows(view) if tokens else theirs[index](view)
                    same_bits(found, want)
                    count += view.numel()
                    key = (tokens, index)
                    sums[key] = found + sums[key] if key in sums else found
        if tp == 1:
            whole = sums
    for key, total in sums.items():
        # Summing the ranks is what the engine's all-reduce does.
        assert torch.equal(total, whole[key]), key
    return {"rows_compared": count}


class Model(torch.nn.Module):
    """The engine's hasher and Engram layers around some computation."""

    def __init__(self, world: World, packed: bool, filler: int, tp: int = 1) -> None:
        super().__init__()
        from sglang.srt.layers import engram

        world.engine.parallel.tp_size, world.engine.parallel.tp_rank = tp, 0
        self.packed = packed
        replacement = engram.EngramEmbedding
        engram.EngramEmbedding = replacement if packed else world.memory_class
        try:
            with torch.device("cuda"):
                self.layers = torch.nn.ModuleList(
                    engram.Engram(world.config, table.layer, world.layout)
                    for table in world.checkpoint.tables
                )
        finally:
            engram.EngramEmbedding = replacement
        self.to(device="cuda")
        for layer, table in zip(self.layers, world.checkpoint.tables, strict=True):
            for name, loaded in zip(("weight", "scale"), world.arrays[table.layer], strict=True):
                parameter = getattr(layer.embed, name)
                parameter.weight_loader(parameter, loaded)
            layer.embed.finish_load(f"layer {table.layer}")
        self.hasher = make_hasher(world).cuda()
        self.hasher.init_history(16, "cuda")
        generator = torch.Generator().manual_seed(5)
        square = torch.randn(4096, 4096, generator=generator) / 64
        self.square = square.to("cuda", torch.bfloat16)
        self.filler = filler

    def compute(self, x: torch.Tensor, rounds: int) -> torch.Tensor:
        load = self.square
        for _ in range(rounds):
            load = load @ self.square
        return x + load[:1, :1].nan_to_num() * 0

    def forward(self, input_ids: torch.Tensor, batch: engine_stub.Bag) -> torch.Tensor:
        from sglang.srt.model_executor.runner_backend_utils import breakable_cuda_graph
        from sglang.srt.models import deepseek_v4

        in_graph = breakable_cuda_graph.is_in_breakable_cuda_graph()
        if batch.forward_mode.is_extend() and in_graph:
            hash_ids = self.hasher.new_hash_ids(input_ids)
            deepseek_v4.bcg_deepseek_v4_engram_hash_ids(self.hasher, input_ids, hash_ids)
        elif self.packed:
            hash_ids = self.hasher(input_ids, batch)
        else:  # the engine as it is without the plugin's hook
            hash_ids = type(self.hasher).forward.__wrapped__(self.hasher, input_ids, batch)
        tokens = input_ids.shape[0]
        x = (input_ids.to(torch.bfloat16) / VOCAB).view(-1, 1, 1).expand(tokens, COPIES, HIDDEN)
        x = self.compute(x.contiguous(), self.filler)
        x = self.layers[0](x, hash_ids[:, 0], batch, input_ids=input_ids)
        x = self.compute(x, self.filler * 13)
        return self.layers[1](x, hash_ids[:, 1], batch, input_ids=input_ids)


def make_hasher(world: World) -> torch.nn.Module:
    """Build the engine's `EngramHasher` without a tokenizer: its own buffers and arithmetic."""
    from sglang.srt.layers import engram

    hasher = engram.EngramHasher.__new__(engram.EngramHasher)
    torch.nn.Module.__init__(hasher)
    layout = world.layout
    hasher.max_ngram_size = layout.max_ngram_size
    hasher.pad_id = 2
    flat = [[p for per_ngram in layer for p in per_ngram] for layer in layout.primes]
    offsets = np.array([np.cumsum([0, *sizes[:-1]]) for sizes in flat])
    multipliers = engram.compute_hash_multipliers(layout.layer_ids, layout.max_ngram_size, VOCAB)
    hasher.register_buffer("token_map", torch.arange(VOCAB), persistent=False)
    hasher.register_buffer("multipliers", multipliers, persistent=False)
    hasher.register_buffer("primes", torch.tensor(layout.primes), persistent=False)
    hasher.register_buffer("offsets", torch.tensor(offsets), persistent=False)
    hasher.image_token_id = None
    hasher.history = None
    hasher.pad_row = 0
    hasher._cpu_hash_params = None
    return hasher


def verify_batch(streams: int) -> tuple[torch.Tensor, engine_stub.Bag]:
    tokens = streams * DRAFT
    batch = engine_stub.Bag(
        forward_mode=Mode("verify"),
        req_pool_indices=torch.arange(streams, device="cuda"),
        positions=torch.arange(10, 10 + tokens, device="cuda"),
        out_cache_loc=torch.arange(1, 1 + tokens, device="cuda"),
        spec_info=engine_stub.Bag(draft_token_num=DRAFT),
        engram_history=None, engram_staged_rows=None, extend_seq_lens_cpu=None,
    )  # fmt: skip
    return torch.zeros(tokens, dtype=torch.int64, device="cuda"), batch


def decode_batch(requests: int) -> tuple[torch.Tensor, engine_stub.Bag]:
    batch = engine_stub.Bag(
        forward_mode=Mode("decode"),
        req_pool_indices=torch.arange(requests, device="cuda"),
        positions=torch.full((requests,), 10, device="cuda"),
        out_cache_loc=torch.arange(1, 1 + requests, device="cuda"),
        engram_history=None, engram_staged_rows=None, extend_seq_lens_cpu=None,
    )  # fmt: skip
    return torch.zeros(requests, dtype=torch.int64, device="cuda"), batch


def extend_batch(lengths: list[int]) -> tuple[torch.Tensor, engine_stub.Bag]:
    tokens = sum(lengths)
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    batch = engine_stub.Bag(
        forward_mode=Mode("extend"),
        req_pool_indices=torch.arange(len(lengths), device="cuda"),
        positions=torch.cat([torch.arange(length) for length in lengths]).cuda(),
        out_cache_loc=torch.arange(1, 1 + tokens, device="cuda"),
        extend_seq_lens=torch.tensor(lengths, device="cuda"),
        extend_start_loc=torch.tensor(starts, device="cuda"),
        extend_seq_lens_cpu=lengths,
        engram_history=None, engram_staged_rows=None,
    )  # fmt: skip
    return torch.zeros(tokens, dtype=torch.int64, device="cuda"), batch


def capture(model: Model, ids: torch.Tensor, batch: engine_stub.Bag):
    """The engine's way: warm up on a side stream, then capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            model(ids, batch)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(ids, batch)
    return graph, out


def set_prefetch(on: bool) -> None:
    from spark_engram.engine import prefetch

    if prefetch._current is not None:
        prefetch._current._enabled = on


def prove_graph(world: World) -> dict[str, object]:
    """Target-verify and decode in CUDA graphs, replayed with changing ids, prefetch on and off."""
    os.environ["SPARK_ENGRAM_MAX_TOKENS"] = "64"
    generator = torch.Generator().manual_seed(1)
    replays = 0
    for prefetch in (True, False):
        ours, theirs = Model(world, True, 2), Model(world, False, 2)
        set_prefetch(prefetch)
        batches = [verify_batch(streams) for streams in STREAMS]
        batches += [decode_batch(requests) for requests in (1, 7, 16)]
        for ids, batch in batches:
            mine, my_out = capture(ours, ids, batch)
            plain, plain_out = capture(theirs, ids, batch)
            outputs = []
            for _ in range(12):
                ids.copy_(torch.randint(0, VOCAB, ids.shape, generator=generator))
                history = torch.randint(0, VOCAB, ours.hasher.history.shape, generator=generator)
                ours.hasher.history.copy_(history)
                theirs.hasher.history.copy_(history)
                mine.replay()
                plain.replay()
                same_bits(my_out, plain_out)
                outputs.append(my_out.clone())
                replays += 1
            assert not torch.equal(outputs[0], outputs[1]), "the ids did not change"
        set_prefetch(True)
    return {"replays": replays}


def prove_rapid(world: World) -> dict[str, object]:
    """400 replays enqueued without waiting in between: no lookup may see another's staging."""
    os.environ["SPARK_ENGRAM_MAX_TOKENS"] = "64"
    ours, theirs = Model(world, True, 0), Model(world, False, 0)
    generator = torch.Generator().manual_seed(2)
    made = []
    batches = [verify_batch(streams) for streams in STREAMS]  # the graphs use their memory
    for ids, batch in batches:
        made.append((ids, capture(ours, ids, batch), capture(theirs, ids, batch)))
    inputs = [
        (n % 3, torch.randint(0, VOCAB, made[n % 3][0].shape, generator=generator).cuda())
        for n in range(400)
    ]
    torch.cuda.synchronize()
    results = []
    for side in (1, 2):
        outputs = []
        for which, tokens in inputs:
            made[which][0].copy_(tokens)
            graph, out = made[which][side]
            graph.replay()
            outputs.append(out.clone())
        results.append(outputs)
    torch.cuda.synchronize()
    for mine, plain in zip(*results, strict=True):
        same_bits(mine, plain)
    return {"replays": len(inputs)}


def prove_extend(world: World) -> dict[str, object]:
    """Eager extend up to 2048 tokens, and the engine's breakable prefill graph."""
    from sglang.srt.model_executor.runner_backend_utils import breakable_cuda_graph as breakable
    from spark_engram.engine.staging import Staging

    os.environ["SPARK_ENGRAM_MAX_TOKENS"] = "2048"
    generator = torch.Generator().manual_seed(3)
    ours, theirs = Model(world, True, 1), Model(world, False, 1)
    started = []
    original = Staging.start
    Staging.start = lambda self, ids: started.append(ids.numel()) or original(self, ids)
    try:
        for lengths in ([5], [700, 3, 1345], [1]):
            ids, batch = extend_batch(lengths)
            ids.copy_(torch.randint(0, VOCAB, ids.shape, generator=generator))
            same_bits(ours(ids, batch), theirs(ids, batch))
        assert len(started) == 6, started
        ids, batch = extend_batch([40, 88])
        world.engine.forward_context.forward_batch = batch
        with breakable.enable_breakable_cuda_graph():
            ours(ids, batch)
            torch.cuda.synchronize()
            graph = breakable.BreakableCUDAGraph()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with breakable.BreakableCUDAGraphCapture(graph, stream=stream):
                out = ours(ids, batch)
        torch.cuda.synchronize()
        assert len(graph._break_fns) == 3, "hash, lookup, lookup"
        before = len(started)
        for _ in range(6):
            ids.copy_(torch.randint(0, VOCAB, ids.shape, generator=generator))
            with breakable.enable_breakable_cuda_graph():
                graph.replay()
            same_bits(out, theirs(ids, batch))
        assert len(started) == before + 12, "the prefill graph did not prefetch"
    finally:
        Staging.start = original
    return {"prefill_graph_replays": 6}


def abort_child(world: World) -> None:
    """Replay a graph on a damaged file; must not return."""
    os.environ["SPARK_ENGRAM_MAX_TOKENS"] = "64"
    model = Model(world, True, 0)
    set_prefetch(os.environ["PROOF_PREFETCH"] == "1")
    ids, batch = verify_batch(8)
    graph, _ = capture(model, ids, batch)
    for layer in (1, 14):
        path = Path(os.environ["SPARK_ENGRAM_DIR"]) / f"engram-l{layer}-r0of1.bin"
        with path.open("r+b") as file:
            size = path.stat().st_size
            for at in range(4096 + 64, size, 4096):
                file.seek(at)
                file.write(b"damage")
            file.flush()
            os.fsync(file.fileno())
    graph.replay()
    torch.cuda.synchronize()
    print("SURVIVED", flush=True)


def prove_abort(_world: World, arguments: argparse.Namespace) -> dict[str, object]:
    """A damaged page under a graph replay ends the process with a message."""
    for prefetch in ("1", "0"):
        work = arguments.work / f"abort{prefetch}"
        work.mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, __file__, "--sglang", str(arguments.sglang), "--work", str(work),
             "--rows-per-column", "200", "--abort-child"],
            capture_output=True, text=True, check=False,
            env={**os.environ, "PROOF_PREFETCH": prefetch},
        )  # fmt: skip
        assert done.returncode == -signal.SIGABRT, (done.returncode, done.stderr[-2000:])
        assert "spark-engram: fatal: page" in done.stderr, done.stderr[-2000:]
        assert "SURVIVED" not in done.stdout
    return {}


def step_ms(graph, ids: torch.Tensor, steps: int, generator: torch.Generator) -> float:
    """Median milliseconds of a replay with fresh tokens."""
    tokens = [torch.randint(0, VOCAB, ids.shape, generator=generator).cuda() for _ in range(steps)]
    torch.cuda.synchronize()
    times = []
    for value in tokens:
        ids.copy_(value)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(np.median(times))


def measure(world: World, steps: int = 60) -> dict[str, object]:
    """Time that packed tables add to a decode step, against the same step with them in memory."""
    os.environ["SPARK_ENGRAM_MAX_TOKENS"] = "64"
    rows = []
    for tp in (1, 4):
        for filler in (0, 4):
            for prefetch in (False, True):
                ours, theirs = Model(world, True, filler, tp), Model(world, False, filler, tp)
                set_prefetch(prefetch)
                for streams in STREAMS:
                    ids, batch = verify_batch(streams)
                    generator = torch.Generator().manual_seed(7)
                    mine, _ = capture(ours, ids, batch)
                    plain, _ = capture(theirs, ids, batch)
                    base = step_ms(plain, ids, steps, generator)
                    with_packed = step_ms(mine, ids, steps, generator)
                    rows.append(
                        {
                            "tp": tp, "ids": streams * DRAFT * COLUMNS, "prefetch": prefetch,
                            "memory_step_ms": round(base, 3),
                            "added_ms": round(with_packed - base, 3),
                        }
                    )  # fmt: skip
                    print("  ", rows[-1], flush=True)
                set_prefetch(True)
    store = ours.layers[0].embed.store
    stats = store.stats()
    return {"steps": rows, "backend": store.backend, "note": store.note, "reads": stats.reads,
            "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sglang", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows-per-column", type=int, default=20_000)
    parser.add_argument("--no-measure", action="store_true")
    parser.add_argument("--only", action="append", help="names of proofs; default: all")
    parser.add_argument("--abort-child", action="store_true")
    arguments = parser.parse_args()
    faulthandler.enable()
    if not torch.cuda.is_available():
        print("FAIL no CUDA device")
        return 1
    arguments.work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("SPARK_ENGRAM_STATS_SECONDS", "0")
    world = build_world(arguments.sglang, arguments.work, arguments.rows_per_column)
    if arguments.abort_child:
        abort_child(world)
        return 0
    numbers: dict[str, object] = {}
    failed = 0
    proofs = {
        "eager": prove_eager,
        "graph": prove_graph,
        "rapid": prove_rapid,
        "extend": prove_extend,
        "abort": lambda inner: prove_abort(inner, arguments),
    }
    for name, proof in proofs.items():
        if arguments.only and name not in arguments.only:
            continue
        started = time.monotonic()
        try:
            numbers[name] = proof(world)
            word = "PASS"
        except Exception:
            failed += 1
            word = "FAIL"
            traceback.print_exc()
        print(f"{word} {name} {numbers.get(name)} {time.monotonic() - started:.1f} s", flush=True)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    if not arguments.no_measure:
        numbers["measure"] = measure(world)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(numbers, indent=1) + "\n")
    print(json.dumps(numbers))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
