"""Padded and split equals whole, bit for bit in float32, for every number of ranks.

`reference.py` says why that can be asked for. The shares come from `shares.split` here and from
the engine's own layers in `test_engine.py`.
"""

from __future__ import annotations

import pytest
import spark_tp_pad.padding
import torch
from reference import draft, gather_logits, route, target
from shares import SMALL, checkpoint, split
from spark_tp_pad.padding import pad_stream
from spark_tp_pad.rules import ParallelSizes, pad
from spark_tp_pad.tensors import Fill

TOKENS = torch.tensor([3, 999, 0, 512, 640, 77])
TOP_K, DRAFT_TOP_K, STEPS = 3, 2, 4
LAYOUTS = [(2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4), (5, 1), (5, 5)]


@pytest.fixture(scope="module")
def weights():
    return checkpoint(SMALL)


def shares_of(weights, tp, ep=1):
    padding = pad(SMALL.sizes, ParallelSizes(tp, ep))
    return split(pad_stream(weights.items(), padding, frozenset({"layers", "mtp"})), padding)


def forward(shares):
    hidden, logits = target(shares, TOKENS, TOP_K)
    drafted, last = draft(shares, hidden, TOKENS, DRAFT_TOP_K, STEPS)
    return hidden, logits, drafted, last


def same(left, right):
    vocabulary = SMALL.sizes.vocabulary
    return (
        all(torch.equal(a, b) for a, b in zip(left[0], right[0], strict=True))
        and torch.equal(left[1][:, :vocabulary], right[1][:, :vocabulary])
        and left[2] == right[2]
        and torch.equal(left[3], right[3])
    )


@pytest.fixture(scope="module")
def whole(weights):
    result = forward(shares_of(weights, 1))
    # Something happens in there: values differ between tokens, layers and draft steps.
    assert all(len(torch.unique(h)) > 20 for h in result[0])
    assert not torch.equal(result[0][0], result[0][1])
    assert len(set(result[2])) > 1
    return result


@pytest.mark.parametrize(("tp", "ep"), LAYOUTS)
def test_equal_to_the_whole_model(weights, whole, tp, ep):
    assert same(forward(shares_of(weights, tp, ep)), whole)


@pytest.mark.parametrize(("tp", "ep"), LAYOUTS)
def test_padding_is_where_it_should_be(weights, tp, ep):
    padding = pad(SMALL.sizes, ParallelSizes(tp, ep))
    shares = shares_of(weights, tp, ep)
    model = SMALL.sizes
    heads = padding.heads // tp
    for rank, share in enumerate(shares):
        real = max(0, min(heads, model.heads - rank * heads))
        blocks = [(block, model.experts) for block in share.layers]
        blocks += [(stage, model.draft_experts) for stage in share.stages]
        for block, experts in blocks:
            assert block.wq_b.shape[0] == heads * model.head_dim
            assert not block.wq_b[real * model.head_dim :].any()
            assert not block.sinks[real:].any()
            groups = real // model.heads_per_group
            assert not block.wo_a[groups:].any()
            assert not block.wo_b[:, groups * model.o_lora_rank :].any()
            for number, matrices in block.experts.items():
                assert number < experts or not any(matrix.any() for matrix in matrices)
    if (tp, ep) == (3, 1):
        assert not shares[2].layers[0].wq_b.any()


@pytest.mark.parametrize(("tp", "ep"), [(3, 3), (5, 5)])
def test_a_padded_expert_is_never_chosen(weights, tp, ep):
    shares = shares_of(weights, tp, ep)
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-32, 33, (256, SMALL.sizes.hidden), generator=generator) / 8
    for block, experts in (
        (shares[0].layers[0], SMALL.sizes.experts),
        (shares[0].stages[0], SMALL.sizes.draft_experts),
    ):
        # Even when all real experts are chosen, it comes after them.
        chosen, _ = route(block, x, experts)
        assert int(chosen.max()) < experts


def test_padded_logits_would_win_if_they_were_not_cut_off(weights):
    shares = shares_of(weights, 3)
    for share in shares:
        share.head = -share.head.abs()
    x = torch.ones(1, SMALL.sizes.hidden)
    parts = [x @ share.head.T for share in shares]
    assert int(torch.cat(parts, 1).argmax()) >= SMALL.sizes.vocabulary
    assert int(gather_logits(parts, SMALL.sizes.vocabulary).argmax()) < SMALL.sizes.vocabulary


# The tests above must be able to fail: each of these breaks one rule and has to be noticed.


def _with_fill(monkeypatch, fill, value):
    original = spark_tp_pad.padding._fill_value

    def wrong(dtype, wanted, name):
        storage, right = original(dtype, wanted, name)
        # Sinks stay zero: a large one would hide what the padded heads do.
        hit = wanted is fill and (fill is not Fill.ZERO or storage is torch.uint8)
        return storage, value if hit else right

    monkeypatch.setattr(spark_tp_pad.padding, "_fill_value", wrong)


def test_scale_garbage_is_noticed(weights, monkeypatch):
    _with_fill(monkeypatch, Fill.ONE, 255)
    shares = shares_of(weights, 3)
    assert shares[2].layers[0].wq_b.isnan().any()
    with pytest.raises(AssertionError, match="the sum is not exact"):
        forward(shares)


def test_nonzero_weights_are_noticed(weights, whole, monkeypatch):
    # 8.0 in FP8; 6.0 and -0.0 in packed FP4.
    _with_fill(monkeypatch, Fill.ZERO, 0x50)
    assert not same(forward(shares_of(weights, 3)), whole)


def test_a_padded_expert_that_can_be_chosen_is_noticed(weights, whole, monkeypatch):
    _with_fill(monkeypatch, Fill.NEVER, 1.0)
    assert not same(forward(shares_of(weights, 3, 3)), whole)


def test_padding_in_front_instead_of_behind_is_noticed(weights, whole):
    shares = shares_of(weights, 3)
    for share in shares:
        for block in share.layers:
            block.wo_b = block.wo_b.roll(SMALL.sizes.o_lora_rank, 1)
    assert not same(forward(shares), whole)
