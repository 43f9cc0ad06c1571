"""TP and EP sizes: what divides, what is padded, what is refused."""

from __future__ import annotations

import pytest
from clusters import ROOT, changed, document, rules_of

from spark_appliance.model.facts import DEEPSEEK_V41_FLASH, ModelFacts
from spark_appliance.parallel import judge

PAD_SOURCES = ROOT / "pkgs" / "spark-tp-pad"


def padded(tp: int, ep: int) -> dict[str, int]:
    parallelism, _ = judge(DEEPSEEK_V41_FLASH, tp, ep)
    assert parallelism is not None
    return {dimension.name: dimension.padded for dimension in parallelism.padded}


@pytest.mark.parametrize(
    ("tp", "ep", "expected"),
    [
        (1, 1, {}),
        (2, 1, {}),
        (3, 1, {"attention heads": 96, "output groups": 12}),
        (3, 3, {"attention heads": 96, "output groups": 12, "draft experts": 129}),
        (4, 1, {"expert width": 2560}),
        (4, 2, {}),
        (4, 4, {}),
        (8, 1, {"expert width": 3072}),
        (8, 2, {"expert width": 2560}),
        (8, 4, {}),
    ],
)
def test_padded_sizes(tp: int, ep: int, expected: dict[str, int]) -> None:
    assert padded(tp, ep) == expected


@pytest.mark.parametrize("tp", range(1, 9))
def test_every_padded_size_divides_and_is_not_smaller(tp: int) -> None:
    parallelism, _ = judge(DEEPSEEK_V41_FLASH, tp, 1)
    assert parallelism is not None
    for dimension in parallelism.dimensions:
        assert dimension.padded >= dimension.size
        assert dimension.padded % dimension.split == 0


def test_ep_must_divide_tp() -> None:
    data = changed(document(), "engine", to={"args": {"ep-size": 2}})
    assert rules_of(data) == ["parallel.ep"]


def test_other_models_must_divide() -> None:
    small = ModelFacts("small", heads=32, max_context=1, dense_bytes=1, kv_bytes_per_token=1.0)
    assert judge(small, 3, 1)[1][0].rule == "parallel.heads"
    assert judge(small, 4, 1)[0] is not None


@pytest.mark.parametrize(
    ("tp", "ep"), [(tp, ep) for tp in range(1, 9) for ep in range(1, tp + 1) if tp % ep == 0]
)
def test_same_sizes_and_bytes_as_the_padding_plugin(
    tp: int, ep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not PAD_SOURCES.is_dir():
        pytest.skip("pkgs/spark-tp-pad is not in this tree")
    monkeypatch.syspath_prepend(str(PAD_SOURCES))
    from spark_tp_pad.rules import ModelSizes, ParallelSizes, needs_padding, pad

    model, sizes = ModelSizes(), ParallelSizes(tp=tp, ep=ep)
    ours, _ = judge(DEEPSEEK_V41_FLASH, tp, ep)
    assert ours is not None
    theirs = pad(model, sizes)
    assert {dimension.name: dimension.padded for dimension in ours.dimensions} == {
        "attention heads": theirs.heads,
        "output groups": theirs.groups,
        "expert width": theirs.expert_width,
        "routed experts": theirs.experts,
        "draft experts": theirs.draft_experts,
    }
    assert ours.needs_padding == needs_padding(model, sizes)
    without_vocabulary = sum(
        size for name, size in theirs.overhead_bytes().items() if name != "vocabulary"
    )
    assert ours.padding_bytes == pytest.approx(without_vocabulary, rel=2e-3, abs=1 << 20)
