"""Safetensors headers, read without the safetensors package and without torch.

A file is: u64 little-endian header length, that many bytes of JSON, then the tensors' bytes.
Source: the safetensors format description (length limit 100 MB, ``data_offsets`` relative to
the end of the header, no holes between tensors).
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from spark_engram.errors import SourceError

HEADER_LIMIT = 100_000_000
_DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2,
    "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class TensorPlace:
    """Where one tensor's bytes are: ``[offset, offset + size)`` of the file at ``path``."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


def read_places(path: Path) -> dict[str, TensorPlace]:
    """Return the places of all tensors in the safetensors file at ``path``.

    Raises:
        SourceError: the file cannot be read, is truncated, or its header is not valid.

    """
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            prefix = stream.read(8)
            (length,) = struct.unpack("<Q", prefix) if len(prefix) == 8 else (-1,)
            if not 2 <= length <= min(HEADER_LIMIT, size - 8):
                raise SourceError(f"{path}: not a safetensors file, or truncated")
            header = stream.read(length)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    return parse_header(path, header, size)


def parse_header(path: Path, header: bytes, file_size: int) -> dict[str, TensorPlace]:
    """Parse the JSON header of a file of ``file_size`` bytes.

    Raises:
        SourceError: an entry is malformed or lies outside the file.

    """
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError):
        raise SourceError(f"{path}: the safetensors header is not valid JSON") from None
    if not isinstance(entries, dict):
        raise SourceError(f"{path}: the safetensors header is not an object")
    start = 8 + len(header)
    places = {}
    for name, entry in entries.items():
        if name != "__metadata__":
            places[name] = _place(path, name, entry, start, file_size)
    return places


def _place(path: Path, name: str, entry: object, start: int, file_size: int) -> TensorPlace:
    values: dict[str, object] = entry if isinstance(entry, dict) else {}
    dtype, shape, span = values.get("dtype"), values.get("shape"), values.get("data_offsets")
    if (
        not isinstance(dtype, str)
        or not _is_sizes(shape)
        or not _is_sizes(span)
        or len(span) != 2
        or span[1] < span[0]
    ):
        raise SourceError(f"{path}: tensor {name!r} has a malformed header entry")
    size = span[1] - span[0]
    if start + span[1] > file_size:
        raise SourceError(
            f"{path}: tensor {name!r} ends at byte {start + span[1]} of a file of {file_size} "
            "bytes: truncated shard"
        )
    width = _DTYPE_BYTES.get(dtype)
    if width is not None and math.prod(shape) * width != size:
        raise SourceError(f"{path}: tensor {name!r}: {size} bytes do not hold {dtype} {shape}")
    return TensorPlace(path, name, dtype, tuple(shape), start + span[0], size)


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )
