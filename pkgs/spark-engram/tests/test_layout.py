import ast
from itertools import pairwise
from typing import Optional

import pytest
from engine_files import ENGRAM, engine_root
from hypothesis import given
from hypothesis import strategies as st
from spark_engram import layout
from spark_engram.errors import UsageError
from spark_engram.fake import FakeSpec, config_for
from spark_engram.layout import Layout, RowRange

# The published model: safetensors headers and config.json (field notes, section 3).
PUBLISHED = {
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_vocab_size": 16_000_000,
    "engram_head_dim": 256,
}


def test_published_tables_have_24_columns():
    first, second = layout.tables_from_config(PUBLISHED)
    assert (first.layer, first.total_rows, first.columns) == (1, 384006168, 24)
    assert (second.layer, second.total_rows, second.columns) == (14, 384016682, 24)


@pytest.mark.parametrize(
    ("layer", "tp", "sizes"),
    [
        (0, 3, [34952777728, 34953101312, 34953420800]),
        (1, 3, [34953711616, 34954092544, 34954366976]),
        (0, 4, [26214559744, 26214727680, 26214928384, 26215092224]),
        (1, 4, [26215239680, 26215489536, 26215649280, 26215804928]),
    ],
)
def test_published_file_sizes(layer, tp, sizes):
    table = layout.tables_from_config(PUBLISHED)[layer]
    found = []
    for rank in range(tp):
        owned = layout.shard_range(
            table.total_rows, table.column_bounds, rank, tp, layout.engine_layout(24, tp)
        )
        found.append(layout.file_bytes(owned.rows))
    assert found == sizes


def test_columns_and_rows_really_differ_for_the_published_model():
    table = layout.tables_from_config(PUBLISHED)[0]
    by = {
        rule: layout.shard_range(table.total_rows, table.column_bounds, 1, 4, rule)
        for rule in Layout
    }
    assert by[Layout.COLUMNS] == RowRange(96000564, 192001740)
    assert by[Layout.ROWS] == RowRange(96001542, 192003084)


@given(
    tp=st.integers(1, 24),
    rows_per_column=st.integers(1, 400),
    orders=st.integers(1, 4),
    heads=st.integers(1, 8),
    rule=st.sampled_from(Layout),
)
def test_ranks_partition_the_table(tp, rows_per_column, orders, heads, rule):
    spec = FakeSpec(rows_per_column=rows_per_column, orders=orders, heads=heads)
    for table in layout.tables_from_config(config_for(spec)):
        if rule is Layout.COLUMNS and table.columns % tp:
            with pytest.raises(UsageError, match="cannot split"):
                layout.shard_range(table.total_rows, table.column_bounds, 0, tp, rule)
            continue
        ranges = [
            layout.shard_range(table.total_rows, table.column_bounds, rank, tp, rule)
            for rank in range(tp)
        ]
        assert ranges[0].start == 0
        assert ranges[-1].end == table.total_rows
        assert all(left.end == right.start for left, right in pairwise(ranges))


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_outside_is_refused(rank):
    with pytest.raises(UsageError, match="ranks are 0 to 2"):
        layout.shard_range(10, (0, 10), rank, 3, Layout.ROWS)


@pytest.mark.parametrize(
    ("rows", "size"), [(0, 4096), (1, 8192), (15, 8192), (16, 12288), (30, 12288)]
)
def test_file_size_formula(rows, size):
    assert layout.file_bytes(rows) == size


def test_names():
    assert layout.file_name(14, 2, 3) == "engram-l14-r2of3.bin"
    assert layout.receipt_name(14, 2, 3) == "engram-l14-r2of3.bin.receipt.json"


def test_a_nested_text_config_is_understood():
    nested = {"model_type": "deepseek_v41", "text_config": PUBLISHED}
    assert layout.tables_from_config(nested) == layout.tables_from_config(PUBLISHED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engram_layer_ids": []}, "must have the same, non-zero length"),
        ({"engram_layer_ids": "1"}, "engram_layer_ids is missing or not a list"),
        ({"engram_vocab_size": True}, "engram_vocab_size is missing or not a number"),
        ({"engram_num_embeddings": [1, 2]}, "layer 1 has 1 Engram rows but"),
        ({"engram_head_dim": 128}, "only 256 is supported"),
        ({"engram_n_heads": 10**9}, "out of range"),
    ],
)
def test_a_wrong_config_is_refused(change, message):
    with pytest.raises(UsageError, match=message):
        layout.tables_from_config({**PUBLISHED, **change})


def engine_rules(root):
    """`EngramLayout` and `shard_range` cut out of the real file, without importing torch."""
    wanted = {"_MILLER_RABIN_WITNESSES", "_is_prime", "_find_next_prime", "EngramLayout"}
    wanted.add("shard_range")
    tree = ast.parse((root / ENGRAM).read_text())
    kept = [
        node
        for node in tree.body
        if getattr(node, "name", None) in wanted
        or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) in wanted)
    ]
    for node in kept:
        if isinstance(node, ast.ClassDef):  # a msgspec.Struct: a plain class with __init__
            node.bases, node.keywords = [ast.Name("Base", ast.Load())], []
    assert len(kept) == len(wanted)

    class Base:
        def __init__(self, **values):
            self.__dict__.update(values)

    space = {"Base": Base, "Optional": Optional}
    code = "from __future__ import annotations\n" + ast.unparse(ast.Module(kept, []))
    exec(compile(code, str(ENGRAM), "exec"), space)  # noqa: S102 - the file under test
    return space["EngramLayout"], space["shard_range"]


@pytest.mark.engine
@pytest.mark.parametrize("config", [PUBLISHED, config_for(FakeSpec(rows_per_column=37))])
def test_the_engine_draws_the_same_rows(config, tmp_path):
    engine_layout, shard_range = engine_rules(engine_root(tmp_path))
    values = type("Config", (), config)()
    theirs = engine_layout.from_config(values)
    for index, table in enumerate(layout.tables_from_config(config)):
        bounds = theirs.column_bounds(index)
        assert bounds == table.column_bounds
        for tp in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24):
            for rank in range(tp):
                ours = layout.shard_range(
                    table.total_rows, bounds, rank, tp, layout.engine_layout(table.columns, tp)
                )
                assert (ours.start, ours.end) == shard_range(table.total_rows, bounds, rank, tp)
