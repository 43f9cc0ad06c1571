"""The engine's own classes, loaders and samplers of SGLang 0.5.23 on padded tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_harness import DTYPES, engine_rank, load_plugin, require_engine
from engine_shares import read
from manifest import Checkpoint, tensors
from reference import draft, target
from shares import SMALL, checkpoint
from spark_tp_pad.rules import ModelSizes, ParallelSizes, pad

TOKENS = torch.tensor([3, 999, 0, 512, 640, 77])
FLASH = Checkpoint()


@pytest.fixture(scope="module")
def weights():
    return checkpoint(SMALL)


def load_share(folder, weights, tp, ep, rank):
    with engine_rank(folder, SMALL, tp=tp, ep=ep, rank=rank) as engine:
        loaded = []
        for is_draft in (False, True):
            model = engine.build(draft=is_draft)
            model.load_weights(iter(weights.items()))
            loaded.append(model)
        return read(*loaded)


def forward(shares):
    hidden, logits = target(shares, TOKENS, 3)
    return hidden, logits, *draft(shares, hidden, TOKENS, 2, 4)


@pytest.fixture(scope="module")
def whole(weights, tmp_path_factory):
    require_engine()
    with pytest.MonkeyPatch.context() as monkeypatch:
        # One rank, and the plugin inactive: the engine as it is.
        load_plugin(monkeypatch, active=False)
        return forward([load_share(tmp_path_factory.mktemp("whole"), weights, 1, 1, 0)])


@pytest.mark.parametrize(
    ("tp", "ep", "loader"),
    [
        (2, 1, "cpu"),
        (3, 1, "cpu"),
        (3, 1, "accelerator"),
        (3, 3, "cpu"),
        (3, 3, "accelerator"),
        (4, 1, "cpu"),
        (5, 1, "accelerator"),
        (5, 5, "cpu"),
    ],
)
def test_equal_to_the_whole_model(engine, weights, whole, tp, ep, loader, monkeypatch):
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    if loader == "accelerator":
        # On a CPU the expert loader narrows; elsewhere it expects exact shares.
        monkeypatch.setattr(FusedMoE, "use_padded_loading", False)
    shares = [load_share(engine, weights, tp, ep, rank) for rank in range(tp)]
    hidden, logits, drafted, last = forward(shares)
    vocabulary = SMALL.sizes.vocabulary
    assert all(torch.equal(a, b) for a, b in zip(hidden, whole[0], strict=True))
    assert torch.equal(logits[:, :vocabulary], whole[1][:, :vocabulary])
    assert drafted == whole[2]
    assert torch.equal(last, whole[3])


def test_without_the_plugin_three_ranks_do_not_start(tmp_path, monkeypatch):
    require_engine()
    from sglang.srt.plugins.hook_registry import HookRegistry
    from spark_tp_pad.plugin import HOOKS, _resolve

    # Undo the hooks of earlier tests for this one.
    for hook in HOOKS:
        owner, attribute = _resolve(hook.target)
        function = getattr(owner, attribute)
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        if isinstance(owner, type):
            function = staticmethod(function)
        monkeypatch.setattr(owner, attribute, function)
    assert HookRegistry is not None
    with (
        engine_rank(tmp_path, FLASH, tp=3) as rank,
        pytest.raises(AssertionError, match="not divisible"),
    ):
        rank.build(device="meta")


#: Shapes of one rank at TP 3, written down by hand (rows of a share, columns of a share).
SHARES_OF_THREE = {
    "self_attn.wq_b.weight": (16384, 1280),
    "self_attn.wq_b.weight_scale_inv": (512, 40),
    "self_attn.attn_sink": (96,),
    "self_attn.wo_a.weight": (4096, 4096),
    "self_attn.wo_b.weight": (5120, 4096),
    "self_attn.wo_b.weight_scale_inv": (160, 128),
    "mlp.gate.weight": (384, 5120),
    "mlp.gate.e_score_correction_bias": (384,),
    "mlp.experts.w13_weight": (384, 1536, 2560),
    "mlp.experts.w13_weight_scale_inv": (384, 1536, 160),
    "mlp.experts.w2_weight": (384, 5120, 384),
    "mlp.experts.w2_weight_scale_inv": (384, 5120, 24),
    "mlp.shared_experts.gate_up_proj.weight": (1536, 5120),
    "mlp.shared_experts.gate_up_proj.weight_scale_inv": (48, 160),
    "mlp.shared_experts.down_proj.weight": (5120, 768),
    "mlp.shared_experts.down_proj.weight_scale_inv": (160, 24),
}
WHOLE_ON_EVERY_RANK = {
    "self_attn.indexer.wq_b.weight": (4096, 1280),
    "self_attn.indexer.weights_proj.weight": (32, 5120),
    "self_attn.compressor.wkv.weight": (512, 5120),
    "hc_attn_fn": (24, 20480),
}
TOP_OF_THREE = {
    "model.embed_tokens.weight": (43136, 5120),
    "lm_head.weight": (43136, 5120),
    "vision.blocks.31.attn.qkv_proj.weight": (3072, 1024),
    "aligner.w1.weight": (5120, 9216),
}


def _meta_weights():
    for tensor in tensors(FLASH):
        yield tensor.name, torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device="meta")


def _load_everything(folder, rank, caplog, monkeypatch):
    # Any mode but the static one has the confidence head.
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    with engine_rank(folder, FLASH, tp=3, rank=rank) as engine, caplog.at_level("WARNING"):
        target_model = engine.build(device="meta")
        draft_model = engine.build(draft=True, device="meta")
        caplog.clear()
        # The engine's loaders assert every share's shape; names that they do not know are logged.
        target_model.load_weights(_meta_weights())
        draft_model.load_weights(_meta_weights())
    complaints = [
        message
        for message in caplog.messages
        if "not found" in message or "not initialized" in message or "unexpected" in message
    ]
    assert complaints == []
    parameters = {name: tuple(p.shape) for name, p in target_model.named_parameters()}
    for name, shape in TOP_OF_THREE.items():
        assert parameters[name] == shape, name
    for layer in range(40):
        for name, shape in SHARES_OF_THREE.items():
            assert parameters[f"model.layers.{layer}.{name}"] == shape, (layer, name)
    for name, shape in WHOLE_ON_EVERY_RANK.items():
        assert parameters[f"model.layers.2.{name}"] == shape, name
    drafted = {name: tuple(p.shape) for name, p in draft_model.named_parameters()}
    for stage in range(3):
        for name, shape in SHARES_OF_THREE.items():
            if name.startswith(("mlp.gate", "mlp.experts")):
                shape = (128, *shape[1:])
            assert drafted[f"stages.{stage}.{name}"] == shape, (stage, name)
    assert drafted["markov_head.markov_w2.weight"] == (129280, 256)
    assert drafted["confidence_head.proj.weight"] == (1, 5376)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_all_96085_tensors_through_the_engine_at_three_ranks(engine, caplog, monkeypatch, rank):
    _load_everything(engine, rank, caplog, monkeypatch)


def test_overhead_is_what_the_engine_allocates(engine):
    # Bytes of the padded projections on three ranks, less those of one unpadded rank.
    def attention_bytes(tp, rank):
        with engine_rank(engine, FLASH, tp=tp, rank=rank) as state:
            models = [state.build(draft=d, device="meta") for d in (False, True)]
        return sum(
            parameter.nbytes
            for model in models
            for name, parameter in model.named_parameters()
            if any(f"self_attn.{part}." in name for part in ("wq_b", "wo_a", "wo_b"))
        )

    added = sum(attention_bytes(3, rank) for rank in range(3)) - attention_bytes(1, 0)
    expected = pad(ModelSizes(), ParallelSizes(3)).overhead_bytes()["attention"]
    assert added == pytest.approx(3 * expected, abs=3)


@pytest.mark.parametrize(("tp", "ep", "width"), [(4, 1, 640), (8, 2, 640), (3, 1, 768)])
def test_expert_width_suits_the_cutlass_kernel(engine, tp, ep, width):
    # Mxfp4FlashinferCutlassMoEMethod wants multiples of 128; 2304 / 4 is 576.
    with engine_rank(engine, FLASH, tp=tp, ep=ep) as rank:
        model = rank.build(device="meta")
    experts = model.model.layers[0].mlp.experts
    assert experts.intermediate_size_per_partition == width
    assert width % 128 == 0


@pytest.mark.usefixtures("engine")
def test_cropping_of_the_engine():
    from sglang.srt.layers.logits_processor import LogitsProcessor

    logits = torch.cat([-torch.ones(2, 1000), torch.zeros(2, 152)], 1)
    metadata = SimpleNamespace(next_token_logits_buffer=None)
    cut = LogitsProcessor._copy_logits_to_buffer(SimpleNamespace(vocab_size=1000), logits, metadata)
    assert cut.shape == (2, 1000)


@pytest.mark.usefixtures("engine")
def test_draft_sampling_of_the_engine_skips_padded_entries(monkeypatch):
    from sglang.kernels.ops.speculative.dspark.markov_sample import MarkovSampleStep
    from sglang.srt.models import dspark

    padding = pad(SMALL.sizes, ParallelSizes(3))
    rows = padding.vocabulary // 3
    generator = torch.Generator().manual_seed(0)
    # All real logits are negative, so the zero of a padded row would win.
    real = -torch.randint(1, 500, (1, 1000), generator=generator).float()
    bias = -torch.randint(0, 100, (1, 1000), generator=generator).float()
    local = torch.cat([real, torch.zeros(1, padding.vocabulary - 1000)], 1).split(rows, 1)

    def step(rank, gather):
        return MarkovSampleStep.execute(
            base_logits=local[rank].contiguous(),
            bias=bias[:, rank * rows : (rank + 1) * rows].contiguous(),
            temperatures=torch.zeros(1),
            key=0,
            offset=torch.zeros(1, dtype=torch.int64),
            step=0,
            step_dtype=torch.float32,
            vocab_start=rank * rows,
            gather=gather,
            has_sampled_rows=False,
        )

    candidates: list[torch.Tensor] = []

    def keep(partial):
        candidates.append(partial)
        return partial

    for rank in range(3):
        step(rank, keep)
    tokens = {int(step(rank, lambda _: torch.cat(candidates))) for rank in range(3)}
    assert tokens == {int((real + bias).argmax())}

    monkeypatch.setattr(
        dspark, "tensor_model_parallel_all_gather", lambda *_, **__: torch.cat(local, 1)
    )
    whole = dspark.gather_and_crop_vocab(local[0], SimpleNamespace(org_vocab_size=1000))
    assert torch.equal(whole, real)


def test_routing_of_the_engine_never_chooses_a_padded_expert(engine, weights):
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-32, 33, (512, SMALL.sizes.hidden), generator=generator) / 8

    def chosen(tp, ep, is_draft):
        with engine_rank(engine, SMALL, tp=tp, ep=ep, rank=tp - 1) as rank:
            model = rank.build(draft=is_draft)
            model.load_weights(iter(weights.items()))
            block = model.stages[0] if is_draft else model.model.layers[0]
            logits = x @ block.mlp.gate.weight.float().T
            result = block.mlp.topk(x.bfloat16(), logits)
            # The engine leaves the order of the chosen open.
            order = result.topk_ids.argsort(1)
            return (
                logits.shape[1],
                result.topk_ids.gather(1, order),
                result.topk_weights.gather(1, order),
            )

    for is_draft, real, padded in ((False, 8, 9), (True, 7, 9)):
        count, ids, factors = chosen(3, 3, is_draft)
        assert count == padded
        assert int(ids.max()) < real
        whole_count, whole_ids, whole_factors = chosen(1, 1, is_draft)
        assert whole_count == real
        assert torch.equal(ids, whole_ids)
        # They are divided by their sum, whose order may differ.
        assert torch.allclose(factors, whole_factors, rtol=1e-6, atol=0)


def test_hooks_of_another_plugin_on_the_same_function_stay_in_effect(engine, monkeypatch):
    from sglang.srt.model_loader import loader
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.model_loader.loader._initialize_model"
    monkeypatch.setattr(loader, "_initialize_model", loader._initialize_model)
    monkeypatch.setattr(HookRegistry, "_hooks", HookRegistry._hooks.copy())
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched.copy())
    calls = []

    def other(original, *args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    HookRegistry.register(target, other, HookType.AROUND)
    HookRegistry.apply_hooks()
    # A second load in the same process wraps nothing twice.
    load_plugin(monkeypatch, active=True)
    with engine_rank(engine, FLASH, tp=3) as rank:
        model = rank.build(device="meta")
    assert len(calls) == 1
    assert model.config.o_groups == 12
    assert "load_weights" in vars(model)


def test_inactive_sizes_are_said_in_the_log(engine, caplog):
    with caplog.at_level("INFO", "spark_tp_pad"), engine_rank(engine, FLASH, tp=2) as rank:
        model = rank.build(device="meta")
    assert "tp-pad: every split size divides at --tp 2 --ep-size 1; nothing is padded" in (
        caplog.messages
    )
    # Not wrapped: the class's own method.
    assert "load_weights" not in vars(model)


def test_a_model_that_cannot_be_padded_ends_the_process(engine):
    sizes = replace(SMALL.sizes, heads=72, groups=24)
    with (
        pytest.raises(SystemExit, match="cannot be padded to a head count"),
        engine_rank(engine, replace(SMALL, sizes=sizes), tp=7),
    ):
        pass


@pytest.mark.slow
def test_a_broken_plugin_ends_every_engine_process():
    require_engine()
    # load_plugins logs exceptions and goes on; this one must not be of that kind.
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from engine_harness import _let_torchvision_import; _let_torchvision_import()\n"
        "from spark_tp_pad import plugin\n"
        "plugin.SUPPORTED_ENGINES = ('0.0.0',)\n"
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins()\n"
        "print('the engine would have started')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SPARK_TP_PAD": "1"},
    )
    assert result.returncode == 1
    assert "would have started" not in result.stdout
    assert result.stderr.strip().endswith("may not fit another version")
