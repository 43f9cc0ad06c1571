"""Packed Engram files: rows and sizes as sglang 0.5.23 and the packed format have them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from clusters import ROOT, document, rendering_of

from spark_appliance.engram import shards
from spark_appliance.model.facts import DEEPSEEK_V41_FLASH

TABLES = DEEPSEEK_V41_FLASH.engram
SOURCES = ROOT / "pkgs" / "spark-engram" / "python"
assert TABLES is not None


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 5, 6, 7, 8])
def test_ranks_cover_every_row_once(tp: int) -> None:
    assert TABLES is not None
    for layer, total in TABLES.rows.items():
        files = [s for rank in range(tp) for s in shards(TABLES, rank, tp) if s.layer == layer]
        assert files[0].row_start == 0
        assert files[-1].row_end == total
        for one, two in pairwise(files):
            assert one.row_end == two.row_start


def test_bounds_follow_the_hash_columns_at_tp3() -> None:
    assert TABLES is not None
    # recomputed from the engine's own EngramLayout
    assert [s.row_end for rank in range(3) for s in shards(TABLES, rank, 3)] == [
        128000880,
        128004290,
        256002934,
        256009984,
        384006168,
        384016682,
    ]


def test_five_ranks_get_equal_rows() -> None:
    assert TABLES is not None
    first = shards(TABLES, 1, 5)[0]
    assert first.layout == "rows"
    assert (first.row_start, first.row_end) == (384006168 // 5, 384006168 * 2 // 5)


def test_exact_sizes_at_tp3() -> None:
    assert TABLES is not None
    assert [(s.name, s.bytes) for s in shards(TABLES, 0, 3)] == [
        ("engram-l1-r0of3.bin", 34952777728),
        ("engram-l14-r0of3.bin", 34953711616),
    ]


def test_plan_carries_files_and_pack_command() -> None:
    plan = rendering_of(document()).plan
    assert plan is not None
    engram = plan.nodes[2].engram
    assert engram is not None
    assert [file.name for file in engram.files] == ["engram-l1-r2of3.bin", "engram-l14-r2of3.bin"]
    assert engram.pack_argv[:2] == ["spark-engram", "pack"]
    assert engram.pack_argv[engram.pack_argv.index("--rank") + 1] == "2"
    assert engram.pack_argv[engram.pack_argv.index("--tp") + 1] == "3"


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 5, 8])
def test_same_rows_and_sizes_as_the_packer(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not SOURCES.is_dir():
        pytest.skip("pkgs/spark-engram is not in this tree")
    monkeypatch.syspath_prepend(str(SOURCES))
    from spark_engram.layout import (
        engine_layout,
        file_bytes,
        file_name,
        shard_range,
        tables_from_config,
    )

    assert TABLES is not None
    config = {
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 16_000_000,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
    }
    tables = tables_from_config(config)
    for rank in range(tp):
        for ours, theirs in zip(shards(TABLES, rank, tp), tables, strict=True):
            layout = engine_layout(TABLES.columns, tp)
            rows = shard_range(theirs.total_rows, theirs.column_bounds, rank, tp, layout)
            assert (ours.layer, ours.row_start, ours.row_end) == (
                theirs.layer,
                rows.start,
                rows.end,
            )
            assert ours.bytes == file_bytes(rows.end - rows.start)
            assert ours.name == file_name(theirs.layer, rank, tp)
            assert ours.layout == layout.name.lower()
