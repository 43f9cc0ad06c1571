"""Which rows a rank owns, and how large its packed file is. Pure functions.

This module needs neither the native core, numpy nor torch, so that a planner on any
machine can use it. It follows SGLang 0.5.23 (``sglang/srt/layers/engram.py``:
``EngramLayout`` and ``shard_range``); a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, chain

from spark_engram.errors import UsageError

#: Bytes of one row: 256 of F8_E4M3 weights, then one F8_E8M0 scale for each 32 of them.
#: Source: the checkpoint's safetensors headers and FP8_BLOCK_SIZE in sglang 0.5.23.
WEIGHT_BYTES = 256
SCALE_BLOCK = 32
SCALE_BYTES = WEIGHT_BYTES // SCALE_BLOCK
ROW_BYTES = WEIGHT_BYTES + SCALE_BYTES

#: One page is one 4 KiB read, the unit in which NVMe drives count random reads.
PAGE_BYTES = 4096
#: floor(4096 / 264); the 136 bytes left hold the page's own number and checksum.
ROWS_PER_PAGE = PAGE_BYTES // ROW_BYTES
HEADER_BYTES = PAGE_BYTES

# Witnesses that make Miller-Rabin exact below 3.3e24 (Sorenson and Webster, 2015).
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


class Layout(Enum):
    """How the rows of a table are divided among the tensor-parallel ranks.

    The value is the layout id written into a packed file.
    """

    COLUMNS = 1
    """On hash-column boundaries: a rank owns whole per-head tables (SGLang >= 0.5.23)."""
    ROWS = 2
    """Equal row counts, ``total * rank // tp`` (older recipes, and an uneven column count)."""

    @property
    def label(self) -> str:
        """The name used on the command line and in receipts."""
        return self.name.lower()


@dataclass(frozen=True)
class RowRange:
    """The rows ``[start, end)`` of a table that one rank owns."""

    start: int
    end: int

    @property
    def rows(self) -> int:
        """Number of rows, possibly 0."""
        return self.end - self.start


def is_prime(number: int) -> bool:
    """Whether ``number`` (below 3.3e24) is a prime."""
    if number < 2:
        return False
    for witness in _WITNESSES:
        if number % witness == 0:
            return number == witness
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for witness in _WITNESSES:
        power = pow(witness, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


@dataclass(frozen=True)
class Table:
    """One Engram layer's table.

    ``column_bounds`` has one entry more than there are hash columns: column ``c`` owns
    the rows ``[column_bounds[c], column_bounds[c + 1])``.
    """

    layer: int
    total_rows: int
    column_bounds: tuple[int, ...]

    @property
    def columns(self) -> int:
        """Number of hash columns, which is the number of lookups per token."""
        return len(self.column_bounds) - 1


def engine_layout(columns: int, tp: int) -> Layout:
    """Return the layout SGLang 0.5.23 uses: columns when they divide evenly, else equal rows."""
    return Layout.COLUMNS if columns % tp == 0 else Layout.ROWS


def shard_range(
    total_rows: int, column_bounds: Sequence[int], rank: int, tp: int, layout: Layout
) -> RowRange:
    """Return the rows that ``rank`` of ``tp`` owns under ``layout``.

    Raises:
        UsageError: the rank is outside ``0..tp-1``, or the columns do not divide by ``tp``.

    """
    if tp < 1 or not 0 <= rank < tp:
        raise UsageError(f"rank {rank} of {tp} does not exist; ranks are 0 to {tp - 1}")
    if layout is Layout.ROWS:
        return RowRange(total_rows * rank // tp, total_rows * (rank + 1) // tp)
    columns = len(column_bounds) - 1
    if columns % tp:
        raise UsageError(
            f"layout 'columns' cannot split {columns} hash columns over {tp} ranks; use 'auto'"
        )
    share = columns // tp
    return RowRange(column_bounds[rank * share], column_bounds[(rank + 1) * share])


def tables_from_config(config: Mapping[str, object]) -> tuple[Table, ...]:
    """Return the Engram tables that a checkpoint's ``config.json`` describes.

    Raises:
        UsageError: a needed key is missing or of the wrong type, or the primes do not sum
            to ``engram_num_embeddings``.

    """
    text = config.get("text_config")
    values: dict[str, object] = {**text, **config} if isinstance(text, Mapping) else {**config}
    layers = _integers(values, "engram_layer_ids")
    sizes = _integers(values, "engram_num_embeddings")
    if not layers or len(layers) != len(sizes):
        raise UsageError(
            f"config.json: engram_layer_ids ({len(layers)}) and engram_num_embeddings "
            f"({len(sizes)}) must have the same, non-zero length: is this a model with Engram?"
        )
    orders = _integer(values, "engram_max_ngram_size") - 1
    heads = _integer(values, "engram_n_heads")
    vocab = _integer(values, "engram_vocab_size")
    dim = _integer(values, "engram_head_dim")
    if dim != WEIGHT_BYTES:
        raise UsageError(f"config.json: engram_head_dim is {dim}; only {WEIGHT_BYTES} is supported")
    if not (1 <= orders <= 16 and 1 <= heads <= 64 and 1 <= vocab < 2**40):
        raise UsageError("config.json: the engram_* sizes are out of range")
    tables = []
    every = column_bounds(vocab, len(layers), orders=orders, heads=heads)
    for layer, size, bounds in zip(layers, sizes, every, strict=True):
        if bounds[-1] != size:
            raise UsageError(
                f"config.json: layer {layer} has {size} Engram rows but its hash columns "
                f"sum to {bounds[-1]}"
            )
        tables.append(Table(layer, size, bounds))
    return tuple(tables)


def column_bounds(vocab: int, layers: int, *, orders: int, heads: int) -> list[tuple[int, ...]]:
    """Return the column bounds of each of ``layers`` tables: prefix sums of the column sizes.

    The column sizes are primes drawn in (layer, n-gram order, head) order; each order starts
    again above ``vocab - 1`` and skips the primes already used.
    """
    used: set[int] = set()
    return [
        (0, *accumulate(chain.from_iterable(_primes(vocab, heads, used) for _ in range(orders))))
        for _ in range(layers)
    ]


def page_count(rows: int) -> int:
    """Return number of 4 KiB row pages that hold ``rows`` rows."""
    return -(-rows // ROWS_PER_PAGE)


def file_bytes(rows: int) -> int:
    """Exact size in bytes of a packed file with ``rows`` rows: header page, then row pages."""
    return HEADER_BYTES + PAGE_BYTES * page_count(rows)


def file_name(layer: int, rank: int, tp: int) -> str:
    """Return the packed file's name, ``engram-l<layer>-r<rank>of<tp>.bin``."""
    return f"engram-l{layer}-r{rank}of{tp}.bin"


def receipt_name(layer: int, rank: int, tp: int) -> str:
    """Return the name of the receipt beside the packed file."""
    return file_name(layer, rank, tp) + ".receipt.json"


def _primes(vocab: int, heads: int, used: set[int]) -> list[int]:
    sizes: list[int] = []
    current = vocab - 1
    for _ in range(heads):
        current += 1
        while current in used or not is_prime(current):
            current += 1
        used.add(current)
        sizes.append(current)
    return sizes


def _integer(values: Mapping[str, object], key: str) -> int:
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"config.json: {key} is missing or not a number")
    return value


def _integers(values: Mapping[str, object], key: str) -> tuple[int, ...]:
    value = values.get(key)
    if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
        raise UsageError(f"config.json: {key} is missing or not a list of numbers")
    return tuple(value)
