"""Reads a rank's share out of the engine's own, loaded modules."""

from __future__ import annotations

from typing import Any

import torch
from reference import BlockShare, Share, dequantise_fp4, dequantise_fp8


def _linear(layer: Any) -> torch.Tensor:
    return dequantise_fp8(layer.weight.data, layer.weight_scale_inv.data)


def _experts(layer: Any) -> dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    first = layer.moe_ep_rank * layer.num_local_experts
    result = {}
    for local in range(layer.num_local_experts):
        w13 = dequantise_fp4(layer.w13_weight[local], layer.w13_weight_scale_inv[local])
        w2 = dequantise_fp4(layer.w2_weight[local], layer.w2_weight_scale_inv[local])
        w1, w3 = w13.chunk(2)
        result[first + local] = (w1, w3, w2)
    return result


def _block(layer: Any) -> BlockShare:
    attention, mlp = layer.self_attn, layer.mlp
    if attention.fuse_wqa_wkv:
        wq_a, wkv = _linear(attention.wqkv_a).split([attention.q_lora_rank, attention.head_dim])
    else:
        wq_a, wkv = _linear(attention.wq_a), _linear(attention.wkv)
    w1, w3 = _linear(mlp.shared_experts.gate_up_proj).chunk(2)
    return BlockShare(
        wq_a=wq_a,
        wkv=wkv,
        wq_b=_linear(attention.wq_b),
        # The engine pads this to the kernel's head count; the first ones are the rank's.
        sinks=attention._local_attn_sink()[: attention.n_local_heads].detach(),
        wo_a=attention.wo_a.weight.data.float().view(
            attention.n_local_groups, attention.o_lora_rank, -1
        ),
        wo_b=_linear(attention.wo_b),
        gate=mlp.gate.weight.data.float(),
        bias=mlp.gate.e_score_correction_bias.data.float(),
        experts=_experts(mlp.experts),
        shared=(w1, w3, _linear(mlp.shared_experts.down_proj)),
    )


def read(target: Any, draft: Any) -> Share:
    """The share of the rank that `target` and `draft` were built for."""
    indices = target.lm_head.shard_indices
    real = indices.org_vocab_end_index - indices.org_vocab_start_index
    head = draft.markov_head
    return Share(
        first=indices.org_vocab_start_index,
        real=real,
        embed=target.model.embed_tokens.weight.data.float(),
        head=target.lm_head.weight.data.float(),
        layers=[_block(layer) for layer in target.model.layers],
        stages=[_block(stage) for stage in draft.stages],
        main_proj=_linear(draft.stages[0].main_proj),
        markov_w1=head.markov_w1.weight.data[: head.vocab_size].float(),
        markov_w2=head.markov_w2.weight.data.float(),
    )
