"""The plan as bytes: written sorted and byte-stable, read back checked, compared as a diff.

Whole, as ``cluster.lock.json``, or as the own plan that lies on one node.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from spark_appliance.errors import InputError, Location, Problem
from spark_appliance.files import read_bounded, write_text
from spark_appliance.model.plan import Plan, read_plan
from spark_appliance.node import projection

LOCK_NAME = "cluster.lock.json"

SYSTEM_LOCK_NAME = "cluster.{system}.lock.json"
"""The plan as if all nodes ran one system (``render --system``)."""

MAX_BYTES = 16 << 20
"""Largest plan read, bytes; eight nodes need about 0.2 MB."""

write = write_text
"""Plans are written like every other file."""


def dump(plan: Plan) -> str:
    """Return the plan as text: keys sorted, two spaces, one newline at the end."""
    return _text(plan.model_dump(mode="json"))


def dump_own(plan: Plan, node: str) -> str:
    """Return a node's own plan as text.

    Raises:
        KeyError: when the plan has no such node.
    """
    return _text(projection.node_plan(plan.model_dump(mode="json"), node))


def sha256(plan: Plan) -> str:
    """Return the hash of a plan's content."""
    return projection.sha256(plan.model_dump(mode="json"))


def own_sha256(plan: Plan, node: str) -> str:
    """Return the hash of a node's own plan, as the node computes it of what lies there.

    Raises:
        KeyError: when the plan has no such node.
    """
    return projection.sha256(projection.node_plan(plan.model_dump(mode="json"), node))


def _text(data: Any) -> str:
    return json.dumps(data, sort_keys=True, indent=2, ensure_ascii=False) + "\n"


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
