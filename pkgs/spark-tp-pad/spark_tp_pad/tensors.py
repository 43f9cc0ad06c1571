"""A rule for every tensor of the checkpoint: which axis grows, how far, and with what.

Names are those of the checkpoint files. A name without a rule is an error, never a guess: the
indexer has a `wq_b` too, and padding it by a loose pattern would break it. Pure Python, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from spark_tp_pad.rules import FP4_SCALE_BLOCK, ModelSizes, Padding, PaddingRefusedError


class Fill(Enum):
    """What the added part holds."""

    #: Zero weights: whatever they meet is multiplied by zero. Zero attention sinks: finite.
    ZERO = "zero"
    #: Block scales of zero weights. Scale bytes have no zero, and garbage decodes to NaN.
    ONE = "one"
    #: Router bias of an expert that does not exist: below every real score, and finite.
    NEVER = "never"


#: Value of `Fill.NEVER`. Router scores are square roots of softplus (>= 0) plus a bias near zero,
#: so the padded expert is last whatever the token. Finite in BF16, so a kernel that subtracts or
#: compares scores meets no infinity.
NEVER_CHOSEN: Final = -1.0e30


@dataclass(frozen=True)
class Sizes:
    """The sizes a tensor's axes are made of, before or after padding."""

    heads: int
    groups: int
    width: int
    shared_width: int
    experts: int
    draft_experts: int


@dataclass(frozen=True)
class TensorRule:
    """How one family of tensors is padded.

    Attributes:
        dimension: Name in `rules.DIMENSIONS`, or "" when every rank holds the tensor in full.
        axis: Axis that grows, or None.
        extent: Length of that axis for given sizes.
        fill: What the added part holds.

    """

    dimension: str = ""
    axis: int | None = None
    extent: Callable[[ModelSizes, Sizes], int] | None = None
    fill: Fill = Fill.ZERO


@dataclass(frozen=True)
class Growth:
    """One axis of one tensor: `before` -> `after`, the new part filled with `fill`."""

    axis: int
    before: int
    after: int
    fill: Fill


WHOLE: Final = TensorRule()

_HEADS: Final = "attention heads"
_GROUPS: Final = "output groups"
_ROUTED_WIDTH: Final = "routed expert width"
_SHARED_WIDTH: Final = "shared expert width"

_ATTENTION: Final = {
    "attn.wq_a.weight": WHOLE,
    "attn.wq_a.scale": WHOLE,
    "attn.q_norm.weight": WHOLE,
    "attn.wkv.weight": WHOLE,
    "attn.wkv.scale": WHOLE,
    "attn.kv_norm.weight": WHOLE,
    "attn.wq_b.weight": TensorRule(_HEADS, 0, lambda m, s: s.heads * m.head_dim),
    "attn.wq_b.scale": TensorRule(
        _HEADS, 0, lambda m, s: s.heads * m.head_dim // m.block, Fill.ONE
    ),
    "attn.attn_sink": TensorRule(_HEADS, 0, lambda _, s: s.heads),
    "attn.wo_a.weight": TensorRule(_GROUPS, 0, lambda m, s: s.groups * m.o_lora_rank),
    "attn.wo_a.scale": TensorRule(
        _GROUPS, 0, lambda m, s: s.groups * m.o_lora_rank // m.block, Fill.ONE
    ),
    "attn.wo_b.weight": TensorRule(_GROUPS, 1, lambda m, s: s.groups * m.o_lora_rank),
    "attn.wo_b.scale": TensorRule(
        _GROUPS, 1, lambda m, s: s.groups * m.o_lora_rank // m.block, Fill.ONE
    ),
}

_COMPRESSION: Final = {
    "attn.compressor.wkv.weight": WHOLE,
    "attn.compressor.wgate.weight": WHOLE,
    "attn.compressor.norm.weight": WHOLE,
    "attn.indexer.wk.weight": WHOLE,
    "attn.indexer.k_norm.weight": WHOLE,
    "attn.indexer.wq_b.weight": WHOLE,
    "attn.indexer.wq_b.scale": WHOLE,
    "attn.indexer.weights_proj.weight": WHOLE,
}

