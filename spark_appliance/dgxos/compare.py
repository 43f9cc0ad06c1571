"""Units as both adapters mean them, as plain data, so that a test can hold them together.

A unit file is read back into sections; the plan's unit data gives the same shape. The NixOS
test calls ``expected_units`` with the placeholders of its own system.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from spark_appliance.dgxos.files import NodeFile
from spark_appliance.model.plan import NodePlan, UnitPlan

Unit = dict[str, Any]


def expected_units(node: NodePlan, placeholders: Mapping[str, str]) -> dict[str, Unit]:
    """Return what the plan says about each service and target of a node, by name."""
    return {
        unit.name: _of_plan(unit, placeholders)
        for unit in node.units
        if unit.type not in ("mount", "system")
    }


def written_units(files: list[NodeFile]) -> dict[str, Unit]:
    """Return the services and targets of the plan among written files, in the same shape."""
    prefix = "/etc/systemd/system/"
    result = {}
    for file in files:
        name = file.path.removeprefix(prefix)
        ours = file.kind == "file" and "/" not in name and name.startswith("spark")
        if ours and file.path.startswith(prefix) and name.endswith((".service", ".target")):
            result[name] = parse_unit(file.text)
    return result


def parse_unit(text: str) -> Unit:
    """Read a unit file: lists of units as sorted lists, commands as words, settings as lists."""
    unit: Unit = {"lists": {}, "commands": {}, "settings": {}}
    section = ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            if section != "Service" and key in _LISTS:
                unit["lists"][key] = sorted({*unit["lists"].get(key, []), *value.split()})
            elif key.startswith("Exec"):
                unit["commands"].setdefault(key, []).append(split_words(value))
            else:
                unit["settings"].setdefault(key, []).append(value)
    return unit


def split_words(line: str) -> list[str]:
    """Return the words of an Exec line as the program gets them."""
    return [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line)]


_LISTS = ("After", "Requires", "Wants", "PartOf", "Conflicts", "WantedBy")


def _of_plan(unit: UnitPlan, placeholders: Mapping[str, str]) -> Unit:
    def words(argv: list[str]) -> list[str]:
        first = argv[0].lstrip("+-")
        prefix = argv[0][: len(argv[0]) - len(first)]
        return [
            prefix + placeholders.get(first, first),
            *(placeholders.get(word, word) for word in argv[1:]),
        ]

    lists = {
        "After": unit.after,
        "Requires": unit.requires,
        "Wants": unit.wants,
        "PartOf": unit.part_of,
        "Conflicts": unit.conflicts,
        "WantedBy": unit.wanted_by,
    }
    commands = {
        "ExecStartPre": unit.exec_start_pre,
        "ExecStart": [unit.exec_start] if unit.exec_start else [],
        "ExecStopPost": unit.exec_stop_post,
    }
    settings: dict[str, str | list[str]] = {
        "Description": unit.description,
        **unit.unit_settings,
        **unit.settings,
    }
    if unit.type != "target":
        settings["Type"] = unit.type
    return {
        "lists": {key: sorted(set(names)) for key, names in lists.items() if names},
        "commands": {key: [words(a) for a in argvs] for key, argvs in commands.items() if argvs},
        "settings": {
            key: value if isinstance(value, list) else [value] for key, value in settings.items()
        },
    }
