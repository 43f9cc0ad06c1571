"""The flags and variables that the pinned engine knows, so that a mistake is found before a start.

argparse takes any unambiguous prefix of a flag, so a misspelt or shortened one can pass the engine
and override another; here only whole names count, with values of the right kind. Both lists are the
engine's own: the test marked ``engine`` compares them with sglang 0.5.23.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal, cast

FLAGS: Any = resources.files(__package__) / "flags.txt"
VARIABLES: Any = resources.files(__package__) / "variables.txt"

Kind = Literal["switch", "text", "int", "float", "many"]


@dataclass(frozen=True, slots=True)
class Flag:
    """What a flag takes: nothing (``switch``), one value, or ``many``; ``choices`` when limited."""

    kind: Kind
    choices: tuple[str, ...]

    def complaint(self, value: object) -> str | None:
        """Return what is wrong with a value, None when the engine will take it.

        False stands for "leave the flag out" and is right for every flag.
        """
        if value is False:
            return None
        if self.kind == "switch":
            return None if value is True else "takes no value: give true or false"
        if value is True:
            return "needs a value"
        if self.kind == "int" and not isinstance(value, int):
            return "takes a whole number"
        if self.kind == "float" and not isinstance(value, int | float):
            return "takes a number"
        words = str(value).split() if self.kind == "many" else [str(value)]
        if any(word.startswith("-") and not _is_number(word) for word in words):
            return "a value may not start with '-': it would be read as another flag"
        wrong = [word for word in words if self.choices and word not in self.choices]
        return f"takes one of {', '.join(self.choices)}" if wrong else None


@functools.cache
def known_flags() -> Mapping[str, Flag]:
    """Return all flags of sglang 0.5.23, without dashes."""
    table = {}
    for line in FLAGS.read_text(encoding="utf-8").splitlines():
        name, kind, *choices = line.split(" ", 2)
        table[name] = Flag(cast(Kind, kind), tuple(choices[0].split("|")) if choices else ())
    return table


@functools.cache
def known_variables() -> frozenset[str]:
    """Return all ``SGLANG_*`` variables that sglang 0.5.23 reads."""
    return frozenset(VARIABLES.read_text(encoding="utf-8").split())


def closest(name: str, known: Mapping[str, object] | frozenset[str]) -> str | None:
    """Return the known name that ``name`` probably means."""
    longer = sorted(other for other in known if other.startswith(name))
    if longer:
        return longer[0]
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return close[0] if close else None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
