"""A checkpoint folder: its configuration, revision and Engram tensors."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from spark_engram import layout as geometry
from spark_engram.errors import SourceError, UsageError
from spark_engram.layout import Table
from spark_engram.safetensors import TensorPlace, read_places

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")
#: Name of an Engram tensor in the published checkpoint, and as SGLang renames it.
TENSOR_NAME = re.compile(r"(?:model\.)?layers\.(\d+)\.engram\.embed\.(weight|scale)")


def tensor_name(layer: int, part: str) -> str:
    """Return the published name of a table's ``weight`` or ``scale``."""
    return f"layers.{layer}.engram.embed.{part}"


@dataclass(frozen=True)
class Source:
    """One table's bytes: weights F8_E4M3 [rows, 256] and scales F8_E8M0 [rows, 8]."""

    table: Table
    weight: TensorPlace
    scale: TensorPlace


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint folder says about its Engram tables."""

    folder: Path
    config_sha256: str
    tables: tuple[Table, ...]

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read ``config.json`` in ``folder``.

        Raises:
            UsageError: there is no readable ``config.json``, or no Engram in it.

        """
        path = folder / CONFIG_FILE
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise UsageError(
                f"{path}: {error.strerror}; --checkpoint must be the folder with config.json"
            ) from error
        try:
            config = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}: not valid JSON: {error}") from None
        if not isinstance(config, dict):
            raise UsageError(f"{path}: not a JSON object")
        return cls(folder, hashlib.sha256(raw).hexdigest(), geometry.tables_from_config(config))

    def table(self, layer: int) -> Table:
        """Return the table of ``layer``.

        Raises:
            UsageError: that layer has no Engram.

        """
        for table in self.tables:
            if table.layer == layer:
                return table
        layers = ", ".join(str(table.layer) for table in self.tables)
        raise UsageError(f"layer {layer} has no Engram table; this model has layers {layers}")

    def source(self, table: Table) -> Source:
        """Where the bytes of ``table`` are.

        Raises:
            SourceError: a shard is missing or truncated, or a tensor has another type or shape.

        """
        shapes = {
            "weight": ("F8_E4M3", (table.total_rows, geometry.WEIGHT_BYTES)),
            "scale": ("F8_E8M0", (table.total_rows, geometry.SCALE_BYTES)),
        }
        places = {}
        for part, (dtype, shape) in shapes.items():
            name = tensor_name(table.layer, part)
            place = read_places(self._shard(name)).get(name)
            if place is None:
                raise SourceError(f"{self._shard(name)}: no tensor {name!r}, though the index says")
            if (place.dtype, place.shape) != (dtype, shape):
                raise SourceError(
                    f"{place.path}: {name} is {place.dtype} {list(place.shape)}, "
                    f"config.json asks for {dtype} {list(shape)}"
                )
            places[part] = place
        return Source(table, places["weight"], places["scale"])

    def _shard(self, name: str) -> Path:
        index = self.folder / INDEX_FILE
        try:
            shards = json.loads(index.read_bytes())["weight_map"]
            return self.folder / str(shards[name])
        except FileNotFoundError:
            single = self.folder / "model.safetensors"
            if single.exists():
                return single
            raise SourceError(
                f"{index}: missing; download the whole checkpoint, or fix the mount"
            ) from None
        except OSError as error:
            raise SourceError(f"{index}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError):
            raise SourceError(f"{index}: does not say where {name} is") from None


def detect_revision(folder: Path) -> str:
    """Return the revision a Hugging Face download left behind, or an empty string.

    Known from the folder's name in a hub cache (``snapshots/<commit>``) or from the metadata
    of a download into a plain folder (``.cache/huggingface/download/config.json.metadata``,
    whose first line is the commit).
    """
    resolved = folder.resolve()
    if resolved.parent.name == "snapshots" and _COMMIT.fullmatch(resolved.name):
        return resolved.name
    metadata = folder / ".cache" / "huggingface" / "download" / f"{CONFIG_FILE}.metadata"
    try:
        first = metadata.read_text(encoding="ascii").split("\n", 1)[0].strip()
    except (OSError, ValueError):
        return ""
    return first if _COMMIT.fullmatch(first) else ""
