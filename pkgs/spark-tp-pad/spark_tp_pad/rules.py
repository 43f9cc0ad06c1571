"""Which sizes of DeepSeek-V4.1-Flash tensor parallelism splits, and how far each one is padded.

Pure Python, no torch: the memory model of the command line and the plugin inside the engine read
the same numbers from here. A size is padded only when the ranks' shares would not be whole units
of what the engine or its kernels take; otherwise `pad` changes nothing and says so.

The source of every size is the checkpoint's `config.json`; the source of every unit is SGLang
0.5.23, named file by file below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import lcm
from typing import Any, Final, Literal

#: The plan sets this variable to "1" on every rank that has to pad.
ACTIVATION_VARIABLE: Final = "SPARK_TP_PAD"

#: Query heads of one rank that the SM120 sparse-MLA decode kernels are specialised for
#: (flashinfer 0.7.2 `mla/_sparse_mla_sm120/_policy.py`, `dedicated_heads`). SGLang takes these as
#: they are (`flash_mla_sm120.py`, `flashinfer_dsv4_decode_supports_num_heads`) and computes 64
#: heads for any other count.
KERNEL_HEAD_COUNTS: Final = (8, 16, 32, 64, 128)

#: Rows of one rank's routed experts come in this unit: `mxfp4_flashinfer_cutlass_moe.py`,
#: `create_weights`, refuses anything else on SM90 and SM120.
EXPERT_WIDTH_UNIT: Final = 128

#: `layers/vocab_parallel_embedding.py`, `DEFAULT_VOCAB_PADDING_SIZE`. SGLang pads the vocabulary
#: itself, to this many entries or to this many times the group size.
VOCABULARY_UNIT: Final = 64

#: Elements of the hidden size that share one FP4 scale (`fp8.py`, `fp4_block_k`).
FP4_SCALE_BLOCK: Final = 32

#: Bytes of one block scale of a dense FP8 weight as the engine holds it (`fp8.py`,
#: `create_fp8_weight_`: float32 unless the checkpoint says MXFP8).
DENSE_SCALE_BYTES: Final = 4

Group = Literal["attention", "tensor", "expert-tensor", "expert", "none"]
Padder = Literal["plugin", "engine", "nobody"]


class PaddingRefusedError(ValueError):
    """The size cannot be padded without changing the result; the text names size and remedy."""


@dataclass(frozen=True)
class Dimension:
    """One dimension of the model and how tensor parallelism treats it.

    Attributes:
        name: Short name used in messages.
        key: Key of the (flattened) `config.json`, or "" when derived.
        group: The ranks it is split over; "none" means that every rank holds all of it.
        tensors: Checkpoint tensors that carry it, axis in brackets.
        rule: How a size that does not divide is treated.
        padded_by: Who does it.

    """

    name: str
    key: str
    group: Group
    tensors: tuple[str, ...]
    rule: str
    padded_by: Padder


DIMENSIONS: Final = (
    Dimension(
        "attention heads",
        "num_attention_heads",
        "attention",
        ("attn.wq_b.weight[0]", "attn.wq_b.scale[0]", "attn.attn_sink[0]"),
        "grows with the output groups, so that a group keeps its heads",
        "plugin",
    ),
    Dimension(
        "output groups",
        "o_groups",
        "attention",
        ("attn.wo_a.weight[0]", "attn.wo_a.scale[0]", "attn.wo_b.weight[1]", "attn.wo_b.scale[1]"),
        "to a multiple of the group size whose heads per rank the kernels take",
        "plugin",
    ),
    Dimension(
        "vocabulary",
        "vocab_size",
        "tensor",
        ("embed.weight[0]", "head.weight[0]"),
        "to a multiple of 64, or of 64 times the group size",
        "engine",
    ),
    Dimension(
        "routed expert width",
        "moe_intermediate_size",
        "expert-tensor",
        (
            "ffn.experts.*.w1.*[0]",
            "ffn.experts.*.w3.*[0]",
            "ffn.experts.*.w2.*[1]",
        ),
        "to a multiple of 128 times the group size",
        "plugin",
    ),
    Dimension(
        "shared expert width",
        "moe_intermediate_size",
        "tensor",
        (
            "ffn.shared_experts.w1.*[0]",
            "ffn.shared_experts.w3.*[0]",
            "ffn.shared_experts.w2.*[1]",
        ),
        "follows the routed expert width (one configuration key), in whole scale blocks",
        "plugin",
    ),
    Dimension(
        "routed experts",
        "n_routed_experts",
        "expert",
        ("layers.*.ffn.experts.*", "layers.*.ffn.gate.weight[0]", "layers.*.ffn.gate.bias*[0]"),
        "to a multiple of the group size; the padded expert can never be chosen",
        "plugin",
    ),
    Dimension(
        "DSpark draft experts",
        "dspark_n_routed_experts",
        "expert",
        ("mtp.*.ffn.experts.*", "mtp.*.ffn.gate.weight[0]", "mtp.*.ffn.gate.bias*[0]"),
        "to a multiple of the group size; the padded expert can never be chosen",
        "plugin",
    ),
    Dimension(
        "Engram table rows",
        "engram_num_embeddings",
        "tensor",
        ("layers.*.engram.embed.weight[0]", "layers.*.engram.embed.scale[0]"),
        "uneven shares; every row has one owner and the sum over ranks puts them together",
        "nobody",
    ),
    Dimension(
        "hidden size",
        "hidden_size",
        "none",
        ("every projection from or to the residual stream",),
        "on every rank in full",
        "nobody",
    ),
    Dimension(
        "query latent",
        "q_lora_rank",
        "none",
        ("attn.wq_a.*", "attn.q_norm.weight", "attn.wq_b.*[1]"),
        "on every rank in full",
        "nobody",
    ),
    Dimension(
        "key-value latent",
        "head_dim",
        "none",
        ("attn.wkv.*", "attn.kv_norm.weight"),
        "on every rank in full (one key-value head)",
        "nobody",
    ),
    Dimension(
        "output latent of a group",
        "o_lora_rank",
        "none",
        ("attn.wo_a.*[0]", "attn.wo_b.*[1]"),
        "never cut: a rank holds whole groups",
        "nobody",
    ),
    Dimension(
        "compressor",
        "head_dim",
        "none",
        ("attn.compressor.*",),
        "on every rank in full",
        "nobody",
    ),
    Dimension(
        "index heads",
        "index_n_heads",
        "none",
        ("attn.indexer.*",),
        "on every rank in full: each rank scores with all heads, so top-k needs no exchange",
        "nobody",
    ),
    Dimension(
        "hyper-connections",
        "hc_mult",
        "none",
        ("hc_attn_*", "hc_ffn_*"),
        "on every rank in full",
        "nobody",
    ),
    Dimension(
        "Engram projection and gate",
        "engram_head_dim",
        "none",
        ("engram.wkv.*", "engram.k_weight", "engram.q_weight"),
        "on every rank in full",
        "nobody",
    ),
    Dimension(
        "DSpark target projection",
        "dspark_target_layer_ids",
        "none",
        ("mtp.0.main_proj.*", "mtp.0.main_norm.weight"),
        "on every rank in full",
        "nobody",
    ),
    Dimension(
        "DSpark Markov head",
        "dspark_markov_rank",
        "none",
        ("mtp.*.markov_head.embed.weight", "mtp.*.markov_head.head.weight"),
        "on every rank in full; each step reads the rows of the rank's real vocabulary entries",
        "nobody",
    ),
    Dimension(
        "DSpark confidence head",
        "hidden_size",
        "none",
        ("mtp.*.confidence_head.proj.weight",),
        "on every rank in full",
        "nobody",
    ),
    Dimension(
        "vision tower",
        "vision_n_heads",
        "none",
        ("vision.*", "aligner.*", "image_start", "image_end", "image_newline"),
        "on every rank in full (the engine's data-parallel vision attention)",
        "nobody",
    ),
)


def _config_value(config: Mapping[str, Any], key: str) -> Any:
    text = config.get("text_config")
    if isinstance(text, Mapping) and key in text:
        return text[key]
    return config.get(key)


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of the checkpoint. Defaults are DeepSeek-V4.1-Flash (`config.json`, `text_config`).

    Attributes:
        heads: Query heads.
        groups: Output groups; a group has `heads / groups` heads.
        head_dim: Elements of one head.
        q_lora_rank: Query latent.
        o_lora_rank: Output latent of one group.
        hidden: Residual stream.
        vocabulary: Token ids.
        experts: Routed experts of a layer.
        draft_experts: Routed experts of a DSpark stage; 0 when there is no draft.
        expert_width: Inner width of a routed expert.
        shared_experts: Shared experts of a layer, each as wide as a routed one.
        block: Edge of a square block that shares one scale in dense FP8 weights.
        layers: Layers of the target.
        draft_stages: DSpark stages.

    """

    heads: int = 64
    groups: int = 8
    head_dim: int = 512
    q_lora_rank: int = 1280
    o_lora_rank: int = 1024
    hidden: int = 5120
    vocabulary: int = 129280
    experts: int = 384
    draft_experts: int = 128
    expert_width: int = 2304
    shared_experts: int = 1
    block: int = 32
    layers: int = 40
    draft_stages: int = 3

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSizes:
        """Read the sizes of a `config.json`, nested (`text_config`) or flat.

        Raises:
            PaddingRefusedError: a needed key is missing, or the weights are not square-block FP8.

        """
        quantization = config.get("quantization_config") or {}
        block = quantization.get("weight_block_size")
        if quantization.get("quant_method") != "fp8" or not block or block[0] != block[1]:
            raise PaddingRefusedError(
                "tp-pad: the checkpoint's quantization_config must be fp8 with square "
                f"weight_block_size, found {quantization.get('quant_method')!r} with {block!r}; "
                "padding of other formats is not known to be exact"
            )

        def size(key: str, default: int | None = None) -> int:
            value = _config_value(config, key)
            if value is None:
                if default is None:
                    raise PaddingRefusedError(
                        f"tp-pad: config.json has no '{key}'; this is not a DeepSeek-V4.1 config"
                    )
                return default
            return int(value)

        return cls(
            heads=size("num_attention_heads"),
            groups=size("o_groups"),
            head_dim=size("head_dim"),
            q_lora_rank=size("q_lora_rank"),
            o_lora_rank=size("o_lora_rank"),
            hidden=size("hidden_size"),
            vocabulary=size("vocab_size"),
            experts=size("n_routed_experts"),
            draft_experts=size("dspark_n_routed_experts", 0),
            expert_width=size("moe_intermediate_size"),
            shared_experts=size("n_shared_experts", 0),
            block=int(block[0]),
            layers=size("num_hidden_layers"),
            draft_stages=len(_config_value(config, "dspark_target_layer_ids") or ()),
        )

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one output projection."""
        return self.heads // self.groups


@dataclass(frozen=True)
class ParallelSizes:
    """Ranks of the deployment.

    Attributes:
        tp: Tensor-parallel ranks (`--tp`).
        ep: Expert-parallel ranks (`--ep-size`), a divisor of `tp`.
        attention_tp: Ranks that split attention; `tp` unless attention is data parallel.

    """

    tp: int
    ep: int = 1
    attention_tp: int = 0

    def __post_init__(self) -> None:
        if self.tp < 1 or self.ep < 1 or self.tp % self.ep:
            raise PaddingRefusedError(
                f"tp-pad: --ep-size {self.ep} must be a positive divisor of --tp {self.tp}"
            )
        attention_tp = self.attention_tp or self.tp
        if attention_tp < 1 or self.tp % attention_tp:
            raise PaddingRefusedError(
                f"tp-pad: attention is split over {attention_tp} ranks, which does not divide "
                f"--tp {self.tp}"
            )
        object.__setattr__(self, "attention_tp", attention_tp)

    @property
    def expert_tp(self) -> int:
        """Ranks that split the width of one routed expert."""
        return self.tp // self.ep


@dataclass(frozen=True)
class Change:
    """One padded size: `before` -> `after`, split over `ranks`, because of `reason`."""

    name: str
    key: str
    before: int
    after: int
    ranks: int
    reason: str
    padded_by: Padder = "plugin"

    def __str__(self) -> str:
        """One line for the log."""
        return (
            f"{self.name} {self.before} -> {self.after} "
            f"({self.after // self.ranks} on each of {self.ranks} ranks; {self.reason})"
        )


@dataclass(frozen=True)
class Padding:
    """The padded sizes of one model on one deployment.

    Attributes:
        model: Sizes of the checkpoint.
        parallel: Ranks.
        heads: Padded query heads.
        groups: Padded output groups.
        vocabulary: Rows of embedding and head with SGLang's own padding.
        expert_width: Padded inner width of routed and shared experts.
        experts: Padded routed experts.
        draft_experts: Padded DSpark experts.
        changes: What differs from the checkpoint, and why.

    """

    model: ModelSizes
    parallel: ParallelSizes
    heads: int
    groups: int
    vocabulary: int
    expert_width: int
    experts: int
    draft_experts: int
    changes: tuple[Change, ...] = field(default=())

    @property
    def active(self) -> bool:
        """Whether the plugin has anything to do (SGLang pads the vocabulary alone)."""
        return any(change.padded_by == "plugin" for change in self.changes)

    def config_overrides(self) -> dict[str, int]:
        """Keys of the flat configuration that the engine has to see, with their padded sizes."""
        return {change.key: change.after for change in self.changes if change.padded_by == "plugin"}

    def describe(self) -> list[str]:
        """Lines for the log; never empty."""
        ranks = f"--tp {self.parallel.tp} --ep-size {self.parallel.ep}"
        if not self.changes:
            return [f"tp-pad: every split size divides at {ranks}; nothing is padded"]
        lines = [f"tp-pad: {change}" for change in self.changes]
        if not self.active:
            lines.append(f"tp-pad: nothing else needs padding at {ranks}")
        return lines

    def overhead_bytes(self) -> dict[str, int]:
        """Bytes that padding adds to one rank, by component.

        The reference is an exact share (1/ranks) of the unpadded tensors. Weights as the engine
        holds them: dense FP8 with a float32 scale for each block, `wo_a` dequantised to BF16 at
        load, experts in FP4 with one E8M0 byte for each 32 elements, embedding and head in BF16.
        """
        m, p = self.model, self.parallel
        dense = 1 + DENSE_SCALE_BYTES / (m.block * m.block)
        blocks = m.layers + m.draft_stages
        more_heads = (self.heads - m.heads) / p.attention_tp
        more_groups = (self.groups - m.groups) / p.attention_tp
        group_input = m.heads_per_group * m.head_dim
        attention = blocks * (
            more_heads * m.head_dim * m.q_lora_rank * dense
            + more_groups * m.o_lora_rank * group_input * 2
            + more_groups * m.o_lora_rank * m.hidden * dense
        )
        vocabulary = 2 * 2 * m.hidden * (self.vocabulary / p.tp - m.vocabulary / p.tp)
        # One unit of width: a row of w1, a row of w3 and a column of w2, with their scales.
        fp4_unit = 3 * (m.hidden / 2 + m.hidden / FP4_SCALE_BLOCK)
        gate_row = m.hidden * 2 + 4

        def routed(layers: int, before: int, after: int) -> float:
            weights = fp4_unit * (after * self.expert_width - before * m.expert_width) / p.tp
            return layers * (weights + (after - before) * gate_row)

        shared = (
            blocks
            * m.shared_experts
            * 3
            * m.hidden
            * dense
            * (self.expert_width - m.expert_width)
            / p.tp
        )
        return {
            "attention": round(attention),
            "vocabulary": round(vocabulary),
            "routed experts": round(routed(m.layers, m.experts, self.experts)),
            "shared experts": round(shared),
            "draft experts": round(routed(m.draft_stages, m.draft_experts, self.draft_experts)),
        }


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def padded_vocabulary(vocabulary: int, ranks: int) -> int:
    """Rows of embedding and head, as SGLang's `VocabParallelEmbedding` rounds them."""
    padded = _round_up(vocabulary, VOCABULARY_UNIT)
    return padded if padded % ranks == 0 else _round_up(vocabulary, VOCABULARY_UNIT * ranks)


