"""The plan as bytes: written sorted and byte-stable, read back checked, compared as a diff."""

from __future__ import annotations

import difflib
import json
import os
import tempfile
from pathlib import Path

from spark_appliance.errors import InputError, Location, Problem, read_failure
from spark_appliance.model.plan import Plan, read_plan

LOCK_NAME = "cluster.lock.json"


def dump(plan: Plan) -> str:
    """Return the plan as text: keys sorted, two spaces, one newline at the end."""
    return (
        json.dumps(plan.model_dump(mode="json"), sort_keys=True, indent=2, ensure_ascii=False)
        + "\n"
    )


def write(path: Path, text: str) -> None:
    """Replace a file in one step, so that a reader or a crash never sees half of it.

    Raises:
        OSError: when the folder cannot be written.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load(path: Path) -> Plan:
    """Read a plan.

    Raises:
        InputError: when the file cannot be read or is no plan of this version.
    """
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text)
    except OSError as error:
        raise read_failure(path, error) from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        line, column = (
            (error.lineno, error.colno) if isinstance(error, json.JSONDecodeError) else (1, 1)
        )
        raise InputError.one(
            "plan.not-json",
            "the file is no JSON",
            "render it anew: spark-appliance render cluster.yaml",
            Location(str(path), line, column),
        ) from None
    plan, findings = read_plan(data)
    if plan is None:
        where = Location(str(path))
        raise InputError(
            [Problem(f.rule, f.message, f.remedy, where, f.severity) for f in findings]
        )
    return plan


def difference(path: Path, old: str, new: str) -> str:
    """Return a unified diff from the file's text to the new one; empty when they are equal."""
    return "".join(
        difflib.unified_diff(
            old.splitlines(keepends=True),
            new.splitlines(keepends=True),
            fromfile=str(path),
            tofile="rendered now",
        )
    )
