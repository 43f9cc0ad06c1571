"""Read pyproject.toml and poetry.lock; write a lock in Poetry's layout."""

from __future__ import annotations

import hashlib
import json
import tomllib
from typing import TYPE_CHECKING, Any

import tomlkit

from relock.errors import RelockError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

HEADER = (
    "Locked by Poetry {version}, then pruned by `python -m relock` to one wheel a package."
    " Do not edit by hand."
)


def read(path: Path) -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        RelockError: it is missing or no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RelockError(f"{path}: no such file; run `python -m relock` to make it") from error
    except tomllib.TOMLDecodeError as error:
        raise RelockError(f"{path}: {error}") from error


def dump(lock: Mapping[str, Any], poetry_version: str) -> str:
    """Return the text of a lock; the same data always give the same bytes."""
    document = tomlkit.document()
    document.add(tomlkit.comment(HEADER.format(version=poetry_version)))
    packages = tomlkit.aot()
    for entry in lock["package"]:
        table = tomlkit.table()
        for key, value in entry.items():
            table.add(key, _value(key, value))
        packages.append(table)
    document.add("package", packages)
    document.add("metadata", tomlkit.item(dict(lock["metadata"])))
    return tomlkit.dumps(document)


def header_version(text: str) -> str:
    """Return the Poetry version named in the first line of a lock.

    Raises:
        RelockError: the line does not name one.
    """
    words = text.split("\n", 1)[0].replace(",", " ").split()
    if "Poetry" not in words[:-1]:
        raise RelockError("poetry.lock: the first line does not name the Poetry version")
    return words[words.index("Poetry") + 1]


def content_hash(pyproject: Mapping[str, Any]) -> str:
    """Return the `content-hash` that Poetry expects for a pyproject without `[project]`.

    Source: Poetry 2.5.1, `Locker._get_content_hash`: SHA-256 of the JSON of these keys of
    `[tool.poetry]`, an absent one as null except `group`. relock lets Poetry verify the result.
    """
    poetry = pyproject["tool"]["poetry"]
    content = {
        key: poetry.get(key) for key in ("dependencies", "source", "extras", "dev-dependencies")
    }
    if "group" in poetry:
        content["group"] = poetry["group"]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _value(key: str, value: Any) -> Any:
    if key == "files":
        return _lines(value)
    if key == "dependencies":
        table = tomlkit.table()
        for name, spec in value.items():
            table.add(name, _dependency(spec))
        return table
    return tomlkit.item(value)


def _dependency(spec: Any) -> Any:
    if isinstance(spec, dict):
        return _inline(spec)
    return _lines(spec) if isinstance(spec, list) else tomlkit.item(spec)


def _inline(fields: Mapping[str, Any]) -> Any:
    table = tomlkit.inline_table()
    table.update(fields)
    return table


def _lines(rows: list[Any]) -> Any:
    array = tomlkit.array().multiline(True)
    for row in rows:
        array.append(_dependency(row))
    return array
