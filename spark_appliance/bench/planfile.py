"""The few things that a measurement takes from the plan (cluster.lock.json).

This is the only place in ``bench`` that knows how a plan looks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from spark_appliance import lockfile


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """What a measurement needs of a plan.

    ``sha256`` is of the file's bytes; ``nodes`` are (name, SSH destination) in rank order;
    ``hf_id`` is the checkpoint's repository.
    """

    sha256: str
    nodes: tuple[tuple[str, str], ...]
    api_url: str
    api_key_file: Path | None
    served_model_name: str
    hf_id: str


def read(path: Path) -> PlanFacts:
    """Read a plan. Raises InputError for a file that is not one."""
    plan = lockfile.load(path)
    return PlanFacts(
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        nodes=tuple((node.name, node.ssh) for node in plan.nodes),
        api_url=plan.api.url,
        api_key_file=Path(plan.api.key_file) if plan.api.key_file else None,
        served_model_name=plan.model.served_name,
        hf_id=plan.model.id,
    )
