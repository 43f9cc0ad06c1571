"""The locked wheels: their names in poetry.lock, their files in a folder."""

from __future__ import annotations

import tomllib
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from audit.errors import AuditError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True, order=True)
class LockedWheel:
    """One `[[package]]` of the pruned lock: normal name, version, file name, SHA-256 in hex."""

    name: str
    version: str
    file: str
    sha256: str


def locked_wheels(lock: Path) -> list[LockedWheel]:
    """Read the pruned lock, sorted by name.

    Raises:
        AuditError: the file is missing, or a package has not exactly one file.
    """
    try:
        packages = tomllib.loads(lock.read_text(encoding="utf-8"))["package"]
    except FileNotFoundError as error:
        raise AuditError(f"{lock}: no such file") from error
    wheels = []
    for package in packages:
        if len(package["files"]) != 1:
            raise AuditError(f"{lock}: {package['name']} has {len(package['files'])} files, want 1")
        file = package["files"][0]
        digest = file["hash"].removeprefix("sha256:")
        wheels.append(LockedWheel(package["name"], package["version"], file["file"], digest))
    return sorted(wheels)


def open_wheel(folder: Path, wheel: LockedWheel) -> zipfile.ZipFile:
    """Open a wheel of the lock in `folder`.

    Raises:
        AuditError: it is not there.
    """
    path = folder / wheel.file
    if not path.exists():
        raise AuditError(
            f"{path}: not downloaded; run `python -m audit download --wheels {folder}`"
        )
    return zipfile.ZipFile(path)


def members(archive: zipfile.ZipFile) -> Iterator[tuple[str, zipfile.ZipInfo]]:
    """Yield (path below site-packages, entry) of every file.

    `*.data/platlib` and `purelib` are site-packages too; other `*.data` parts (scripts, headers)
    keep their path in the wheel.
    """
    for info in archive.infolist():
        if info.is_dir():
            continue
        top, _, rest = info.filename.partition("/")
        part, _, inner = rest.partition("/")
        if top.endswith(".data") and part in {"platlib", "purelib"}:
            yield inner, info
        else:
            yield info.filename, info
