"""What several checks ask."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from spark_appliance.doctor.document import Document, Missing
from spark_appliance.doctor.registry import Facts
from spark_appliance.doctor.result import Verdict, ok
from spark_appliance.names import ENGINE

GIB = 1 << 30

CONTAINER = re.compile(r"\b(docker|podman)\b")
"""Tells a unit that starts a container from one that starts a program."""


def gib(size: float) -> str:
    """Return bytes as GiB."""
    return f"{size / GIB:.1f} GiB"


def engine_runs(document: Document) -> bool:
    """Say whether the engine's unit is up or coming up on the node."""
    state = document.section("services").at("units", ENGINE, "active").optional()
    return state in ("active", "activating", "reloading", "deactivating")


def installed(document: Document) -> bool:
    """Say whether the engine's unit is known to systemd on the node.

    Raises:
        Missing: when the units were not reported.
    """
    return document.section("services").at("units", ENGINE, "load").text() == "loaded"


def values(facts: Facts, *keys: str) -> dict[str, str]:
    """Return a text of every document that has it, by node; ``keys`` begin with the section."""
    found = {}
    for name, document in facts.documents().items():
        try:
            found[name] = document.section(keys[0]).at(*keys[1:]).text()
        except Missing:
            continue
    return found


def listed(by_node: Mapping[str, object]) -> str:
    """Return 'a: 1, b: 2'."""
    return ", ".join(f"{node}: {value}" for node, value in by_node.items())


def odd_ones(by_node: Mapping[str, str]) -> list[str]:
    """Return the nodes whose value is not the most common one."""
    if not by_node:
        return []
    common = Counter(by_node.values()).most_common(1)[0][0]
    return [node for node, value in by_node.items() if value != common]


def all_ok(verdicts: Iterable[Verdict], text: str) -> Iterator[Verdict]:
    """Pass verdicts on; without one, say that all is well."""
    any_came = False
    for verdict in verdicts:
        any_came = True
        yield verdict
    if not any_came:
        yield ok(text)
