"""The numbers that the plan and the memory model build on."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spark_tp_pad.rules import (
    DIMENSIONS,
    KERNEL_HEAD_COUNTS,
    ModelSizes,
    PaddingRefusedError,
    ParallelSizes,
    needs_padding,
    pad,
    padded_vocabulary,
)

FLASH = ModelSizes()


@pytest.mark.parametrize(
    ("tp", "ep", "heads", "groups", "vocabulary", "width", "experts", "draft"),
    [
        (1, 1, 64, 8, 129280, 2304, 384, 128),
        (2, 1, 64, 8, 129280, 2304, 384, 128),
        (3, 1, 96, 12, 129408, 2304, 384, 128),
        (3, 3, 96, 12, 129408, 2304, 384, 129),
        (4, 1, 64, 8, 129280, 2560, 384, 128),
        (4, 2, 64, 8, 129280, 2304, 384, 128),
        (5, 1, 80, 10, 129280, 2560, 384, 128),
        (5, 5, 80, 10, 129280, 2560, 385, 130),
        (6, 1, 96, 12, 129408, 2304, 384, 128),
        (8, 4, 64, 8, 129280, 2304, 384, 128),
    ],
)
def test_padded_sizes(tp, ep, heads, groups, vocabulary, width, experts, draft):
    padding = pad(FLASH, ParallelSizes(tp, ep))
    assert (
        padding.heads,
        padding.groups,
        padding.vocabulary,
        padding.expert_width,
        padding.experts,
        padding.draft_experts,
    ) == (heads, groups, vocabulary, width, experts, draft)


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 4), (8, 8)])
def test_sizes_that_divide_are_left_alone_and_it_says_so(tp, ep):
    padding = pad(FLASH, ParallelSizes(tp, ep))
    assert not padding.active
    assert padding.config_overrides() == {}
    assert padding.describe() == [
        f"tp-pad: every split size divides at --tp {tp} --ep-size {ep}; nothing is padded"
    ]
    assert set(padding.overhead_bytes().values()) == {0}


def test_three_ranks_in_words():
    why = "8 groups do not divide by 3; 32 heads a rank"
    engine = "by SGLang itself; the added logits are cut off before sampling"
    assert pad(FLASH, ParallelSizes(3)).describe() == [
        f"tp-pad: attention heads 64 -> 96 (32 on each of 3 ranks; {why})",
        f"tp-pad: output groups 8 -> 12 (4 on each of 3 ranks; {why})",
        f"tp-pad: vocabulary 129280 -> 129408 (43136 on each of 3 ranks; {engine})",
    ]


def test_overhead_at_three_ranks():
    # Attention: 10.67 heads and 1.33 groups more than a third, in 43 blocks.
    assert pad(FLASH, ParallelSizes(3)).overhead_bytes() == {
        "attention": 1_084_478_805,
        "vocabulary": 873_813,
        "routed experts": 0,
        "shared experts": 0,
        "draft experts": 0,
    }
    assert pad(FLASH, ParallelSizes(3, 3)).overhead_bytes()["draft experts"] == 18_831_372


def test_vocabulary_alone_does_not_need_the_plugin():
    # A size that divides in everything but the vocabulary is SGLang's own business.
    model = ModelSizes(heads=96, groups=12)
    padding = pad(model, ParallelSizes(3))
    assert not padding.active
    assert [change.name for change in padding.changes] == ["vocabulary"]
    assert padding.describe()[-1] == "tp-pad: nothing else needs padding at --tp 3 --ep-size 1"


@pytest.mark.parametrize(
    ("model", "parallel", "text"),
    [
        (ModelSizes(heads=65), (3, 1), "65 attention heads do not form 8 equal output groups"),
        (
            ModelSizes(heads=72, groups=24),
            (7, 1),
            "3 heads in a group cannot be padded to a head count",
        ),
        (ModelSizes(head_dim=4, block=128), (5, 1), "wq_b rows of a rank"),
        (ModelSizes(o_lora_rank=8, block=128), (3, 1), "wo_b columns of a rank"),
        (ModelSizes(draft_experts=2), (3, 1), "refuses --tp 3 with 2 draft experts"),
    ],
)
def test_refused_sizes(model, parallel, text):
    with pytest.raises(PaddingRefusedError, match=text) as caught:
        pad(model, ParallelSizes(*parallel))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((3, 2), "--ep-size 2 must be a positive divisor of --tp 3"),
        ((0, 1), "--ep-size 1 must be a positive divisor of --tp 0"),
        ((4, 1, 3), "attention is split over 3 ranks"),
    ],
)
def test_refused_ranks(arguments, text):
    with pytest.raises(PaddingRefusedError, match=text):
        ParallelSizes(*arguments)


def test_config_nested_and_flat():
    from engine_harness import config_json
    from manifest import Checkpoint

    nested = config_json(Checkpoint())
    assert ModelSizes.from_config(nested) == FLASH
    flat = {**nested["text_config"], "quantization_config": nested["quantization_config"]}
    assert ModelSizes.from_config(flat) == FLASH


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"quantization_config": None}, "must be fp8 with square weight_block_size"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 32]}},
            "must be fp8 with square weight_block_size",
        ),
        ({"text_config": {}}, "config.json has no 'num_attention_heads'"),
    ],
)
def test_config_refused(change, text):
    from engine_harness import config_json
    from manifest import Checkpoint

    with pytest.raises(PaddingRefusedError, match=text):
        ModelSizes.from_config({**config_json(Checkpoint()), **change})


def test_every_dimension_is_named_once_and_every_padded_one_has_a_key():
    names = [dimension.name for dimension in DIMENSIONS]
    assert len(set(names)) == len(names)
    assert all(d.key and d.group != "none" for d in DIMENSIONS if d.padded_by == "plugin")
    assert all(d.padded_by == "nobody" for d in DIMENSIONS if d.group == "none")


@given(
    tp=st.integers(1, 16),
    ep_index=st.integers(0, 4),
    groups=st.integers(1, 16),
    per_group=st.sampled_from([1, 2, 4, 8, 16]),
    width=st.integers(1, 40).map(lambda n: 64 * n),
    vocabulary=st.integers(100, 200_000),
)
def test_what_is_padded_divides_and_nothing_shrinks(
    tp, ep_index, groups, per_group, width, vocabulary
):
    divisors = [d for d in range(1, tp + 1) if tp % d == 0]
    parallel = ParallelSizes(tp, divisors[ep_index % len(divisors)])
    model = ModelSizes(
        heads=groups * per_group, groups=groups, expert_width=width, vocabulary=vocabulary
    )
    try:
        padding = pad(model, parallel)
    except PaddingRefusedError:
        return
    assert padding.groups % tp == padding.heads % tp == 0
    assert padding.heads // padding.groups == model.heads_per_group
    if padding.groups != model.groups:
        assert padding.heads // tp in KERNEL_HEAD_COUNTS
    assert padding.vocabulary % tp == 0
    assert padding.vocabulary == padded_vocabulary(vocabulary, tp)
    if tp > 1:
        assert padding.expert_width % (model.block * tp) == 0
    if parallel.expert_tp > 1:
        assert padding.expert_width % (128 * parallel.expert_tp) == 0
    assert padding.experts % parallel.ep == padding.draft_experts % parallel.ep == 0
    for change in padding.changes:
        assert change.before < change.after < 2 * change.before + 128 * 128 * tp
    assert all(value >= 0 for value in padding.overhead_bytes().values())
    assert needs_padding(model, parallel) == padding.active
    # Sizes once padded are a model that needs nothing.
    again = ModelSizes(
        heads=padding.heads,
        groups=padding.groups,
        expert_width=padding.expert_width,
        vocabulary=vocabulary,
        experts=padding.experts,
        draft_experts=padding.draft_experts,
    )
    assert not pad(again, parallel).active


def test_the_design_note_lists_every_dimension():
    note = (Path(__file__).parent.parent / "DESIGN.md").read_text()
    rows = [line.split("|")[1].strip() for line in note.splitlines() if line.startswith("| ")]
    assert [dimension.name for dimension in DIMENSIONS] == rows[1 : 1 + len(DIMENSIONS)]
