"""One rank on a CUDA device: the real modules on a block of real width; results go to a file.

    python gpu_worker.py SPEC.json RANK

SPEC: folder, weights (safetensors), tp, devices, backend, store, out. Ranks that share a device
speak over gloo, because NCCL refuses two ranks on one device.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import engine_rank, load_plugin, require_engine
from manifest import Checkpoint
from safetensors.torch import load_file
from spark_tp_pad.rules import ModelSizes

#: Real widths, one layer, one draft stage, few experts and tokens, so that it fits anywhere.
WIDE = Checkpoint(
    sizes=ModelSizes(layers=1, draft_stages=1, experts=4, draft_experts=4, vocabulary=32000),
    kv_sources=(0,),
    index_sources=(0,),
    compress_ratios=(0, 0),
    engram_rows=(),
    vision_blocks=0,
)
TOKENS = 16
CONTEXT = 256


def _groups(spec: dict[str, Any], rank: int) -> None:
    from sglang.srt.distributed import parallel_state
    from sglang.srt.distributed.device_communicators import pynccl

    if spec["backend"] == "gloo":
        pynccl.PyNcclCommunicator = lambda **_: None
    parallel_state.set_custom_all_reduce(False)
    parallel_state.init_distributed_environment(
        world_size=spec["tp"],
        rank=rank,
        distributed_init_method=f"file://{spec['store']}",
        local_rank=spec["devices"][rank],
        backend=spec["backend"],
    )
    parallel_state.initialize_model_parallel(backend=spec["backend"])


def _cache(generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """A paged FP8 cache of CONTEXT latents in SGLang's layout: 576 data bytes, then 8 of scales."""
    nope = torch.randint(-3, 4, (CONTEXT, 448), generator=generator).float()
    rope = torch.randint(-4, 5, (CONTEXT, 64), generator=generator).float() / 4
    data = torch.cat(
        [
            nope.to(torch.float8_e4m3fn).view(torch.uint8),
            rope.to(torch.bfloat16).view(torch.uint8),
        ],
        1,
    )
    scales = torch.full((CONTEXT, 8), 125, dtype=torch.uint8)
    page = torch.cat([data.flatten(), scales.flatten()])
    return page.view(1, CONTEXT, 1, 584).view(torch.float8_e4m3fn).to(device)


