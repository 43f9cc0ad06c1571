"""Every tensor of the checkpoint has a rule, and its padded share the expected shape."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from engine_harness import DTYPES
from manifest import Checkpoint, tensors
from spark_tp_pad.padding import Tally, pad_stream
from spark_tp_pad.rules import DIMENSIONS, ModelSizes, PaddingRefusedError, ParallelSizes, pad
from spark_tp_pad.tensors import (
    LAYER_RULES,
    STAGE_RULES,
    TOP_RULES,
    VISION_BLOCK_RULES,
    Fill,
    growth,
    parse,
)

FLASH = Checkpoint()
BOTH = frozenset({"layers", "mtp"})

#: Padded shapes at TP 3 EP 1, written down by hand: only these tensors change.
THREE = {
    "attn.wq_b.weight": (49152, 1280),
    "attn.wq_b.scale": (1536, 40),
    "attn.attn_sink": (96,),
    "attn.wo_a.weight": (12288, 4096),
    "attn.wo_a.scale": (384, 128),
    "attn.wo_b.weight": (5120, 12288),
    "attn.wo_b.scale": (160, 384),
}


def test_the_list_is_the_published_one():
    listed = list(tensors(FLASH))
    assert len({tensor.name for tensor in listed}) == len(listed) == 96_085
    assert sum(tensor.name.startswith("mtp.") for tensor in listed) == 2_401
    # metadata.total_size of model.safetensors.index.json.
    assert sum(tensor.nbytes for tensor in listed) == 510_286_023_000


def test_every_rule_is_used_and_every_name_has_one():
    seen: Counter[tuple[str, str]] = Counter()
    for tensor in tensors(FLASH):
        name = parse(tensor.name)
        seen[name.part, name.tail] += 1
    known = {
        *(("layers", tail) for tail in LAYER_RULES),
        *(("mtp", tail) for tail in STAGE_RULES),
        *(("vision.blocks", tail) for tail in VISION_BLOCK_RULES),
        *(("", name) for name in TOP_RULES),
    }
    assert set(seen) == known
    assert seen["layers", "ffn.experts.*.w1.weight"] == 40 * 384
    assert seen["mtp", "ffn.experts.*.w2.scale"] == 3 * 128


def test_rules_name_dimensions_that_exist():
    names = {d.name for d in DIMENSIONS if d.padded_by == "plugin"}
    used = {rule.dimension for rule in (*LAYER_RULES.values(), *STAGE_RULES.values())} - {""}
    assert used == names


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.attn.wq_c.weight",
        "model.layers.0.self_attn.wq_b.weight",
        "layers.0.attn.wq_b.bias",
        "layers.0.ffn.experts.0.w4.weight",
        "mtp.0.attn.indexer.wq_b.weight",
        "vision.blocks.0.attn.q_norm.weight",
        "hc_head_fn",
        "",
    ],
)
def test_unknown_names_are_refused(name):
    with pytest.raises(PaddingRefusedError, match="no rule for checkpoint tensor"):
        parse(name)


def test_the_indexer_is_not_the_attention():
    padding = pad(FLASH.sizes, ParallelSizes(3))
    assert growth(parse("layers.2.attn.indexer.wq_b.weight").rule, padding) is None
    assert growth(parse("layers.2.attn.wq_b.weight").rule, padding) is not None


def _meta_stream(checkpoint=FLASH):
    for tensor in tensors(checkpoint):
        yield tensor.name, torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device="meta")


def test_padded_shapes_at_three_ranks():
    padding = pad(FLASH.sizes, ParallelSizes(3))
    tally = Tally()
    before = {tensor.name: tensor.shape for tensor in tensors(FLASH)}
    after = {}
    for name, tensor in pad_stream(_meta_stream(), padding, BOTH, tally):
        after[name] = tuple(tensor.shape)
    assert after.keys() == before.keys()
    for name, shape in after.items():
        assert shape == THREE.get(parse(name).tail, before[name]), name
    assert tally.seen.keys() == THREE.keys()
    for tail in THREE:
        assert tally.seen[tail] == set(range(40))


def test_only_the_part_that_the_model_loads_is_padded():
    padding = pad(FLASH.sizes, ParallelSizes(3))
    before = {tensor.name: tensor.shape for tensor in tensors(FLASH)}
    for name, tensor in pad_stream(_meta_stream(), padding, frozenset({"mtp"})):
        grown = tuple(tensor.shape) != before[name]
        assert grown == (name.startswith("mtp.") and parse(name).tail in THREE), name


def test_added_experts_come_once_with_their_shapes():
    padding = pad(FLASH.sizes, ParallelSizes(3, 3))
    names = Counter(name for name, _ in pad_stream(_meta_stream(), padding, BOTH))
    assert set(names.values()) == {1}
    added = set(names) - {tensor.name for tensor in tensors(FLASH)}
    assert added == {
        f"mtp.{stage}.ffn.experts.128.{projection}.{kind}"
        for stage in range(3)
        for projection in ("w1", "w2", "w3")
        for kind in ("weight", "scale")
    }


@pytest.mark.parametrize(
    ("tp", "ep"), [(2, 1), (3, 1), (3, 3), (4, 1), (4, 2), (5, 1), (5, 5), (6, 2), (7, 1), (8, 2)]
)
def test_scales_grow_with_their_weights(tp, ep):
    # A weight and its scale must keep the same block at every TP size.
    padding = pad(FLASH.sizes, ParallelSizes(tp, ep))
    for rules in (LAYER_RULES, STAGE_RULES):
        for tail, rule in rules.items():
            if not tail.endswith(".weight") or tail.replace(".weight", ".scale") not in rules:
                continue
            weight = growth(rule, padding)
            scale = growth(rules[tail.replace(".weight", ".scale")], padding)
            assert (weight is None) == (scale is None), tail
            if weight is None or scale is None:
                continue
            assert scale.fill is Fill.ONE
            assert weight.fill is Fill.ZERO
            assert weight.axis == scale.axis
            assert weight.after * scale.before == weight.before * scale.after, tail


def test_missing_tensors_are_named():
    padding = pad(FLASH.sizes, ParallelSizes(3))
    tally = Tally()
    kept = (item for item in _meta_stream() if item[0] != "layers.7.attn.wo_b.scale")
    for _ in pad_stream(kept, padding, frozenset({"layers"}), tally):
        pass
    assert tally.missing(range(40), padding, "layers") == ["layers.7.attn.wo_b.scale"]


def test_text_only_checkpoints_may_lack_the_image_bias():
    padding = pad(ModelSizes(experts=385), ParallelSizes(3, 3))
    assert growth(LAYER_RULES["ffn.gate.bias_vl"], padding) is not None
    assert not any(
        name.endswith("bias_vl") for name in Tally().missing(range(1), padding, "layers")
    )
