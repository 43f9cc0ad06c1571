"""Write a checkpoint of a few bytes: safetensors files and their index."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

VALUES = 1024
"""32-bit floats of each tensor."""


def shard(path: Path, name: str) -> None:
    """Write one file with one tensor (the safetensors format: length, JSON header, data)."""
    header = {name: {"dtype": "F32", "shape": [VALUES], "data_offsets": [0, VALUES * 4]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(VALUES * 4))


def main() -> None:
    """Write the number of shards given second into the folder given first."""
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    weight_map = {}
    for number in range(1, count + 1):
        file = f"model-{number:05}-of-{count:05}.safetensors"
        weight_map[f"layers.{number}.weight"] = file
        shard(folder / file, f"layers.{number}.weight")
    index = {"metadata": {"total_size": VALUES * 4 * count}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps({"model_type": "stand-in"}))


if __name__ == "__main__":
    main()
