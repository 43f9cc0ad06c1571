"""Licences, as the METADATA of every wheel states them."""

from __future__ import annotations

import email.policy
from dataclasses import dataclass
from email.parser import BytesParser
from typing import TYPE_CHECKING, Any

from audit.errors import AuditError
from audit.wheels import LockedWheel, open_wheel

if TYPE_CHECKING:
    import zipfile
    from collections.abc import Mapping
    from pathlib import Path

LONGEST_NAME = 120
"""Characters of a `License` field that still is a name; a longer one is a licence text."""


@dataclass(frozen=True)
class Licence:
    """What a wheel says of its licence.

    `expression` is SPDX (`License-Expression`), `name` the older free field, `classifiers` the
    last part of the `License ::` classifiers, `files` the licence texts inside the wheel.
    """

    expression: str | None
    name: str | None
    classifiers: tuple[str, ...]
    files: tuple[str, ...]

    @property
    def stated(self) -> bool:
        """Whether the wheel states a licence in any of the ways."""
        return bool(self.expression or self.name or self.classifiers or self.files)

    def as_data(self) -> dict[str, Any]:
        """Return plain data without the empty fields."""
        fields = {
            "expression": self.expression,
            "name": self.name,
            "classifiers": list(self.classifiers),
            "files": list(self.files),
        }
        return {key: value for key, value in fields.items() if value}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Licence:
        """Undo `as_data`."""
        return cls(
            data.get("expression"),
            data.get("name"),
            tuple(data.get("classifiers", ())),
            tuple(data.get("files", ())),
        )


def read_licences(folder: Path, wheels: list[LockedWheel]) -> dict[str, Licence]:
    """Read the licence of every wheel, by package name."""
    found = {}
    for wheel in wheels:
        with open_wheel(folder, wheel) as archive:
            found[wheel.name] = read_licence(archive)
    return found


def read_licence(archive: zipfile.ZipFile) -> Licence:
    """Read the licence of one wheel.

    Raises:
        AuditError: it has no METADATA.
    """
    names = archive.namelist()
    info = [name for name in names if name.endswith(".dist-info/METADATA") and "/" in name]
    top = [name for name in info if name.count("/") == 1]
    if len(top) != 1:
        raise AuditError(f"{archive.filename}: {len(top)} METADATA files, want 1")
    folder = top[0].removesuffix("METADATA")
    fields = BytesParser(policy=email.policy.compat32).parsebytes(
        archive.read(top[0]), headersonly=True
    )
    name = " ".join(str(fields.get("License", "")).split())
    classifiers = [
        str(value).rpartition(" :: ")[2]
        for value in fields.get_all("Classifier", [])
        if str(value).startswith("License ::") and str(value) != "License :: OSI Approved"
    ]
    return Licence(
        expression=_text(fields.get("License-Expression")),
        name=None if name in {"", "UNKNOWN"} or len(name) > LONGEST_NAME else name,
        classifiers=tuple(sorted(set(classifiers))),
        files=tuple(
            sorted(
                name.removeprefix(folder)
                for name in names
                if name.startswith(folder) and _is_licence_file(name.removeprefix(folder))
            )
        ),
    )


def _text(value: object) -> str | None:
    return str(value).strip() or None if value is not None else None


def _is_licence_file(name: str) -> bool:
    if name.endswith("/"):
        return False
    return name.startswith("licenses/") or name.upper().startswith(
        ("LICENSE", "LICENCE", "COPYING", "NOTICE")
    )
