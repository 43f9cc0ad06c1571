"""Which Engram rows a rank packs, and how large the files are.

The rules are those of sglang 0.5.23 (``layers/engram.py``: ``EngramLayout``, ``shard_range``) and
of the packed format version 1 (``pkgs/spark-engram/FORMAT.md``); a test holds them against
``spark_engram.layout``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final, Literal

from spark_appliance.model.facts import EngramTables

PAGE_BYTES: Final = 4096
"""Size of a page of the packed file; the first page is the header."""

Layout = Literal["columns", "rows"]


@dataclass(frozen=True, slots=True)
class Shard:
    """One packed file: rows ``[row_start, row_end)`` of one layer for one rank."""

    layer: int
    rank: int
    tp: int
    row_start: int
    row_end: int
    row_bytes: int
    layout: Layout

    @property
    def name(self) -> str:
        """File name in the Engram directory."""
        return f"engram-l{self.layer}-r{self.rank}of{self.tp}.bin"

    @property
    def bytes(self) -> int:
        """Exact size: a header page, then as many whole rows a page as fit."""
        per_page = PAGE_BYTES // self.row_bytes
        return PAGE_BYTES * (1 + -(-(self.row_end - self.row_start) // per_page))


def layout_of(tables: EngramTables, tp: int) -> Layout:
    """Return how sglang 0.5.23 splits the tables over ``tp`` ranks."""
    return "columns" if tables.columns % tp == 0 else "rows"


def shards(tables: EngramTables, rank: int, tp: int) -> list[Shard]:
    """Return the files that ``rank`` packs, one a layer, in layer order."""
    result = []
    all_bounds = _column_bounds(tables.vocab_size, tables.columns, len(tables.rows))
    for (layer, total), bounds in zip(sorted(tables.rows.items()), all_bounds, strict=True):
        if bounds[-1] != total:
            raise ValueError(f"layer {layer} has {total} rows, its columns have {bounds[-1]}")
        layout = layout_of(tables, tp)
        if layout == "columns":
            step = tables.columns // tp
            start, end = bounds[rank * step], bounds[(rank + 1) * step]
        else:
            start, end = total * rank // tp, total * (rank + 1) // tp
        result.append(Shard(layer, rank, tp, start, end, tables.row_bytes, layout))
    return result


_HEADS: Final = 8
"""Hash heads of one n-gram order (``engram_n_heads``); each order starts from vocab_size again."""


@functools.cache
def _column_bounds(vocab_size: int, columns: int, layers: int) -> tuple[tuple[int, ...], ...]:
    """Return each layer's column bounds; a prime is used once over all layers."""
    used: set[int] = set()
    result = []
    for _ in range(layers):
        bounds = [0]
        for _ in range(columns // _HEADS):
            current = vocab_size - 1
            for _ in range(_HEADS):
                current = _next_prime(current, used)
                used.add(current)
                bounds.append(bounds[-1] + current)
        result.append(tuple(bounds))
    return tuple(result)


def _next_prime(above: int, used: set[int]) -> int:
    candidate = above + 1
    while candidate in used or not _is_prime(candidate):
        candidate += 1
    return candidate


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    if number % 2 == 0 or number % 3 == 0:
        return False
    return all(number % d and number % (d + 2) for d in range(5, int(number**0.5) + 1, 6))
