"""Write a unit of the plan as a systemd unit file: placeholders filled in, words quoted."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from spark_appliance.errors import OperationError
from spark_appliance.model.plan import UnitPlan

_PLACEHOLDER = re.compile(r"^(?P<prefix>[+-]*)(?P<name>@[a-z-]+@)$")
_PLAIN = re.compile(r"^[A-Za-z0-9_@%+=:,./$-]+$")


def unit_text(unit: UnitPlan, paths: Mapping[str, str]) -> str:
    """Return the text of a service or target; ``paths`` maps placeholders to paths.

    Raises:
        OperationError: when a placeholder has no path, or the unit is a mount or belongs to the
            operating system.
    """
    if unit.type in ("mount", "system"):
        raise OperationError(f"{unit.name}: its text does not come from the table of units")
    lines = ["[Unit]", f"Description={_specifiers(unit.description)}"]
    for key, names in (
        ("After", unit.after),
        ("Requires", unit.requires),
        ("Wants", unit.wants),
        ("PartOf", unit.part_of),
        ("Conflicts", unit.conflicts),
    ):
        if names:
            lines.append(f"{key}={' '.join(names)}")
    lines += [f"{key}={value}" for key, value in unit.unit_settings.items()]
    if unit.type != "target":
        lines += ["", "[Service]", f"Type={unit.type}"]
        lines += [f"ExecStartPre={command_line(argv, paths)}" for argv in unit.exec_start_pre]
        lines.append(f"ExecStart={command_line(unit.exec_start, paths)}")
        lines += [f"ExecStopPost={command_line(argv, paths)}" for argv in unit.exec_stop_post]
        for key, value in unit.settings.items():
            lines += [f"{key}={item}" for item in ([value] if isinstance(value, str) else value)]
    if unit.wanted_by:
        lines += ["", "[Install]", f"WantedBy={' '.join(unit.wanted_by)}"]
    return "\n".join(lines) + "\n"


def command_line(argv: Sequence[str], paths: Mapping[str, str]) -> str:
    """Return an Exec line's value: every word arrives as it is, nothing is expanded by systemd.

    Raises:
        OperationError: when a placeholder has no path.
    """
    return " ".join(_word(word, paths) for word in argv)


def _word(word: str, paths: Mapping[str, str]) -> str:
    match = _PLACEHOLDER.match(word)
    prefix = ""
    if match:
        prefix, name = match["prefix"], match["name"]
        if name not in paths:
            raise OperationError(f"no path is known for {name}")
        word = paths[name]
    text = _specifiers(word).replace("$", "$$")
    if not _PLAIN.match(text):
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        text = f'"{escaped}"'
    return prefix + text


def _specifiers(text: str) -> str:
    return text.replace("%", "%%")
