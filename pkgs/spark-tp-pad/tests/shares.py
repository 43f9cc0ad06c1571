"""Values for a small checkpoint, and the shares that ranks get from it.

`split` cuts padded tensors the way SGLang's linear, embedding and expert layers do (contiguous,
equal shares); `test_engine.py` checks the same results with the engine's own layers instead.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from manifest import Checkpoint, Tensor, tensors
from reference import BlockShare, Share, dequantise_fp4, dequantise_fp8
from spark_tp_pad.rules import ModelSizes, Padding

#: Sizes with the structure of the model: 8 groups of 8 heads, blocks of 32, an index-and-cache
#: source layer (whose indexer has a `wq_b` that must not be padded), a draft of two stages.
SMALL = Checkpoint(
    sizes=ModelSizes(
        heads=64,
        groups=8,
        head_dim=32,
        q_lora_rank=64,
        o_lora_rank=32,
        hidden=128,
        vocabulary=1000,
        experts=8,
        draft_experts=7,
        expert_width=384,
        layers=2,
        draft_stages=2,
    ),
    kv_sources=(1,),
    index_sources=(1,),
    compress_ratios=(0, 1, 0, 0),
    index_heads=4,
    index_dim=32,
    engram_rows=(),
    markov_rank=32,
    vision_blocks=0,
)


def _codes(generator: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    # FP4 codes of magnitude 0 to 3: sums stay exact.
    def draw(high: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator, dtype=torch.uint8)

    low, high = (draw(6) + 8 * draw(2) for _ in range(2))
    return (low + 16 * high).view(torch.int8)


def values(tensor: Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random values of the stored dtype whose sums are exact in float32."""

    def integers(low: int, high: int, shape: tuple[int, ...] = tensor.shape) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int16)

    if tensor.dtype == "F8_E4M3":
        return integers(-3, 3).float().to(torch.float8_e4m3fn)
    if tensor.dtype == "F8_E8M0":
        return integers(126, 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    if tensor.dtype == "I8":
        return _codes(generator, tensor.shape)
    if tensor.name.endswith(("gate.bias", "gate.bias_vl")):
        # All different, so that no choice of experts is a tie.
        order = torch.randperm(tensor.shape[0], generator=generator)
        return order.float() / 64
    if tensor.dtype == "F32":
        return integers(-16, 16).float() / 8
    return (integers(-8, 8).float() / 4).to(torch.bfloat16)


def checkpoint(ckpt: Checkpoint, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, with values."""
    generator = torch.Generator().manual_seed(seed)
    return {tensor.name: values(tensor, generator) for tensor in tensors(ckpt)}


def _cut(tensor: torch.Tensor, axis: int, ranks: int, rank: int) -> torch.Tensor:
    size = tensor.shape[axis]
    assert size % ranks == 0, f"{tuple(tensor.shape)} axis {axis} does not divide by {ranks}"
    return tensor.narrow(axis, rank * (size // ranks), size // ranks)


def _block(
    weights: dict[str, torch.Tensor], prefix: str, padding: Padding, experts: int, rank: int
) -> BlockShare:
    m, p = padding.model, padding.parallel
    tp, expert_tp = p.tp, p.expert_tp

    def fp8(name: str, axis: int | None = None) -> torch.Tensor:
        weight, scale = weights[f"{prefix}.{name}.weight"], weights[f"{prefix}.{name}.scale"]
        if axis is not None:
            weight, scale = _cut(weight, axis, tp, rank), _cut(scale, axis, tp, rank)
        return dequantise_fp8(weight, scale)

    def fp4(name: str, axis: int) -> torch.Tensor:
        part = rank % expert_tp
        weight, scale = weights[f"{prefix}.{name}.weight"], weights[f"{prefix}.{name}.scale"]
        return dequantise_fp4(
            _cut(weight, axis, expert_tp, part), _cut(scale, axis, expert_tp, part)
        )

    local = experts // p.ep
    first = (rank // expert_tp) * local
    return BlockShare(
        wq_a=fp8("attn.wq_a"),
        wkv=fp8("attn.wkv"),
        wq_b=fp8("attn.wq_b", 0),
        sinks=_cut(weights[f"{prefix}.attn.attn_sink"], 0, tp, rank),
        wo_a=fp8("attn.wo_a", 0).view(padding.groups // tp, m.o_lora_rank, -1),
        wo_b=fp8("attn.wo_b", 1),
        gate=weights[f"{prefix}.ffn.gate.weight"].float(),
        bias=weights[f"{prefix}.ffn.gate.bias"],
        experts={
            expert: (
                fp4(f"ffn.experts.{expert}.w1", 0),
                fp4(f"ffn.experts.{expert}.w3", 0),
                fp4(f"ffn.experts.{expert}.w2", 1),
            )
            for expert in range(first, first + local)
        },
        shared=(
            fp8("ffn.shared_experts.w1", 0),
            fp8("ffn.shared_experts.w3", 0),
            fp8("ffn.shared_experts.w2", 1),
        ),
    )


def split(stream: Iterable[tuple[str, torch.Tensor]], padding: Padding) -> list[Share]:
    """The shares of all ranks, cut from padded tensors."""
    weights = dict(stream)
    m, tp = padding.model, padding.parallel.tp
    rows = padding.vocabulary // tp
    last = m.draft_stages - 1
    shares = []
    for rank in range(tp):
        real = max(0, min(rows, m.vocabulary - rank * rows))

        def vocabulary(name: str, rank: int = rank, real: int = real) -> torch.Tensor:
            # SGLang's own padding: zero rows behind the last token.
            part = torch.zeros(rows, m.hidden)
            part[:real] = weights[name][rank * rows : rank * rows + real].float()
            return part

        shares.append(
            Share(
                first=rank * rows,
                real=real,
                embed=vocabulary("embed.weight"),
                head=vocabulary("head.weight"),
                layers=[
                    _block(weights, f"layers.{layer}", padding, padding.experts, rank)
                    for layer in range(m.layers)
                ],
                stages=[
                    _block(weights, f"mtp.{stage}", padding, padding.draft_experts, rank)
                    for stage in range(m.draft_stages)
                ],
                main_proj=dequantise_fp8(
                    weights["mtp.0.main_proj.weight"], weights["mtp.0.main_proj.scale"]
                ),
                markov_w1=weights[f"mtp.{last}.markov_head.embed.weight"].float(),
                markov_w2=weights[f"mtp.{last}.markov_head.head.weight"].float(),
            )
        )
    return shares
