"""Unit files as data, and command lines as the plan writes them."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict


def sections(text: str) -> dict[str, dict[str, list[str]]]:
    """Parse a unit file: section -> key -> values in order."""
    result: dict[str, dict[str, list[str]]] = {}
    section = ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
            result.setdefault(section, defaultdict(list))
        elif line.strip():
            key, _, value = line.partition("=")
            result[section][key].append(value)
    return result


def words(line: str) -> list[str]:
    """Return a command line's words with store paths put back to the plan's placeholders."""
    programs = {
        "spark-node": "@spark-node@",
        "python3": "@python@",
        "spark-engram": "@spark-engram@",
    }
    result = []
    for word in shlex.split(line):
        found = re.fullmatch(r"([-+]*)/nix/store/[^/]+/bin/([a-z0-9-]+)", word)
        result.append(f"{found[1]}{programs[found[2]]}" if found else word)
    if "router" in result:
        return ["@router-python@" if word == "@python@" else word for word in result]
    return result
