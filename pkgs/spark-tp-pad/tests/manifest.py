"""The full name, dtype and shape list of DeepSeek-V4.1-Flash, or of a small model built like it.

Sources: 96,085 tensors, 2,401 of them `mtp.*`, shapes of experts and Engram (gb10-field-notes,
section 3.1); sizes of config.json; names as SGLang 0.5.23 maps them (`deepseek_v4.py`,
`remap_weight_name_to_dpsk_hf_format`; `deepseek_v41_vit.py`; `deepseek_v4_dspark.py`,
`_remap_dspark_weight_name`). The generated list has exactly the published counts and the published
byte total, which pins every name and shape that is not in the notes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from spark_tp_pad.rules import ModelSizes

BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4}


class Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size = BYTES[self.dtype]
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True)
class Checkpoint:
    """Sizes that tensor parallelism does not touch, beside those that it does."""

    sizes: ModelSizes = field(default_factory=ModelSizes)
    hc_mult: int = 4
    kv_sources: tuple[int, ...] = (2, 8, 14, 20)
    index_sources: tuple[int, ...] = (2, 8, 14, 20, 24, 28, 32, 36)
    compress_ratios: tuple[int, ...] = (0, 0, *[2] * 18, *[1] * 20, 0, 0, 0)
    index_heads: int = 32
    index_dim: int = 128
    engram_rows: tuple[tuple[int, int], ...] = ((1, 384006168), (14, 384016682))
    engram_dim: int = 256
    engram_columns: int = 24
    markov_rank: int = 256
    vision_blocks: int = 32
    vision_dim: int = 1024
    vision_inner: int = 2816
    vision_patch: int = 14
    vision_downsample: int = 3


def _fp8(name: str, rows: int, columns: int, block: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", "F8_E4M3", (rows, columns))
    yield Tensor(f"{name}.scale", "F8_E8M0", (-(-rows // block), -(-columns // block)))


def _fp4(name: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", "I8", (rows, columns // 2))
    yield Tensor(f"{name}.scale", "F8_E8M0", (rows, columns // 32))


def _block(ckpt: Checkpoint, prefix: str, experts: int) -> Iterator[Tensor]:
    m = ckpt.sizes
    group_input = m.heads_per_group * m.head_dim
    yield from _fp8(f"{prefix}.attn.wq_a", m.q_lora_rank, m.hidden, m.block)
    yield Tensor(f"{prefix}.attn.q_norm.weight", "BF16", (m.q_lora_rank,))
    yield from _fp8(f"{prefix}.attn.wq_b", m.heads * m.head_dim, m.q_lora_rank, m.block)
    yield from _fp8(f"{prefix}.attn.wkv", m.head_dim, m.hidden, m.block)
    yield Tensor(f"{prefix}.attn.kv_norm.weight", "BF16", (m.head_dim,))
    yield from _fp8(f"{prefix}.attn.wo_a", m.groups * m.o_lora_rank, group_input, m.block)
    yield from _fp8(f"{prefix}.attn.wo_b", m.hidden, m.groups * m.o_lora_rank, m.block)
    yield Tensor(f"{prefix}.attn.attn_sink", "F32", (m.heads,))
    yield Tensor(f"{prefix}.attn_norm.weight", "BF16", (m.hidden,))
    yield Tensor(f"{prefix}.ffn_norm.weight", "BF16", (m.hidden,))
    mix = (2 + ckpt.hc_mult) * ckpt.hc_mult
    for part in ("attn", "ffn"):
        yield Tensor(f"{prefix}.hc_{part}_fn", "F32", (mix, ckpt.hc_mult * m.hidden))
        yield Tensor(f"{prefix}.hc_{part}_base", "F32", (mix,))
        yield Tensor(f"{prefix}.hc_{part}_scale", "F32", (3,))
    yield Tensor(f"{prefix}.ffn.gate.weight", "BF16", (experts, m.hidden))
    yield Tensor(f"{prefix}.ffn.gate.bias", "F32", (experts,))
    yield Tensor(f"{prefix}.ffn.gate.bias_vl", "F32", (experts,))
    for expert in range(experts):
        name = f"{prefix}.ffn.experts.{expert}"
        yield from _fp4(f"{name}.w1", m.expert_width, m.hidden)
        yield from _fp4(f"{name}.w2", m.hidden, m.expert_width)
        yield from _fp4(f"{name}.w3", m.expert_width, m.hidden)
    for projection, rows, columns in (
        ("w1", m.expert_width, m.hidden),
        ("w2", m.hidden, m.expert_width),
        ("w3", m.expert_width, m.hidden),
    ):
        yield from _fp8(f"{prefix}.ffn.shared_experts.{projection}", rows, columns, m.block)


def _layer_extras(ckpt: Checkpoint, layer: int) -> Iterator[Tensor]:
    m = ckpt.sizes
    prefix = f"layers.{layer}"
    if layer in ckpt.kv_sources:
        yield Tensor(f"{prefix}.attn.compressor.wkv.weight", "BF16", (m.head_dim, m.hidden))
        if ckpt.compress_ratios[layer] > 1:
            yield Tensor(f"{prefix}.attn.compressor.wgate.weight", "BF16", (m.head_dim, m.hidden))
        yield Tensor(f"{prefix}.attn.compressor.norm.weight", "BF16", (m.head_dim,))
        yield Tensor(f"{prefix}.attn.indexer.wk.weight", "BF16", (ckpt.index_dim, m.head_dim))
        yield Tensor(f"{prefix}.attn.indexer.k_norm.weight", "BF16", (ckpt.index_dim,))
    if layer in ckpt.index_sources:
        rows = ckpt.index_heads * ckpt.index_dim
        yield from _fp8(f"{prefix}.attn.indexer.wq_b", rows, m.q_lora_rank, m.block)
        yield Tensor(
            f"{prefix}.attn.indexer.weights_proj.weight", "BF16", (ckpt.index_heads, m.hidden)
        )
    for engram_layer, rows in ckpt.engram_rows:
        if engram_layer == layer:
            name = f"{prefix}.engram"
            yield Tensor(f"{name}.embed.weight", "F8_E4M3", (rows, ckpt.engram_dim))
            yield Tensor(f"{name}.embed.scale", "F8_E8M0", (rows, ckpt.engram_dim // 32))
            # One key for each hyper-connection stream, and one value.
            yield from _fp8(
                f"{name}.wkv",
                (ckpt.hc_mult + 1) * m.hidden,
                ckpt.engram_columns * ckpt.engram_dim,
                m.block,
            )
            yield Tensor(f"{name}.k_weight", "BF16", (ckpt.hc_mult, m.hidden))
            yield Tensor(f"{name}.q_weight", "BF16", (ckpt.hc_mult, m.hidden))


def _draft_extras(ckpt: Checkpoint, stage: int) -> Iterator[Tensor]:
    m = ckpt.sizes
    last = m.draft_stages - 1
    if stage == 0:
        yield from _fp8("mtp.0.main_proj", m.hidden, m.draft_stages * m.hidden, m.block)
        yield Tensor("mtp.0.main_norm.weight", "BF16", (m.hidden,))
    if stage == last:
        yield Tensor(f"mtp.{last}.norm.weight", "BF16", (m.hidden,))
        head = f"mtp.{last}.markov_head"
        yield Tensor(f"{head}.embed.weight", "BF16", (m.vocabulary, ckpt.markov_rank))
        yield Tensor(f"{head}.head.weight", "BF16", (m.vocabulary, ckpt.markov_rank))
        yield Tensor(
            f"mtp.{last}.confidence_head.proj.weight", "BF16", (1, m.hidden + ckpt.markov_rank)
        )


def _vision(ckpt: Checkpoint) -> Iterator[Tensor]:
    hidden, dim, inner = ckpt.sizes.hidden, ckpt.vision_dim, ckpt.vision_inner
    if not ckpt.vision_blocks:
        return
    for name in ("image_start", "image_end", "image_newline"):
        yield Tensor(name, "BF16", (hidden,))
    yield Tensor("aligner.w1.weight", "BF16", (hidden, dim * ckpt.vision_downsample**2))
    yield Tensor("aligner.w1.bias", "BF16", (hidden,))
    yield Tensor("aligner.w2.weight", "BF16", (hidden, hidden))
    yield Tensor("aligner.w2.bias", "BF16", (hidden,))
    yield Tensor("vision.patch_embed.proj.weight", "BF16", (dim, 3 * ckpt.vision_patch**2))
    yield Tensor("vision.patch_embed.proj.bias", "BF16", (dim,))
    yield Tensor("vision.norm.weight", "BF16", (dim,))
    for block in range(ckpt.vision_blocks):
        name = f"vision.blocks.{block}"
        yield Tensor(f"{name}.norm1.weight", "BF16", (dim,))
        yield Tensor(f"{name}.norm2.weight", "BF16", (dim,))
        yield Tensor(f"{name}.attn.wqkv.weight", "BF16", (3 * dim, dim))
        yield Tensor(f"{name}.attn.wqkv.bias", "BF16", (3 * dim,))
        yield Tensor(f"{name}.attn.wo.weight", "BF16", (dim, dim))
        yield Tensor(f"{name}.attn.wo.bias", "BF16", (dim,))
        yield Tensor(f"{name}.mlp.w1.weight", "BF16", (2 * inner, dim))
        yield Tensor(f"{name}.mlp.w2.weight", "BF16", (dim, inner))


def tensors(ckpt: Checkpoint) -> Iterator[Tensor]:
    """Every tensor of the checkpoint."""
    m = ckpt.sizes
    yield from _vision(ckpt)
    yield Tensor("embed.weight", "BF16", (m.vocabulary, m.hidden))
    for layer in range(m.layers):
        yield from _block(ckpt, f"layers.{layer}", m.experts)
        yield from _layer_extras(ckpt, layer)
    yield Tensor("norm.weight", "BF16", (m.hidden,))
    yield Tensor("head.weight", "BF16", (m.vocabulary, m.hidden))
    for stage in range(m.draft_stages):
        yield from _block(ckpt, f"mtp.{stage}", m.draft_experts)
        yield from _draft_extras(ckpt, stage)