_EXPERT_ROWS: Final = TensorRule(_ROUTED_WIDTH, 0, lambda _, s: s.width)
_EXPERT_ROW_SCALES: Final = TensorRule(_ROUTED_WIDTH, 0, lambda _, s: s.width, Fill.ONE)

#: FP4 experts: two elements in one byte, one E8M0 scale for 32 elements of the input axis.
_ROUTED: Final = {
    "ffn.experts.*.w1.weight": _EXPERT_ROWS,
    "ffn.experts.*.w1.scale": _EXPERT_ROW_SCALES,
    "ffn.experts.*.w3.weight": _EXPERT_ROWS,
    "ffn.experts.*.w3.scale": _EXPERT_ROW_SCALES,
    "ffn.experts.*.w2.weight": TensorRule(_ROUTED_WIDTH, 1, lambda _, s: s.width // 2),
    "ffn.experts.*.w2.scale": TensorRule(
        _ROUTED_WIDTH, 1, lambda _, s: s.width // FP4_SCALE_BLOCK, Fill.ONE
    ),
}

_SHARED_ROWS: Final = TensorRule(_SHARED_WIDTH, 0, lambda _, s: s.shared_width)
_SHARED_ROW_SCALES: Final = TensorRule(
    _SHARED_WIDTH, 0, lambda m, s: s.shared_width // m.block, Fill.ONE
)
_SHARED: Final = {
    "ffn.shared_experts.w1.weight": _SHARED_ROWS,
    "ffn.shared_experts.w1.scale": _SHARED_ROW_SCALES,
    "ffn.shared_experts.w3.weight": _SHARED_ROWS,
    "ffn.shared_experts.w3.scale": _SHARED_ROW_SCALES,
    "ffn.shared_experts.w2.weight": TensorRule(_SHARED_WIDTH, 1, lambda _, s: s.shared_width),
    "ffn.shared_experts.w2.scale": TensorRule(
        _SHARED_WIDTH, 1, lambda m, s: s.shared_width // m.block, Fill.ONE
    ),
}

_NORMS_AND_MIXING: Final = dict.fromkeys(
    (
        "attn_norm.weight",
        "ffn_norm.weight",
        "hc_attn_fn",
        "hc_attn_base",
        "hc_attn_scale",
        "hc_ffn_fn",
        "hc_ffn_base",
        "hc_ffn_scale",
    ),
    WHOLE,
)


def _router(dimension: str, count: Callable[[ModelSizes, Sizes], int]) -> dict[str, TensorRule]:
    bias = TensorRule(dimension, 0, count, Fill.NEVER)
    return {
        "ffn.gate.weight": TensorRule(dimension, 0, count),
        "ffn.gate.bias": bias,
        # The second bias routes image tokens.
        "ffn.gate.bias_vl": bias,
    }


_COMMON: Final = {**_ATTENTION, **_ROUTED, **_SHARED, **_NORMS_AND_MIXING}

#: `layers.<n>.<tail>`; the expert's number stands as `*`.
LAYER_RULES: Final = {
    **_COMMON,
    **_COMPRESSION,
    **_router("routed experts", lambda _, s: s.experts),
    "engram.embed.weight": WHOLE,
    "engram.embed.scale": WHOLE,
    "engram.wkv.weight": WHOLE,
    "engram.wkv.scale": WHOLE,
    "engram.k_weight": WHOLE,
    "engram.q_weight": WHOLE,
}

#: `mtp.<n>.<tail>`, the DSpark stages.
STAGE_RULES: Final = {
    **_COMMON,
    **_router("DSpark draft experts", lambda _, s: s.draft_experts),
    "main_proj.weight": WHOLE,
    "main_proj.scale": WHOLE,
    "main_norm.weight": WHOLE,
    "norm.weight": WHOLE,
    "markov_head.embed.weight": WHOLE,
    "markov_head.head.weight": WHOLE,
    "confidence_head.proj.weight": WHOLE,
}

#: Embedding and head are handed on as they are: SGLang's vocabulary-parallel layers pad
#: themselves, zero the added rows and cut their logits off before sampling.
TOP_RULES: Final = {
    "embed.weight": WHOLE,
    "head.weight": WHOLE,
    "norm.weight": WHOLE,
    "image_start": WHOLE,
    "image_end": WHOLE,
    "image_newline": WHOLE,
    "aligner.w1.weight": WHOLE,
    "aligner.w1.bias": WHOLE,
    "aligner.w2.weight": WHOLE,
    "aligner.w2.bias": WHOLE,
    "vision.patch_embed.proj.weight": WHOLE,
    "vision.patch_embed.proj.bias": WHOLE,
    "vision.norm.weight": WHOLE,
}

VISION_BLOCK_RULES: Final = dict.fromkeys(
    (
        "norm1.weight",
        "norm2.weight",
        "attn.wqkv.weight",
        "attn.wqkv.bias",
        "attn.wo.weight",
        "attn.wo.bias",
        "mlp.w1.weight",
        "mlp.w2.weight",
    ),
    WHOLE,
)

_NUMBERED: Final = re.compile(r"(layers|mtp|vision\.blocks)\.(\d+)\.(.+)")
_EXPERT: Final = re.compile(r"(ffn\.experts)\.(\d+)\.(.+)")
_TABLES: Final = {
    "layers": LAYER_RULES,
    "mtp": STAGE_RULES,
    "vision.blocks": VISION_BLOCK_RULES,
}


@dataclass(frozen=True)
class TensorName:
    """A checkpoint name taken apart.

    Attributes:
        part: "layers", "mtp", "vision.blocks" or "" for a top-level tensor.
        index: Layer, stage or block; -1 at the top level.
        expert: Routed expert, or -1.
        tail: Rest of the name, the expert's number as `*`.
        rule: The rule of the tensor.

    """

    part: str
    index: int
    expert: int
    tail: str
    rule: TensorRule

    def of_expert(self, expert: int) -> str:
        """Name the same tensor of another routed expert."""
        return f"{self.part}.{self.index}.{self.tail.replace('*', str(expert))}"


def parse(name: str) -> TensorName:
    """Take a checkpoint name apart and find its rule.

    Raises:
        PaddingRefusedError: no rule knows the name.

    """
    part, index, expert, tail = "", -1, -1, name
    table = TOP_RULES
    if numbered := _NUMBERED.fullmatch(name):
        part, index, tail = numbered[1], int(numbered[2]), numbered[3]
        table = _TABLES[part]
        if routed := _EXPERT.fullmatch(tail):
            expert, tail = int(routed[2]), f"{routed[1]}.*.{routed[3]}"
    rule = table.get(tail)
    if rule is None:
        raise PaddingRefusedError(
            f"tp-pad: no rule for checkpoint tensor '{name}'; a tensor of unknown meaning is "
            "not loaded into a padded model. Check that the checkpoint is DeepSeek-V4.1-Flash"
        )
    return TensorName(part, index, expert, tail, rule)


def _sizes(padding: Padding, *, padded: bool) -> Sizes:
    source = padding if padded else padding.model
    return Sizes(
        source.heads,
        source.groups,
        source.expert_width,
        source.expert_width * padding.model.shared_experts,
        source.experts,
        source.draft_experts,
    )


def growth(rule: TensorRule, padding: Padding) -> Growth | None:
    """How far a tensor of this rule grows on this deployment; None when it stays as it is."""
    if rule.axis is None or rule.extent is None:
        return None
    before = rule.extent(padding.model, _sizes(padding, padded=False))
    after = rule.extent(padding.model, _sizes(padding, padded=True))
    return None if before == after else Growth(rule.axis, before, after, rule.fill)


def added_experts(name: TensorName, padding: Padding) -> range:
    """Numbers of the experts that padding adds beside this tensor's (its shape is copied).

    Only expert 0 answers with more than nothing, so that each added expert appears once.
    """
    if name.expert != 0:
        return range(0)
    if name.part == "mtp":
        return range(padding.model.draft_experts, padding.draft_experts)
    return range(padding.model.experts, padding.experts)
