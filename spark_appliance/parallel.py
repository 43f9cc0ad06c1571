"""Which TP and EP sizes a model can run at, and what has to be padded for it.

DeepSeek-V4.1-Flash's sizes do not all divide: the padding itself is done in the engine by the
plugin ``pkgs/spark-tp-pad``; here are the same rules for planning, and a test holds the two
against each other. Sources: sglang 0.5.23 ``models/deepseek_v4.py``,
``layers/quantization/mxfp4_flashinfer_cutlass_moe.py`` (widths must be multiples of 128) and
``layers/moe``; kernel head counts from the SM120 sparse-MLA kernels (field recipe of TP 3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from spark_appliance.model.facts import GIB, ModelFacts
from spark_appliance.model.findings import Finding, Path

HEADS_PER_RANK: Final = (8, 16, 32, 64, 128)
"""Head counts that the sparse-MLA kernels take."""

WIDTH_MULTIPLE: Final = 128
"""A rank's share of the routed experts' width must be a multiple of this (Cutlass MXFP4 path)."""

SCALE_BLOCK: Final = 32
"""Side of an FP8 scale block: a rank's share of the shared expert's width is a multiple of it."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """One size that TP or EP splits: as the checkpoint has it and as the engine must hold it."""

    name: str
    size: int
    padded: int
    split: int

    @property
    def per_rank(self) -> int:
        """Size on one rank."""
        return self.padded // self.split


@dataclass(frozen=True, slots=True)
class Parallelism:
    """The judged TP and EP sizes of a plan."""

    tp: int
    ep: int
    dimensions: tuple[Dimension, ...]
    padding_bytes: int
    expert_padding_bytes: int

    @property
    def padded(self) -> tuple[Dimension, ...]:
        """The dimensions that do not fit as they are."""
        return tuple(d for d in self.dimensions if d.padded != d.size)

    @property
    def needs_padding(self) -> bool:
        """Whether the engine needs the padding plugin."""
        return bool(self.padded)


def judge(
    facts: ModelFacts, tp: int, ep: int, path: Path = ()
) -> tuple[Parallelism | None, list[Finding]]:
    """Return how the model splits at these sizes, or the findings that forbid them.

    ``path`` is the place in the cluster file that findings point at.
    """
    if ep < 1 or tp % ep:
        return None, [
            Finding(
                "parallel.ep",
                path,
                f"--ep-size {ep} does not divide --tp {tp}",
                f"use one of {', '.join(str(d) for d in range(1, tp + 1) if tp % d == 0)}",
            )
        ]
    if not facts.deepseek_v41:
        if facts.heads % tp:
            return None, [
                Finding(
                    "parallel.heads",
                    path,
                    f"{facts.name} has {facts.heads} attention heads, TP {tp} does not divide them",
                    "use a number of nodes that divides the heads",
                )
            ]
        return Parallelism(
            tp, ep, (Dimension("attention heads", facts.heads, facts.heads, tp),), 0, 0
        ), []
    groups = _padded_groups(facts, tp)
    if groups is None:
        return None, [
            Finding(
                "parallel.heads",
                path,
                f"no kernel takes {facts.heads} heads padded for TP {tp}",
                "use 2 to 8 nodes",
            )
        ]
    heads = groups * (facts.heads // facts.groups)
    moe_tp = tp // ep
    # one config value serves routed experts, split over TP / EP, and shared ones, over TP
    width = _up(facts.expert_width, math.lcm(moe_tp * WIDTH_MULTIPLE, tp * SCALE_BLOCK))
    experts, draft = _up(facts.experts, ep), _up(facts.draft_experts, ep)
    dimensions = (
        Dimension("attention heads", facts.heads, heads, tp),
        Dimension("output groups", facts.groups, groups, tp),
        Dimension("expert width", facts.expert_width, width, moe_tp),
        Dimension("routed experts", facts.experts, experts, ep),
        Dimension("draft experts", facts.draft_experts, draft, ep),
    )
    attention = facts.attention_bytes * (heads - facts.heads) / facts.heads / tp
    wider = width / facts.expert_width
    experts_extra = (
        facts.expert_bytes * (wider * experts / facts.experts - 1)
        + facts.shared_expert_bytes * (wider - 1)
        + facts.draft_expert_bytes * (wider * draft / facts.draft_experts - 1)
    ) / tp
    return Parallelism(
        tp, ep, dimensions, round(attention + experts_extra), round(experts_extra)
    ), _costly(facts, tp, ep, experts_extra, path)


def _costly(facts: ModelFacts, tp: int, ep: int, extra: float, path: Path) -> list[Finding]:
    if extra < GIB:
        return []
    better = [
        other
        for other in range(ep + 1, tp + 1)
        if tp % other == 0 and facts.expert_width * other % (tp * WIDTH_MULTIPLE) == 0
    ]
    remedy = f"--ep-size {better[0]} needs none" if better else "accept it"
    return [
        Finding(
            "parallel.width-padded",
            path,
            f"TP {tp} with EP {ep} leaves an expert width of {facts.expert_width * ep / tp:g} a "
            f"rank, no multiple of {WIDTH_MULTIPLE}: padding costs {extra / GIB:.1f} GiB a node",
            remedy,
            "note",
        )
    ]


def _padded_groups(facts: ModelFacts, tp: int) -> int | None:
    heads_per_group = facts.heads // facts.groups
    groups = _up(facts.groups, tp)
    while groups * heads_per_group // tp <= HEADS_PER_RANK[-1]:
        if groups * heads_per_group // tp in HEADS_PER_RANK:
            return groups
        groups += tp
    return None


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
