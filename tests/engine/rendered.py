"""Everything this project renders for an engine, found by looking and not by listing.

A new example or profile is judged from the moment its file exists.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from judge import split_options

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@dataclass(frozen=True, slots=True)
class Rendered:
    """What one node will run. ``argv`` begins after ``python -m sglang.launch_server``."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def published_command() -> dict[str, Any]:
    """Return the published four-Spark command: ``argv`` and, by hand, the ``values`` it means."""
    document: dict[str, Any] = json.loads((HERE / "published_command.json").read_text("utf-8"))
    return document


def split_stated(argv: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the (flag, value) pairs that an argv states, without knowing the engine's types.

    A flag with no value states True, or False for ``--no-...``; with one, that text; with
    several, their list.
    """
    stated: list[tuple[str, Any]] = []
    for flag, values in split_options(argv):
        name, equals, value = flag.partition("=")
        values = [value, *values] if equals else values
        match values:
            case []:
                stated.append((name, not name.startswith("--no-")))
            case [single]:
                stated.append((name, single))
            case several:
                stated.append((name, several))
    return stated


def same_value(stated: Any, parsed: Any) -> bool:
    """Tell whether the engine understood a stated value as it reads.

    Text and numbers compare by what they mean: "600" is 600.0, "0.78" is 0.78, and no text that
    is not a number equals one.
    """
    if isinstance(stated, list):
        return (
            isinstance(parsed, list)
            and len(stated) == len(parsed)
            and all(map(same_value, stated, parsed))
        )
    if isinstance(stated, bool) or isinstance(parsed, bool):
        return stated is parsed
    if isinstance(parsed, int | float):
        try:
            return float(stated) == float(parsed)
        except ValueError:
            return False
    return bool(stated == parsed)


def renderer_exists() -> bool:
    """Tell whether this checkout can render a plan."""
    return importlib.util.find_spec("spark_appliance.render") is not None


def rendered() -> dict[str, Rendered]:
    """Return "example/profile/node" -> what runs there, for all examples and bundled profiles."""
    if not renderer_exists():
        return {"published": Rendered(argv=tuple(published_command()["argv"]))}
    raise NotImplementedError


def rendered_argvs() -> dict[str, list[str]]:
    """Return the argv of every node of every example with every profile that fits it."""
    return {name: list(node.argv) for name, node in rendered().items()}
