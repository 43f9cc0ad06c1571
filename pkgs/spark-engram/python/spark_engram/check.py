"""What must be true before the engine starts with packed tables.

SGLang logs a plugin's exception and goes on without it, so a start that must not happen is
stopped here (an ``ExecStartPre`` of the engine's unit) and once more in the plugin itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path

from spark_engram import format as packed
from spark_engram import layout as geometry
from spark_engram import native, receipt
from spark_engram.checkpoint import Checkpoint
from spark_engram.errors import EngramError, MismatchError, UsageError
from spark_engram.format import Identity
from spark_engram.layout import Table
from spark_engram.store import RowStore, StoreOptions

GROUP = "sglang.srt.plugins"
NAME = "spark_engram"
FOLDER_VARIABLE = "SPARK_ENGRAM_DIR"
REVISION_VARIABLE = "SPARK_ENGRAM_REVISION"


def find(folder: Path, table: Table, tp: int, rank: int) -> tuple[Path, Identity]:
    """Return the packed file of ``table`` for a rank, and what its header says.

    Raises:
        MismatchError: it is missing, unfinished or damaged.

    """
    path = folder / geometry.file_name(table.layer, rank, tp)
    if not path.exists():
        unfinished = path.with_name(path.name + ".partial")
        if unfinished.exists():
            raise MismatchError(f"{path}: packing is unfinished; run `spark-engram pack` again")
        others = sorted(other.name for other in folder.glob("engram-l*-r*of*.bin"))
        held = f"the folder holds {', '.join(others)}" if others else "the folder holds none"
        raise MismatchError(
            f"{path}: missing; {held}. Pack it: spark-engram pack --tp {tp} --rank {rank} "
            f"--output {folder} --checkpoint MODEL"
        )
    return path, packed.read_identity(path)


def matching(
    folder: Path,
    table: Table,
    *,
    tp: int,
    rank: int,
    revision: str | None,
    config_sha256: str | None,
) -> Path:
    """Return the packed file that SGLang 0.5.23 needs; None means whatever the file says.

    Raises:
        MismatchError: it is missing, or differs; the message names both sides.

    """
    path, identity = find(folder, table, tp, rank)
    wanted = Identity.of(
        table,
        tp=tp,
        rank=rank,
        layout=geometry.engine_layout(table.columns, tp),
        revision=identity.revision if revision is None else revision,
        config_sha256=identity.config_sha256 if config_sha256 is None else config_sha256,
        segment_pages=identity.segment_pages,
    )
    packed.require(identity, wanted, str(path))
    if receipt.read(path, identity) is None:
        raise MismatchError(
            f"{receipt.path_for(path)}: missing: packing was not finished; run "
            "`spark-engram pack` again"
        )
    return path


def entry_point_problem(environment: Mapping[str, str]) -> str:
    """Why SGLang in this Python would not load the plugin, or empty."""
    if not [entry for entry in entry_points(group=GROUP) if entry.name == NAME]:
        return (
            f"the entry point {NAME} of group {GROUP} is not installed in this Python; "
            "pip install spark-engram beside sglang"
        )
    allowed = environment.get("SGLANG_PLUGINS", "")
    if allowed and NAME not in [name.strip() for name in allowed.split(",")]:
        return f"SGLANG_PLUGINS={allowed} leaves {NAME} out; add it"
    return ""


def engine_side(
    tp: int | None,
    rank: int | None,
    checkpoint: Path | None,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, object]:
    """Check the plugin, the variables and, given ``tp`` and ``rank``, the packed files.

    Raises:
        UsageError: the plugin would not be loaded, or a variable is wrong.
        MismatchError: a packed file is missing or does not fit.

    """
    problem = entry_point_problem(environment)
    if problem:
        raise UsageError(problem)
    folder = environment.get(FOLDER_VARIABLE, "")
    if not folder:
        raise UsageError(
            f"{FOLDER_VARIABLE} is not set: the engine would hold the tables in memory"
        )
    if not Path(folder).is_dir():
        raise UsageError(f"{FOLDER_VARIABLE}={folder}: no such folder")
    options = StoreOptions.from_environment(environment)
    facts: dict[str, object] = {
        "plugin": "installed",
        "folder": folder,
        "backends": list(native.backends()),
        "files": [],
    }
    if tp is None or rank is None:
        return facts
    if checkpoint is None:
        raise UsageError("--checkpoint is needed to know which files tp and rank must have")
    model = Checkpoint.read(checkpoint)
    files = []
    for table in model.tables:
        path = matching(
            Path(folder),
            table,
            tp=tp,
            rank=rank,
            revision=environment.get(REVISION_VARIABLE) or None,
            config_sha256=model.config_sha256,
        )
        with RowStore(path, options) as store:
            files.append(
                {"file": str(path), "backend": store.backend, "note": store.note, "ok": True}
            )
            if store.identity.rows.rows:
                _probe(store)
    facts["files"] = files
    return facts


def _probe(store: RowStore) -> None:
    import numpy as np

    owned = store.identity.rows
    store.gather(np.array([owned.start, owned.end - 1], np.int64))


def text(facts: Mapping[str, object]) -> str:
    """Return the facts for a person."""
    files = facts["files"]
    if not isinstance(files, list):
        raise EngramError("no files in the facts")
    lines = [f"plugin {facts['plugin']}, packed tables in {facts['folder']}"]
    lines += [f"{item['file']}: fits, read with {item['backend']} {item['note']}" for item in files]
    return "\n".join(line.rstrip() for line in lines)
