"""The memory model: published cases fit, impossible ones do not, and the remedy works."""

from __future__ import annotations

import re

import pytest
from clusters import changed, document, findings_of, rendering_of, rules_of

from spark_appliance.memory import TOTAL_GIB
from spark_appliance.model.facts import DEEPSEEK_V41_FLASH, GIB
from spark_appliance.parallel import judge


def budget_of(kind: str, count: int, profile: str) -> dict[str, float]:
    worst = rendering_of(document(kind, count, profile)).budgets[0]
    return {part.name: part.gib for part in worst.parts}


def test_three_sparks_fit_with_little_to_spare() -> None:
    rendering = rendering_of(document())
    head, worker, _ = rendering.budgets
    assert 0 < head.free_gib - head.reserve_gib < 2
    assert head.used_gib - worker.used_gib == pytest.approx(1.3)


def test_parts_at_tp3() -> None:
    parts = budget_of("triangle", 3, "stable-tp3")
    assert parts["weights"] == 101.0
    # 750,000 tokens of 1673.31 bytes
    assert parts["KV cache"] == pytest.approx(750_000 * 1673.31 / GIB)
    assert parts["CUDA graphs"] == pytest.approx(4 * 5.6e9 / 16 / GIB)
    # 14 x 768 x 500,000 bytes would be 5 GiB; the engine's score chunks cap it
    assert parts["prefill"] == 3.0
    assert sum(parts.values()) < TOTAL_GIB


def test_prefill_transient_below_the_cap() -> None:
    data = changed(document(), "engine", to={"args": {"context-length": 131072}})
    worst = rendering_of(data).budgets[0]
    assert worst.of("prefill") == pytest.approx(14 * 768 * 131072 / GIB)


def test_padding_is_part_of_the_weights() -> None:
    assert budget_of("switch", 4, "stable-tp4")["weights"] == 77.0
    padded = budget_of("switch", 4, "million-tp4")["weights"]
    assert padded == pytest.approx(77.0 + 7.697, abs=0.001)


def test_pair_refuses_the_native_checkpoint_with_the_sum() -> None:
    findings = [f for f in findings_of(document("pair", 2)) if f.severity == "error"]
    assert [f.rule for f in findings] == ["memory.does-not-fit"]
    assert "weights 145.0" in findings[0].message
    assert "121.69 GiB" in findings[0].message
    assert "use 3 nodes" in findings[0].remedy


REMEDIES = [
    ("cuda-graph-max-bs-decode", {"cuda-graph-max-bs-decode": 40, "max-running-requests": 40}),
    ("max-total-tokens", {"max-total-tokens": 2_000_000}),
    ("cuda-graph-max-bs-decode", {"cuda-graph-max-bs-decode": 9, "max-running-requests": 9}),
]


@pytest.mark.parametrize(("knob", "args"), REMEDIES)
def test_the_remedy_names_a_knob_and_a_value_that_fits(knob: str, args: dict[str, int]) -> None:
    data = changed(document(), "engine", to={"args": args})
    findings = [f for f in findings_of(data) if f.rule == "memory.does-not-fit"]
    assert len(findings) == 1
    match = re.search(rf"{knob}.*? to (\d+)", findings[0].remedy)
    assert match, findings[0].remedy
    changes = dict(args)
    for name in re.findall(r"[a-z-]+(?= (?:and|to))", findings[0].remedy):
        if name in {"max-total-tokens", "cuda-graph-max-bs-decode", "max-running-requests"}:
            changes[name] = int(match[1])
    mended = changed(document(), "engine", to={"args": changes})
    assert "memory.does-not-fit" not in rules_of(mended)


def test_chunk_is_the_knob_when_nothing_else_is_left() -> None:
    args = {"chunked-prefill-size": 256, "max-running-requests": 1, "cuda-graph-max-bs-decode": 1}
    small = changed(document(), "engine", to={"args": args | {"max-total-tokens": 500_000}})
    assert rules_of(small) == []


def test_more_nodes_are_named_when_no_knob_helps() -> None:
    remedy = next(f.remedy for f in findings_of(document("pair", 2)) if f.severity == "error")
    assert remedy == "no setting helps: use 3 nodes, where weights take 101 GiB each"


def test_fraction_floor_is_the_published_one_at_tp3() -> None:
    low = changed(document(), "engine", to={"args": {"mem-fraction-static": 0.94}})
    finding = next(f for f in findings_of(low) if f.severity == "error")
    assert finding.rule == "memory.fraction-too-low"
    assert "0.944" in finding.remedy
    exact = changed(document(), "engine", to={"args": {"mem-fraction-static": 0.944}})
    assert rules_of(exact) == []


def test_a_pool_that_sglang_would_clamp_is_told() -> None:
    data = document("switch", 4, "million-tp4")
    assert "memory.pool-clamped" in rules_of(data, "warning")
    more = changed(data, "engine", to={"args": {"mem-fraction-static": 0.83}})
    assert "memory.pool-clamped" not in rules_of(more, "warning")
    ep2 = changed(data, "engine", to={"args": {"ep-size": 2}})
    assert "memory.pool-clamped" not in rules_of(ep2, "warning")


def test_pool_smaller_than_one_request() -> None:
    data = changed(document(), "engine", to={"args": {"max-total-tokens": 400_000}})
    assert rules_of(data) == ["memory.pool-below-context"]


def test_weights_shrink_as_nodes_are_added() -> None:
    from spark_appliance.memory import resident_weights_gib

    sizes = []
    for tp in (2, 3, 4, 6, 8):
        parallelism, _ = judge(DEEPSEEK_V41_FLASH, tp, tp)
        assert parallelism is not None
        sizes.append(resident_weights_gib(DEEPSEEK_V41_FLASH, parallelism))
    assert sizes == sorted(sizes, reverse=True)
