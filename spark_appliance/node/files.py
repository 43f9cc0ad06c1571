"""Files that readers never see half of."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from spark_appliance.node.errors import NodeError


def write_atomic(
    path: Path, content: str, *, mode: int = 0o644, owner: tuple[int, int] | None = None
) -> None:
    """Replace a file in one step.

    The temporary file is created exclusively beside it, so a link planted in a folder of
    somebody else is replaced, never followed. ``owner`` is (uid, gid).

    Raises:
        NodeError: when it cannot be written.
    """
    name = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), mode)
            if owner is not None:
                os.fchown(file.fileno(), *owner)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except OSError as error:
        if name:
            with contextlib.suppress(OSError):
                Path(name).unlink()
        raise NodeError(f"cannot write {path}: {error.strerror}") from None


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Replace a JSON file in one step.

    Raises:
        NodeError: when it cannot be written.
    """
    write_atomic(path, json.dumps(data, sort_keys=True) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a JSON mapping, None when the file is not there or holds none."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def remove(path: Path) -> None:
    """Remove a file that may not be there.

    Raises:
        NodeError: when it is there and stays.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise NodeError(f"cannot remove {path}: {error.strerror}") from None


def read_line(path: Path | str) -> str | None:
    """Return the stripped content of a small file of sysfs, None when it cannot be read.

    Unused entries of sysfs tables (GID types) answer EINVAL.
    """
    try:
        # unbuffered: a table of GIDs has hundreds of these
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            return file.read(1 << 16).decode(errors="replace").strip()
    except OSError:
        return None