class Recorder:
    """Keeps results; a part that this machine cannot run is noted with its reason."""

    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.absent: dict[str, str] = {}

    def keep(self, name: str, value: torch.Tensor) -> None:
        self.values[name] = value.detach().float().cpu()

    def attempt(self, name: str, run: Any) -> Any:
        try:
            return run()
        except (
            ImportError,
            AttributeError,
            NotImplementedError,
            RuntimeError,
            AssertionError,
            ValueError,
        ) as error:
            self.absent[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
            return None


def _attention(keep: Recorder, prefix: str, attention: Any, x: torch.Tensor, cache: Any) -> None:
    from sglang.kernels.ops.attention.flash_mla_sm120_triton import flash_mla_sparse_decode_triton
    from sglang.srt.distributed import (
        tensor_model_parallel_all_gather,
        tensor_model_parallel_all_reduce,
    )
    from sglang.srt.models.deepseek_v4 import _apply_wo_a_bf16_matmul

    if attention.fuse_wqa_wkv:
        latent = attention.wqkv_a(x)[0][:, : attention.q_lora_rank]
    else:
        latent = attention.wq_a(x)[0]
    keep.keep(f"{prefix}.q_latent", latent)
    latent = (latent / latent.abs().amax().clamp(min=1)).contiguous()
    q = attention.wq_b(latent)[0]
    heads = attention.n_local_heads
    whole = tensor_model_parallel_all_gather(q, -1)
    keep.keep(f"{prefix}.wq_b", whole[:, : 64 * attention.head_dim])
    q = q.view(-1, 1, heads, attention.head_dim) / 16
    indices = torch.arange(CONTEXT, dtype=torch.int32, device=x.device).expand(TOKENS, 1, -1)
    out = flash_mla_sparse_decode_triton(
        q.contiguous(),
        cache,
        indices.contiguous(),
        torch.full((TOKENS,), CONTEXT, dtype=torch.int32, device=x.device),
        attention._local_attn_sink()[:heads].contiguous(),
        attention.head_dim,
        attention.softmax_scale,
    )[0]
    out = out.view(TOKENS, heads, attention.head_dim)
    assert torch.isfinite(out).all(), "padded heads must stay finite"
    whole = tensor_model_parallel_all_gather(out.flatten(1).contiguous(), -1)
    keep.keep(f"{prefix}.heads", whole[:, : 64 * attention.head_dim])
    grouped = out.view(TOKENS, attention.n_local_groups, -1)
    wo_a = attention.wo_a.weight.view(attention.n_local_groups, attention.o_lora_rank, -1)
    projected = _apply_wo_a_bf16_matmul(grouped, wo_a, is_decode=True, fast_path=True)
    whole = tensor_model_parallel_all_gather(projected.flatten(1).contiguous(), -1)
    keep.keep(f"{prefix}.wo_a", whole[:, : 8 * attention.o_lora_rank])
    assert not whole[:, 8 * attention.o_lora_rank :].any(), "padded groups must be zero"
    # In the engine the next stage completes the sum over ranks; here it is done at once.
    part = attention.wo_b(projected.flatten(1).contiguous(), skip_all_reduce=True)[0]
    keep.keep(f"{prefix}.wo_b", tensor_model_parallel_all_reduce(part))


def _experts(keep: Recorder, prefix: str, mlp: Any, x: torch.Tensor) -> None:
    from sglang.srt.distributed import tensor_model_parallel_all_reduce

    shared = mlp.shared_experts(x)
    keep.keep(f"{prefix}.shared", tensor_model_parallel_all_reduce(shared))
    logits = keep.attempt(f"{prefix}.router", lambda: mlp.gate(x))
    if logits is None:
        return
    keep.keep(f"{prefix}.router", logits)
    chosen = keep.attempt(f"{prefix}.top_k", lambda: mlp.topk(x, logits))
    if chosen is None:
        return
    keep.keep(f"{prefix}.top_k", chosen.topk_ids.sort(1).values)
    routed = keep.attempt(f"{prefix}.experts", lambda: mlp.experts(x, chosen))
    if routed is not None:
        keep.keep(f"{prefix}.experts", tensor_model_parallel_all_reduce(routed))


def _heads(keep: Recorder, target: Any, draft: Any, x: torch.Tensor) -> None:
    from sglang.kernels.ops.speculative.dspark.markov_sample import MarkovSampleStep
    from sglang.srt.models.dspark import gather_and_crop_vocab, project_through_lm_head

    local = project_through_lm_head(x, target.lm_head)
    keep.keep("logits", gather_and_crop_vocab(local, target.lm_head))
    draft.attach_shared_modules(embed_tokens=target.model.embed_tokens, lm_head=target.lm_head)
    head = draft.markov_head
    previous = torch.arange(TOKENS, device=x.device)
    bias, _ = head.step_bias(previous, hidden_states=None, state=None)
    shard = head.vocab_shard
    tokens = MarkovSampleStep.execute(
        base_logits=local.float().contiguous(),
        bias=bias.contiguous(),
        temperatures=torch.zeros(TOKENS, device=x.device),
        key=0,
        offset=torch.zeros(1, dtype=torch.int64, device=x.device),
        step=0,
        step_dtype=torch.float32,
        has_sampled_rows=False,
        **(
            {}
            if shard is None
            else {"vocab_start": shard.start, "gather": shard.gather.gather_stacked}
        ),
    )
    assert int(tokens.max()) < WIDE.sizes.vocabulary, "a padded token was drafted"
    keep.keep("draft_tokens", tokens)


@torch.no_grad()
def run(spec: dict[str, Any], rank: int) -> Recorder:
    device = torch.device("cuda", spec["devices"][rank])
    torch.cuda.set_device(device)
    weights = load_file(spec["weights"])
    keep = Recorder()
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        load_plugin(patch, active=spec["tp"] > 1)
        # Routed experts as FP8: the FP4 kernels need flashinfer and its device code.
        patch.setenv("SGLANG_DSV4_FP4_DEQUANT", "1")
        engine = stack.enter_context(
            engine_rank(
                Path(spec["folder"]),
                WIDE,
                tp=spec["tp"],
                rank=rank,
                device="cuda",
                start_groups=lambda: _groups(spec, rank),
            )
        )
        from sglang.srt.model_loader.loader import _modules_with_quant_method

        models = []
        for is_draft in (False, True):
            model = engine.build(draft=is_draft, device="cuda")
            model.load_weights(iter(weights.items()))
            for module, method in _modules_with_quant_method(model):
                keep.attempt(
                    f"process {type(module).__name__} with {type(method).__name__}",
                    lambda m=module, q=method: q.process_weights_after_loading(m),
                )
            models.append(model)
        target, draft = models
        generator = torch.Generator().manual_seed(7)
        ids = torch.randint(0, WIDE.sizes.vocabulary, (TOKENS,), generator=generator)
        x = torch.randint(-8, 9, (TOKENS, WIDE.sizes.hidden), generator=generator) / 8
        x = x.to(device, torch.bfloat16)
        cache = _cache(generator, device)
        keep.keep("embedding", target.model.embed_tokens(ids.to(device)))
        for prefix, block in (("layer", target.model.layers[0]), ("stage", draft.stages[0])):
            keep.attempt(
                f"{prefix}.attention",
                lambda p=prefix, b=block: _attention(keep, p, b.self_attn, x, cache),
            )
            keep.attempt(f"{prefix}.mlp", lambda p=prefix, b=block: _experts(keep, p, b.mlp, x))
        keep.attempt("heads", lambda: _heads(keep, target, draft, x))
    return keep


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    rank = int(sys.argv[2])
    require_engine()
    result = run(spec, rank)
    torch.save({"values": result.values, "absent": result.absent}, f"{spec['out']}.{rank}")
    # Communicators of a half-used engine may hang in their destructors.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
