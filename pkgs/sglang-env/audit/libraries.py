"""`libraries.json`: where native libraries come from, as typed values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from audit.errors import AuditError

OWN = "own"
"""In `opens`: the library lies in the same wheel."""


@dataclass(frozen=True)
class Provider:
    """Something outside the wheels that has libraries: the driver or a system package."""

    name: str
    libraries: frozenset[str]
    everywhere: bool


@dataclass(frozen=True)
class Libraries:
    """The table. Every mapping is keyed by the normal name of a locked package.

    `links`: who may satisfy a DT_NEEDED (providers or other wheels). `opens`: names opened at run
    time, by who has them. `absent`: names that stay unresolved, with the reason. `foreign`: ELF
    machines other than the target's, with the reason. `stray`: files dropped on installation.
    """

    machine: str
    interpreter: str
    providers: Mapping[str, Provider]
    directories: Mapping[str, str]
    links: Mapping[str, tuple[str, ...]]
    opens: Mapping[str, Mapping[str, tuple[str, ...]]]
    absent: Mapping[str, Mapping[str, str]]
    foreign: Mapping[str, Mapping[str, str]]
    stray: Mapping[str, tuple[str, ...]]
    cuda_home: tuple[str, ...]

    @property
    def everywhere(self) -> frozenset[str]:
        """Libraries that every wheel may need without saying so."""
        return frozenset().union(
            *(one.libraries for one in self.providers.values() if one.everywhere)
        )


def load(path: Path) -> Libraries:
    """Read the table.

    Raises:
        AuditError: it is missing, no JSON, or a field is missing or of the wrong type.
    """
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError) as error:
        raise AuditError(f"{path}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise AuditError(f"{path}: missing or wrong field: {error}") from error


def parse(data: Mapping[str, Any]) -> Libraries:
    """Turn the parsed JSON into typed values."""
    return Libraries(
        machine=data["target"]["machine"],
        interpreter=data["target"]["interpreter"],
        providers={
            name: Provider(name, frozenset(one["libraries"]), bool(one.get("everywhere", False)))
            for name, one in data["providers"].items()
        },
        directories=dict(data["directories"]),
        links=_lists(data["links"]),
        opens={name: _lists(one) for name, one in data["opens"].items()},
        absent={name: dict(one) for name, one in data["absent"].items()},
        foreign={name: dict(one) for name, one in data["foreign"].items()},
        stray=_lists(data["stray"]),
        cuda_home=tuple(data["cuda_home"]),
    )


def _lists(table: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(value) for name, value in table.items()}
