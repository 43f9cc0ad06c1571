"""The plan as bytes: written sorted and byte-stable, read back checked, compared as a diff."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

from spark_appliance.errors import InputError, Location, Problem
from spark_appliance.files import read_bounded, write_text
from spark_appliance.model.plan import Plan, read_plan

LOCK_NAME = "cluster.lock.json"

SYSTEM_LOCK_NAME = "cluster.{system}.lock.json"
"""The plan as if all nodes ran one system (``render --system``)."""

MAX_BYTES = 16 << 20
"""Largest plan read, bytes; eight nodes need about 0.2 MB."""

write = write_text
"""Plans are written like every other file."""


def dump(plan: Plan) -> str:
    """Return the plan as text: keys sorted, two spaces, one newline at the end."""
    return (
        json.dumps(plan.model_dump(mode="json"), sort_keys=True, indent=2, ensure_ascii=False)
        + "\n"
    )


def load(path: Path) -> Plan:
    """Read a plan.

    Raises:
        InputError: when the file cannot be read or is no plan of this version.
    """
    try:
        data = json.loads(read_bounded(path, MAX_BYTES))
    except InputError as error:
        if path.exists():
            raise
        raise InputError.one(
            "file.unreadable",
            f"there is no plan {path}",
            "render it first: spark-appliance render cluster.yaml",
        ) from error
    except (ValueError, RecursionError) as error:
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
