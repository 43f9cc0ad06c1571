"""The one machine the lock is for: which wheels it takes and how markers answer there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from packaging.markers import InvalidMarker, Marker
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from relock.errors import RelockError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

OLDEST_GLIBC_MINOR = 17
"""PEP 599: manylinux2014, the oldest manylinux that has aarch64, means glibc 2.17."""

FIXED_BY_TARGET = (
    "os_name",
    "sys_platform",
    "platform_system",
    "platform_machine",
    "implementation_name",
    "platform_python_implementation",
)
"""Marker variables with one value on the target. Poetry does not know that some imply others."""


@dataclass(frozen=True)
class Target:
    """CPython `python` (major, minor) on Linux `machine` with glibc `glibc` (major, minor)."""

    python: tuple[int, int]
    machine: str
    glibc: tuple[int, int]

    @classmethod
    def from_pyproject(cls, data: Mapping[str, Any]) -> Target:
        """Read `[tool.relock.target]`.

        Raises:
            RelockError: a field is missing or not of the form `MAJOR.MINOR`.
        """
        try:
            table = data["tool"]["relock"]["target"]
            return cls(_pair(table["python"]), str(table["machine"]), _pair(table["glibc"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RelockError(
                f"pyproject.toml, [tool.relock.target]: {error}; "
                'write python = "3.13", machine = "aarch64", glibc = "2.41"'
            ) from error

    @cached_property
    def platforms(self) -> tuple[str, ...]:
        """Platform tags of this target, best first (PEP 600 order, then plain `linux_*`)."""
        major, minor = self.glibc
        if major != 2:
            raise RelockError(f"glibc {major}.{minor}: only glibc 2 has manylinux tags")
        manylinux = [
            f"manylinux_2_{m}_{self.machine}" for m in range(minor, OLDEST_GLIBC_MINOR - 1, -1)
        ]
        return (*manylinux, f"manylinux2014_{self.machine}", f"linux_{self.machine}")

    @cached_property
    def rank(self) -> dict[Tag, int]:
        """Every tag this target accepts; the smaller the number, the better the wheel."""
        interpreter = f"cp{self.python[0]}{self.python[1]}"
        ordered = [
            *cpython_tags(self.python, [interpreter], self.platforms),
            *compatible_tags(self.python, interpreter, self.platforms),
        ]
        return {tag: place for place, tag in reversed(list(enumerate(ordered)))}

    @property
    def marker(self) -> str:
        """The PEP 508 marker that selects this target and no other system."""
        environment = self._environment(0)
        return " and ".join(f'{name} == "{environment[name]}"' for name in FIXED_BY_TARGET)

    def wheel_key(self, filename: str) -> tuple[int, tuple[int, str], str] | None:
        """Sort key of a wheel (smallest is best), or None when this target cannot use it.

        Between wheels of the same tag the higher build number wins, as in pip.

        Raises:
            RelockError: the name is no wheel name.
        """
        try:
            _, _, build, tags = parse_wheel_filename(filename)
        except InvalidWheelFilename as error:
            raise RelockError(f"{filename}: {error}") from error
        places = [self.rank[tag] for tag in tags if tag in self.rank]
        if not places:
            return None
        number, text = build or (0, "")
        return min(places), (-number, text), filename

    def marker_holds(self, marker: str, extras: Iterable[str] = ()) -> bool:
        """Whether a PEP 508 marker holds here with any of `extras` switched on.

        Raises:
            RelockError: the marker is not PEP 508, or its answer depends on the patch release of
                Python, which the lock does not fix.
        """
        if not marker or marker == "*":
            return True
        try:
            parsed = Marker(marker)
        except InvalidMarker as error:
            raise RelockError(f"marker {marker!r}: {error}") from error
        answers = {
            any(
                parsed.evaluate(self._environment(patch) | {"extra": extra})
                for extra in ("", *extras)
            )
            for patch in (0, 99)
        }
        if len(answers) != 1:
            raise RelockError(
                f"marker {marker!r} answers differently within Python "
                f"{self.python[0]}.{self.python[1]}; constrain the package that carries it"
            )
        return answers.pop()

    def _environment(self, patch: int) -> dict[str, str]:
        version = f"{self.python[0]}.{self.python[1]}"
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{version}.{patch}",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{version}.{patch}",
            "python_version": version,
            "sys_platform": "linux",
        }


def _pair(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)
