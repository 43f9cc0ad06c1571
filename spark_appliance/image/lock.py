"""The lock of the image: Debian packages by hash, and the wheels of the engine's own lock."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from packaging.utils import canonicalize_name
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spark_appliance.errors import InputError, Location, read_failure
from spark_appliance.image.recipe import ALL, Profile, Recipe, invalid

FORMAT = 1
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DebPackage(_Model):
    """One Debian package.

    ``pool`` is the path below the mirror of ``archive`` ("debian" or "debian-security");
    ``size`` in bytes; ``installed_kib`` as Debian states it; ``licences`` are the short names of
    its machine-readable copyright file, empty when it has none; ``why`` is the reason of a root,
    or the packages that depend on it.
    """

    name: str
    version: str
    architecture: str
    source: str
    archive: str
    pool: Annotated[str, Field(pattern=r"^pool/")]
    sha256: Sha256
    size: int
    installed_kib: int
    licences: tuple[str, ...]
    profiles: tuple[str, ...]
    why: str

    @property
    def file(self) -> str:
        """The file name in the pool."""
        return self.pool.rpartition("/")[2]


class Denied(_Model):
    """A dependency that is left out: why, and which packages asked for it."""

    name: str
    reason: str
    wanted_by: tuple[str, ...]


class DebianLock(_Model):
    """The Debian part. ``releases``: suite -> Date of its Release file (UTC, YYYYMMDDTHHMMSSZ).

    ``snapshot`` is the newest of them: the Debian snapshot archive serves the pool paths under
    the first import at or after it, also when the mirrors have dropped them.
    """

    snapshot: str
    releases: dict[str, str]
    packages: tuple[DebPackage, ...]
    denied: tuple[Denied, ...]


class ImageLock(_Model):
    """image.lock.json."""

    format: int
    debian: DebianLock


class Wheel(_Model):
    """One wheel of the engine's lock."""

    name: str
    version: str
    file: str
    sha256: Sha256


def dump(lock: ImageLock) -> str:
    """Return the lock as text: sorted, one value a line, the same bytes for the same content."""
    return json.dumps(lock.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"


def load(path: Path) -> ImageLock:
    """Read image.lock.json.

    Raises:
        InputError: unreadable, or not a lock of this format.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        lock = ImageLock.model_validate(data)
    except OSError as error:
        raise read_failure(path, error) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError.one("image.lock", str(error), where=Location(str(path))) from None
    except ValidationError as error:
        raise invalid(path, "image.lock", error) from None
    if lock.format != FORMAT:
        raise InputError.one(
            "image.lock",
            f"format {lock.format}, this program reads {FORMAT}",
            "write it again with: spark-appliance image lock",
            Location(str(path)),
        )
    return lock


def load_wheels(path: Path) -> tuple[Wheel, ...]:
    """Read the pruned poetry.lock: exactly one wheel a package, sorted by file name.

    Raises:
        InputError: unreadable, or a package has no or several files.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise read_failure(path, error) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError.one("image.wheels", str(error), where=Location(str(path))) from None
    wheels = []
    for entry in data.get("package", []):
        files = entry["files"]
        if len(files) != 1 or not files[0]["file"].endswith(".whl"):
            raise InputError.one(
                "image.wheels",
                f"{entry['name']}: {len(files)} files, want one wheel",
                "prune the lock with: python -m relock",
                Location(str(path)),
            )
        wheels.append(
            Wheel(
                name=canonicalize_name(entry["name"]),
                version=entry["version"],
                file=files[0]["file"],
                sha256=files[0]["hash"].removeprefix("sha256:"),
            )
        )
    return tuple(sorted(wheels, key=lambda wheel: wheel.file))


class Selection(_Model):
    """What one profile takes from the locks."""

    profile: str
    debs: tuple[DebPackage, ...]
    wheels: tuple[Wheel, ...]

    @property
    def digest(self) -> str:
        """sha256 over what is pinned: names, versions and hashes, independent of formatting."""
        pinned = [[d.name, d.version, d.sha256] for d in self.debs]
        pinned += [[w.name, w.version, w.sha256] for w in self.wheels]
        return hashlib.sha256(json.dumps(pinned, sort_keys=True).encode()).hexdigest()


def select(recipe: Recipe, name: str, lock: ImageLock, wheels: Sequence[Wheel]) -> Selection:
    """Return the packages and wheels of a profile, in a fixed order.

    Raises:
        InputError: unknown or refused profile, or a lock that lacks what the profile names.
    """
    profile: Profile = recipe.buildable(name)
    debs = tuple(
        sorted((d for d in lock.debian.packages if name in d.profiles), key=lambda d: d.name)
    )
    missing = set(recipe.roots(name)) - {d.name for d in debs}
    chosen = tuple(w for w in wheels if ALL in profile.wheels or w.name in profile.wheels)
    missing |= set(profile.wheels) - {ALL} - {w.name for w in chosen}
    if missing:
        raise InputError.one(
            "image.lock-incomplete",
            f"profile {name}: not in the lock: {', '.join(sorted(missing))}",
            "write the lock again with: spark-appliance image lock",
        )
    return Selection(profile=name, debs=debs, wheels=chosen)


def safe_file_name(name: str) -> bool:
    """Return whether a file name from a lock stays inside its folder."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+~%-]*", name) is not None
