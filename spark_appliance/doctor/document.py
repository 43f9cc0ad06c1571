"""A probe document, read without trusting it: what is absent or of another type is Missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from spark_appliance.doctor.probe.core import PROBE_VERSION

MAX_BYTES: Final = 32 << 20
"""Largest document that is read."""


class Missing(Exception):  # noqa: N818 - not a failure: the check is skipped and says why
    """A fact is not in the document; the text says which, and why where the probe told."""


class BadDocument(Exception):  # noqa: N818 - becomes the failure of the node, with its text
    """The text is no probe document of this version."""


@dataclass(frozen=True, slots=True)
class View:
    """A part of a document with the path that led to it."""

    data: Any
    path: str
    errors: Any = None

    def _step(self, key: str | int) -> Any:
        if isinstance(key, int):
            if isinstance(self.data, list) and 0 <= key < len(self.data):
                return self.data[key]
        elif isinstance(self.data, dict) and key in self.data:
            return self.data[key]
        return None

    def at(self, *keys: str | int) -> View:
        """Return the part under a path of keys; a part that is not there holds None."""
        view = self
        for key in keys:
            path = f"{view.path}.{key}" if view.path else str(key)
            view = View(view._step(key), path, view.errors)
        return view

    def _missing(self, what: str) -> Missing:
        reason = ""
        if isinstance(self.errors, dict):
            parts = self.path.split(".")
            texts = [self.errors.get(key) for key in (*parts, "*")]
            reason = next((f": {text}" for text in texts if isinstance(text, str)), "")
        return Missing(f"{self.path} {'was not reported' if self.data is None else what}{reason}")

    @property
    def present(self) -> bool:
        """Whether there is anything."""
        return self.data is not None

    def text(self) -> str:
        """Return a string.

        Raises:
            Missing: when there is none.
        """
        if isinstance(self.data, str):
            return self.data
        raise self._missing("is no text")

    def number(self) -> float:
        """Return a number that is finite.

        Raises:
            Missing: when there is none.
        """
        if isinstance(self.data, int | float) and not isinstance(self.data, bool):
            try:
                value = float(self.data)
            except OverflowError:
                raise self._missing("is too large") from None
            if value == value and abs(value) != float("inf"):
                return value
        raise self._missing("is no number")

    def integer(self) -> int:
        """Return a whole number.

        Raises:
            Missing: when there is none.
        """
        value = self.number()
        if value != int(value):
            raise self._missing("is no whole number")
        return int(self.data)

    def flag(self) -> bool:
        """Return true or false.

        Raises:
            Missing: when it is neither.
        """
        if isinstance(self.data, bool):
            return self.data
        raise self._missing("is neither true nor false")

    def items(self) -> list[View]:
        """Return the elements of a list.

        Raises:
            Missing: when it is none.
        """
        if not isinstance(self.data, list):
            raise self._missing("is no list")
        return [
            View(entry, f"{self.path}.{index}", self.errors)
            for index, entry in enumerate(self.data)
        ]

    def texts(self) -> list[str]:
        """Return the strings of a list; others are left out.

        Raises:
            Missing: when it is no list.
        """
        return [entry.data for entry in self.items() if isinstance(entry.data, str)]

    def entries(self) -> Iterator[tuple[str, View]]:
        """Return keys and values of a mapping.

        Raises:
            Missing: when it is none.
        """
        if not isinstance(self.data, dict):
            raise self._missing("is no mapping")
        return (
            (str(key), View(value, f"{self.path}.{key}", self.errors))
            for key, value in self.data.items()
        )

    def optional(self) -> str | None:
        """Return a string, or None when there is none."""
        return self.data if isinstance(self.data, str) else None


@dataclass(frozen=True, slots=True)
class Document:
    """The probe's answer from one node."""

    data: dict[str, Any]

    def section(self, name: str) -> View:
        """Return a section."""
        sections = self.data.get("sections")
        data = sections.get(name) if isinstance(sections, dict) else None
        errors = data.get("errors") if isinstance(data, dict) else None
        return View(data, name, errors if isinstance(errors, dict) else {})

    @property
    def top(self) -> View:
        """The document itself."""
        return View(self.data, "")


def read_document(text: str, node: str, version: int = PROBE_VERSION) -> Document:
    """Take the document out of a program's output.

    Login scripts may print before it; the document is the last line that is a JSON object.

    Raises:
        BadDocument: when there is none, or it is of another version or node.
    """
    for line in reversed(text.splitlines()):
        if not line.startswith("{"):
            continue
        try:
            data = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(data, dict) or data.get("probe") != version:
            continue
        if data.get("node") != node:
            raise BadDocument(f"the answer is for node {data.get('node')!r}, not {node}")
        return Document(data)
    first = text.strip().splitlines()[:1]
    heard = f"it printed {first[0][:120]!r}" if first else "it printed nothing"
    raise BadDocument(f"no probe document came back: {heard}")
