"""What is known about the models: sizes of DeepSeek-V4.1-Flash and of plainly described others.

Sources: config and safetensors headers of the checkpoint as published in the recipes of
MiaAI-Lab, knapcio and cqingwang (DeepSeek-V4.1-Flash on DGX Spark); sglang 0.5.23
(``layers/engram.py``, ``models/deepseek_v4.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class EngramTables:
    """The hash tables of the Engram layers.

    ``rows`` maps a layer to its number of rows; a row is ``row_bytes`` long (256 weight bytes
    and 8 scale bytes). ``columns`` hash columns are looked up for every token and layer, and
    their sizes are the primes drawn upwards from ``vocab_size``.
    """

    rows: Mapping[int, int]
    columns: int
    vocab_size: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes that the parallelism rules and the memory model need.

    ``weights_gib`` maps a TP size to measured resident GiB per rank, padded attention included;
    sizes that are not in it are computed as ``expert_bytes / tp + dense_bytes``.
    ``free_after_load_gib`` is the free memory that the engine saw after loading, by TP size,
    before expert padding. The ``*_bytes`` of attention and experts are totals over all ranks,
    before padding. ``kv_bytes_per_token`` is per rank.
    """

    name: str
    heads: int
    max_context: int
    dense_bytes: int
    kv_bytes_per_token: float
    groups: int = 0
    attention_bytes: int = 0
    experts: int = 0
    expert_width: int = 0
    expert_bytes: int = 0
    shared_expert_bytes: int = 0
    draft_experts: int = 0
    draft_expert_bytes: int = 0
    weights_gib: Mapping[int, float] = field(default_factory=dict)
    free_after_load_gib: Mapping[int, float] = field(default_factory=dict)
    kv_sharded: bool = False
    page_size: int = 1
    engram: EngramTables | None = None
    deepseek_v41: bool = False


DEEPSEEK_V41_FLASH: Final = ModelFacts(
    name="deepseek-v4.1-flash",
    heads=64,
    groups=8,
    # wq_b and wo_b FP8 with float32 scales, wo_a BF16, 40 layers and 3 draft stages: what
    # spark_tp_pad.rules counts, over all ranks
    attention_bytes=6_506_872_830,
    max_context=1_048_576,
    experts=384,
    expert_width=2304,
    # 384 MXFP4 experts in 40 layers; one shared expert a layer; 128 draft experts in 3 stages
    expert_bytes=275_400 << 20,
    shared_expert_bytes=1_458 << 20,
    draft_experts=128,
    draft_expert_bytes=6_885 << 20,
    # what is left per rank of the measured sizes below once the experts' share is taken off
    dense_bytes=round(11.4 * GIB),
    # 101 and 77: MiaAI-Lab README; 145: the two-Spark report there; 45: inferred from TP4
    weights_gib=MappingProxyType({2: 145.0, 3: 101.0, 4: 77.0, 8: 45.0}),
    # TP 3: a fraction of 0.944 left just no KV budget, 0.056 x 107 GiB (MiaAI-Lab README).
    # TP 4: a fraction of 0.80 gave 10.0 M tokens, 15.6 + 0.2 x 107 GiB (same source).
    free_after_load_gib=MappingProxyType({3: 6.0, 4: 37.0}),
    # 1670.75 was measured; sglang 0.5.23 (model_executor/pool_configurator.py) pads pages to
    # 1632.5 * 41/40 and keeps it replicated on every rank
    kv_bytes_per_token=1673.31,
    # forced for this architecture (arg_groups/model_overrides/deepseek_v4.py)
    page_size=256,
    engram=EngramTables(
        rows=MappingProxyType({1: 384_006_168, 14: 384_016_682}),
        columns=24,
        vocab_size=16_000_000,
        row_bytes=264,
    ),
    deepseek_v41=True,
)

MODELS: Final[Mapping[str, ModelFacts]] = MappingProxyType(
    {DEEPSEEK_V41_FLASH.name: DEEPSEEK_V41_FLASH}
)
"""Models that a profile can name."""
