"""Make ``modules/units.json`` and ``modules/engine.json``: what Nix users without a plan get.

``python tests/nix/unit_template.py`` writes them; a test compares them with what is committed.
Words in angle brackets are filled in by the modules.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from spark_appliance.model.plan import EngramPlan, ExportPlan, MountPlan, UnitPlan, WeightsPlan
from spark_appliance.names import FABRIC, PACK
from spark_appliance.render.plan import PROBE_TIMEOUT, READY_TIMEOUT, RESTART, health_plan
from spark_appliance.render.units import Rank, units

MODULES = Path(__file__).resolve().parents[2] / "modules"
UNITS = MODULES / "units.json"
ENGINE = MODULES / "engine.json"


class Open(int):
    """A number that is written out as a word; 0 where the table decides by it."""

    word: str

    def __new__(cls, word: str) -> Open:
        made = super().__new__(cls, 0)
        made.word = word
        return made

    def __str__(self) -> str:
        return self.word

    def __format__(self, spec: str) -> str:
        return format(self.word, spec)


def head() -> Rank:
    """Return a head that has every part, with the node's words left open."""
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
    return Rank(
        name="<NODE>",
        rank=Open("<RANK>"),
        tp=Open("<TP>"),
        system="nixos",
        cables=True,
        checkpoint="<CHECKPOINT>",
        key_file="<KEY-FILE>",
        ready_timeout=READY_TIMEOUT,
        probe_timeout=PROBE_TIMEOUT,
        weights=WeightsPlan(mode="nfs", export=export, mount=mount),
        engram=engram,
        cache_directory="<CACHE>",
        router=True,
    )


def template() -> list[dict[str, Any]]:
    """Return the units of such a head.

    Each command before a start says which units it ``needs``: found by leaving them out.
    """
    rank = head()
    without = {FABRIC: replace(rank, cables=False), PACK: replace(rank, engram=None)}
    commands = {name: _before(units(poorer)) for name, poorer in without.items()}
    result = []
    for unit in units(rank):
        data = unit.model_dump(mode="json")
        data["exec_start_pre"] = [
            {
                "command": command,
                "needs": [
                    name
                    for name in without
                    if name != unit.name and command not in commands[name].get(unit.name, [])
                ],
            }
            for command in unit.exec_start_pre
        ]
        result.append(data)
    return result


def engine() -> dict[str, Any]:
    """Return what a plan says of every engine's health and restarts."""
    return {
        "health": health_plan("<BASE>", "<SERVED-NAME>").model_dump(mode="json"),
        "restart": RESTART.model_dump(mode="json"),
    }


def files() -> dict[Path, str]:
    """Return the content of each file."""
    return {path: _text(data) for path, data in ((UNITS, template()), (ENGINE, engine()))}


def _before(table: list[UnitPlan]) -> dict[str, list[list[str]]]:
    return {unit.name: unit.exec_start_pre for unit in table}


def _text(data: Any) -> str:
    return json.dumps(data, indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
