"""A small checkpoint that is built exactly like the published one, for tests and demos."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spark_engram import layout as geometry
from spark_engram.checkpoint import CONFIG_FILE, INDEX_FILE, tensor_name
from spark_engram.layout import Table


@dataclass(frozen=True)
class FakeSpec:
    """Shape of a fake checkpoint; the defaults keep the real layers, orders and heads.

    Attributes:
        rows_per_column: lower bound of the column sizes (``engram_vocab_size``; 16,000,000 in
            the published model). A table has about 24 times this many rows.
        layers: layers with a table.
        orders: number of n-gram orders (2, 3, 4 in the published model).
        heads: hash heads per order.
        seed: of the random table contents.
        misalign: bytes of padding tensor in front, to move the tables off page boundaries.

    """

    rows_per_column: int = 1000
    layers: tuple[int, ...] = (1, 14)
    orders: int = 3
    heads: int = 8
    seed: int = 0
    misalign: int = 13


def config_for(spec: FakeSpec) -> dict[str, object]:
    """Return the ``config.json`` of a fake checkpoint."""
    base: dict[str, object] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "vocab_size": 129280,
        "engram_layer_ids": list(spec.layers),
        "engram_max_ngram_size": spec.orders + 1,
        "engram_n_heads": spec.heads,
        "engram_vocab_size": spec.rows_per_column,
        "engram_head_dim": geometry.WEIGHT_BYTES,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 1000,
    }
    base["engram_num_embeddings"] = [bounds[-1] for bounds in _bounds(spec)]
    return base


def table_arrays(table: Table, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights [rows, 256] and scales [rows, 8] of a fake table, as bytes.

    Weights avoid the two NaN codes of F8_E4M3 (0x7f, 0xff); scales stay within 2**-15..2**15.
    """
    generator = np.random.default_rng([seed, table.layer])
    weights = generator.integers(0, 256, (table.total_rows, geometry.WEIGHT_BYTES), dtype=np.uint8)
    weights[(weights & 0x7F) == 0x7F] = 0x7E
    scales = generator.integers(112, 143, (table.total_rows, geometry.SCALE_BYTES), dtype=np.uint8)
    return weights, scales


def write_checkpoint(folder: Path, spec: FakeSpec) -> tuple[Table, ...]:
    """Write a fake checkpoint into ``folder`` (created if missing); returns its tables.

    Each table gets its own shard, with weight and scale in it, as in the published files.

    Raises:
        OSError: it could not be written.
        UsageError: the spec makes no valid table.

    """
    folder.mkdir(parents=True, exist_ok=True)
    config = config_for(spec)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    tables = geometry.tables_from_config(config)
    shards = len(tables) + 1
    weight_map: dict[str, str] = {}
    total = 0
    first: dict[str, tuple[str, np.ndarray]] = {
        "embed.weight": ("BF16", np.zeros((16, 8), np.uint16))
    }
    contents = [first]
    for table in tables:
        weights, scales = table_arrays(table, spec.seed)
        prefix = f"layers.{table.layer}.engram."
        contents.append(
            {
                prefix + "aligned_padding": ("U8", np.zeros((spec.misalign,), np.uint8)),
                tensor_name(table.layer, "weight"): ("F8_E4M3", weights),
                prefix + "k_weight": ("BF16", np.zeros((4, 8), np.uint16)),
                tensor_name(table.layer, "scale"): ("F8_E8M0", scales),
            }
        )
    for number, tensors in enumerate(contents, 1):
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        write_safetensors(folder / name, list(tensors.items()))
        weight_map.update(dict.fromkeys(tensors, name))
        total += sum(array.nbytes for _, array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n")
    return tables


def write_safetensors(path: Path, tensors: Sequence[tuple[str, tuple[str, np.ndarray]]]) -> None:
    """Write named (dtype, array) pairs as one safetensors file, in the given order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, array) in tensors:
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    raw = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        for _, (_, array) in tensors:
            stream.write(np.ascontiguousarray(array).data)


def _bounds(spec: FakeSpec) -> list[tuple[int, ...]]:
    return geometry.column_bounds(
        spec.rows_per_column, len(spec.layers), orders=spec.orders, heads=spec.heads
    )
