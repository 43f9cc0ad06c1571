"""The receipt beside a packed file: what it is, where it came from, its checksums."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from spark_engram.checkpoint import Source
from spark_engram.directio import sync_folder
from spark_engram.errors import MismatchError
from spark_engram.format import VERSION, Identity
from spark_engram.safetensors import TensorPlace

KIND = "spark-engram-receipt"


@dataclass(frozen=True)
class Receipt:
    """A parsed receipt; ``segments`` are the CRC-32C of each segment's page checksums."""

    values: dict[str, object]
    segments: tuple[int, ...]


def path_for(packed: Path) -> Path:
    """Where the receipt of ``packed`` is."""
    return packed.with_name(packed.name + ".receipt.json")


def write(packed: Path, identity: Identity, source: Source | None, segments: Sequence[int]) -> None:
    """Write the receipt of ``packed`` atomically and durably.

    Raises:
        OSError: it could not be written.

    """
    target = path_for(packed)
    temporary = target.with_name(target.name + ".tmp")
    text = json.dumps(_values(identity, source, segments), indent=1) + "\n"
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.rename(target)
    sync_folder(target.parent)


def read(packed: Path, identity: Identity) -> Receipt | None:
    """Return the receipt of ``packed``, or None if there is none.

    Raises:
        MismatchError: it is malformed or belongs to another file.

    """
    path = path_for(packed)
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise MismatchError(f"{path}: unreadable receipt: {error}; remove it and pack again") from (
            error
        )
    if not isinstance(values, dict):
        raise MismatchError(f"{path}: not a receipt; remove it and pack again")
    wanted = _identity_values(identity)
    for key, value in wanted.items():
        if values.get(key) != value:
            raise MismatchError(
                f"{path}: {key} is {values.get(key)!r} but the packed file has {value!r}: "
                "receipt of another file; remove it and pack again"
            )
    segments = values.get("segments")
    if not isinstance(segments, list) or len(segments) != identity.segments:
        raise MismatchError(f"{path}: wrong number of segments; remove it and pack again")
    try:
        checksums = tuple(int(text, 16) for text in segments)
    except (TypeError, ValueError):
        raise MismatchError(f"{path}: malformed segment checksum") from None
    return Receipt(values, checksums)


def _identity_values(identity: Identity) -> dict[str, object]:
    values = asdict(identity)
    values["layout"] = identity.layout.label
    values["column_bounds"] = list(identity.column_bounds)
    return {
        "format": KIND,
        "version": VERSION,
        "file": identity.file_name,
        "file_bytes": identity.file_bytes,
        "file_id": f"{identity.file_id:08x}",
        **values,
    }


def _values(
    identity: Identity, source: Source | None, segments: Sequence[int]
) -> dict[str, object]:
    places = {"weight": source.weight, "scale": source.scale} if source is not None else {}
    return {
        **_identity_values(identity),
        "packer": f"spark-engram {_version()}",
        "source": {part: _place(place) for part, place in places.items()},
        "segments": [f"{checksum:08x}" for checksum in segments],
    }


def _place(place: TensorPlace) -> dict[str, object]:
    return {"shard": place.path.name, "tensor": place.name, "offset": place.offset}


def _version() -> str:
    try:
        return version("spark-engram")
    except PackageNotFoundError:
        return "(not installed)"