def _padded_groups(model: ModelSizes, ranks: int) -> tuple[int, str]:
    """Output groups after padding, and why.

    Raises:
        PaddingRefusedError: the heads do not form whole groups, or a share would cut a scale block.

    """
    if model.groups < 1 or model.heads % model.groups:
        raise PaddingRefusedError(
            f"tp-pad: {model.heads} attention heads do not form {model.groups} equal output "
            "groups; a padded group would mix real and padded heads"
        )
    if ranks == 1:
        return model.groups, ""
    if model.groups % ranks == 0:
        return model.groups, ""
    local = -(-model.groups // ranks)
    while local * model.heads_per_group not in KERNEL_HEAD_COUNTS:
        local += 1
        if local * model.heads_per_group > KERNEL_HEAD_COUNTS[-1]:
            raise PaddingRefusedError(
                f"tp-pad: {model.heads_per_group} heads in a group cannot be padded to a head "
                f"count that the sparse-MLA kernels take ({KERNEL_HEAD_COUNTS}) at "
                f"attention tensor parallel {ranks}"
            )
    heads = local * model.heads_per_group
    for what, size in (
        ("wq_b rows of a rank", heads * model.head_dim),
        ("wo_b columns of a rank", local * model.o_lora_rank),
    ):
        if size % model.block:
            raise PaddingRefusedError(
                f"tp-pad: {what} ({size}) are no multiple of the scale block {model.block}; a "
                "block would belong to two ranks"
            )
    return local * ranks, f"{model.groups} groups do not divide by {ranks}; {heads} heads a rank"


def _padded_width(model: ModelSizes, parallel: ParallelSizes) -> tuple[int, str]:
    width, reason = model.expert_width, ""
    unit = EXPERT_WIDTH_UNIT * parallel.expert_tp
    if parallel.expert_tp > 1 and width % unit:
        reason = f"a rank's share of {width} is no multiple of {EXPERT_WIDTH_UNIT}"
        width = _round_up(width, unit)
    shared_unit = model.block * parallel.tp
    if parallel.tp > 1 and model.shared_experts and width % shared_unit:
        # Both experts read one key of the configuration, so the width has to suit both.
        both = lcm(unit, shared_unit)
        reason = reason or (
            f"a rank's share of the shared expert's {width} is no multiple of the scale block "
            f"{model.block}"
        )
        width = _round_up(model.expert_width, both)
    return width, reason


def pad(model: ModelSizes, parallel: ParallelSizes) -> Padding:
    """Compute the padded sizes of `model` on `parallel`.

    Raises:
        PaddingRefusedError: a size cannot be padded exactly; the text says which and why.

    """
    groups, group_reason = _padded_groups(model, parallel.attention_tp)
    heads = groups * model.heads_per_group
    vocabulary = padded_vocabulary(model.vocabulary, parallel.tp)
    width, width_reason = _padded_width(model, parallel)
    experts = _round_up(model.experts, parallel.ep)
    draft_experts = _round_up(model.draft_experts, parallel.ep)
    for what, count in (("routed", experts), ("draft", draft_experts)):
        if 0 < count < parallel.tp:
            # `deepseek_v2.py`, DeepseekV2MoE.__init__.
            raise PaddingRefusedError(
                f"tp-pad: SGLang refuses --tp {parallel.tp} with {count} {what} experts; use at "
                f"most --tp {count}"
            )
    expert_reason = f"does not divide by --ep-size {parallel.ep}"
    candidates = (
        Change(
            "attention heads",
            "num_attention_heads",
            model.heads,
            heads,
            parallel.attention_tp,
            group_reason,
        ),
        Change(
            "output groups",
            "o_groups",
            model.groups,
            groups,
            parallel.attention_tp,
            group_reason,
        ),
        Change(
            "expert width",
            "moe_intermediate_size",
            model.expert_width,
            width,
            parallel.expert_tp,
            width_reason,
        ),
        Change(
            "routed experts",
            "n_routed_experts",
            model.experts,
            experts,
            parallel.ep,
            expert_reason,
        ),
        Change(
            "DSpark draft experts",
            "dspark_n_routed_experts",
            model.draft_experts,
            draft_experts,
            parallel.ep,
            expert_reason,
        ),
        Change(
            "vocabulary",
            "vocab_size",
            model.vocabulary,
            vocabulary,
            parallel.tp,
            "by SGLang itself; the added logits are cut off before sampling",
            "engine",
        ),
    )
    return Padding(
        model,
        parallel,
        heads,
        groups,
        vocabulary,
        width,
        experts,
        draft_experts,
        tuple(change for change in candidates if change.after != change.before),
    )


def needs_padding(model: ModelSizes, parallel: ParallelSizes) -> bool:
    """Whether a rank of this deployment must run with the plugin active."""
    return pad(model, parallel).active
