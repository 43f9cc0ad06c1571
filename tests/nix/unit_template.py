"""Make ``modules/units.json``: the unit table for Nix users without a plan.

``python tests/nix/unit_template.py`` writes it; a test compares it with what is committed.
Words in angle brackets are filled in by ``modules/units.nix``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from spark_appliance.model.plan import EngramPlan, ExportPlan, MountPlan, WeightsPlan
from spark_appliance.render.environment import CACHE_DIRECTORY
from spark_appliance.render.plan import READY_TIMEOUT
from spark_appliance.render.units import Rank, units

PATH = Path(__file__).resolve().parents[2] / "modules" / "units.json"

PROBE_TIMEOUT = 120
"""As in ``spark_appliance.render.plan``."""


def template() -> list[dict[str, Any]]:
    """Return the units of a head that has every part, with the node's words left open."""
    export = ExportPlan(path="<CHECKPOINT>", clients=[], options=[], threads=1, rdma=False)
    mount = MountPlan(unit="<MOUNT>", what="", where="<CHECKPOINT>", type="nfs4", options=[])
    engram = EngramPlan(
        directory="<ENGRAM>",
        device="<DEVICE>",
        mount_unit="<ENGRAM-MOUNT>",
        files=[],
        bytes=0,
        cache_bytes=0,
        pack_argv=["spark-engram", "<PACK-WORDS>"],
    )
    rank = Rank(
        name="<NODE>",
        rank=0,
        tp=cast("int", "<TP>"),  # only ever written out as text
        system="nixos",
        cables=True,
        checkpoint="<CHECKPOINT>",
        key_file="<KEY-FILE>",
        ready_timeout=READY_TIMEOUT,
        probe_timeout=PROBE_TIMEOUT,
        weights=WeightsPlan(mode="nfs", export=export, mount=mount),
        engram=engram,
        cache_directory=CACHE_DIRECTORY,
        router=True,
    )
    return [unit.model_dump(mode="json") for unit in units(rank)]


def text() -> str:
    """Return the file's content."""
    return json.dumps(template(), indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
