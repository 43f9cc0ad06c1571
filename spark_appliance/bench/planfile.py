"""The few things that a measurement takes from the plan (cluster.lock.json).

This is the only place in ``bench`` that knows how a plan looks.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_appliance.errors import InputError, Location, read_failure


@dataclass(frozen=True, slots=True)
class PlanNode:
    """A node's name and how ssh reaches it."""

    name: str
    ssh: str


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """The plan's digest (sha256 of the file's bytes) and what a measurement needs of it."""

    sha256: str
    nodes: tuple[PlanNode, ...] = ()
    api_port: int | None = None
    served_model_name: str | None = None
    api_key_file: Path | None = None
    image_digest: str | None = None


def read(path: Path) -> PlanFacts:
    """Read a plan. Raises InputError for a file that is not one.

    Keys: ``nodes[].name``, ``nodes[].ssh``, ``api.port``, ``api.key_file``,
    ``served_model_name``, ``image.digest``; all but ``nodes`` may be absent.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise read_failure(path, error) from None
    try:
        data = json.loads(raw)
        return _facts(hashlib.sha256(raw).hexdigest(), data)
    except json.JSONDecodeError as error:
        raise InputError.one(
            "bench.plan",
            f"not JSON: {error.msg}",
            "give the cluster.lock.json that `spark-appliance render` wrote",
            Location(str(path), error.lineno, error.colno),
        ) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError.one(
            "bench.plan",
            f"not a plan: {type(error).__name__}: {error}",
            "give the cluster.lock.json that `spark-appliance render` wrote",
            Location(str(path)),
        ) from None


def _facts(sha256: str, data: dict[str, Any]) -> PlanFacts:
    api = data.get("api") or {}
    image = data.get("image") or {}
    key_file = api.get("key_file")
    return PlanFacts(
        sha256=sha256,
        nodes=tuple(PlanNode(str(n["name"]), str(n["ssh"])) for n in data["nodes"]),
        api_port=int(api["port"]) if "port" in api else None,
        served_model_name=data.get("served_model_name"),
        api_key_file=Path(key_file) if key_file else None,
        image_digest=image.get("digest") if isinstance(image, dict) else None,
    )
