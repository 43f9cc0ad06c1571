"""The recipe of the image: what is wanted, what is left out, and why. Data, read from TOML."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Self

from packaging.utils import parse_wheel_filename
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from spark_appliance.errors import InputError, Location, Problem, read_failure

ALL = "*"


def _pattern(text: str) -> str:
    re.compile(text)
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Target(_Model):
    """The machine that the image is for, and the Debian suites it is made of."""

    architecture: str
    variant: str
    multiarch: str
    python: str
    suites: tuple[str, ...]
    security_suites: tuple[str, ...]
    components: tuple[str, ...]


class Profile(_Model):
    """A choice of roots, wheels and plugins; ``refused`` says why it cannot be built."""

    why: str
    debian: tuple[str, ...] = ()
    wheels: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    refused: str | None = None


class Drop(_Model):
    """Files of Debian packages that are left out."""

    paths: Pattern
    why: str


class WheelDrop(Drop):
    """Files of one wheel that are left out."""

    wheel: str


class Debian(_Model):
    """Roots of the closure, denied dependencies and dropped files, each with its reason."""

    roots: dict[str, str]
    denied: dict[str, str]
    drop: tuple[Drop, ...] = ()


class Layer(_Model):
    """A layer of wheels: those whose name matches, unless an earlier layer took them."""

    name: str
    wheels: Pattern


class Compiler(_Model):
    """The wheel of a compiler for one kind of host; ``machine`` as ``uname -m`` says it."""

    machine: str
    file: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    @property
    def requirement(self) -> str:
        """The exact requirement that this wheel fulfils."""
        name, version, _, _ = parse_wheel_filename(self.file)
        return f"{name}=={version}"

    @property
    def platforms(self) -> tuple[str, ...]:
        """The platform tags of the wheel, sorted."""
        return tuple(sorted({tag.platform for tag in parse_wheel_filename(self.file)[3]}))


class Native(_Model):
    """How the native library of a plugin is compiled.

    ``compiler`` is an exact requirement of the Python index, ``compilers`` its wheels for the
    machines that can compile, ``command`` what is run: the program as a path in the wheel, and
    its first arguments. ``sources`` are folders of the project with C++ files; ``debian`` packages
    are unpacked beside the sources and ``archives`` of them linked; ``exports`` are the symbols
    that stay visible.
    """

    compiler: str
    compilers: tuple[Compiler, ...]
    command: Annotated[tuple[str, ...], Field(min_length=1)]
    target: str
    sources: tuple[str, ...]
    flags: tuple[str, ...]
    exports: tuple[str, ...]
    library: str
    debian: tuple[str, ...]
    archives: tuple[str, ...]

    @model_validator(mode="after")
    def _one_version(self) -> Self:
        for wheel in self.compilers:
            if wheel.requirement != self.compiler:
                raise ValueError(f"{wheel.file} is not {self.compiler}")
        return self

    @staticmethod
    def profile(plugin: str) -> str:
        """Return the name under which the lock files these packages."""
        return f"plugin:{plugin}"


class Recipe(_Model):
    """The whole recipe; ``wheels`` is the path of a pruned poetry.lock beside the recipe.

    ``name`` is the image's name, ``version_of`` the wheel whose version it carries.
    """

    version: int
    wheels: str
    name: str
    version_of: str
    target: Target
    profiles: dict[str, Profile]
    debian: Debian
    native: dict[str, Native] = {}
    wheels_drop: tuple[WheelDrop, ...] = ()
    layers: tuple[Layer, ...]

    def roots(self, profile: str) -> tuple[str, ...]:
        """Return the Debian roots of a profile, sorted."""
        chosen = self.profiles[profile].debian
        return tuple(sorted(self.debian.roots if ALL in chosen else chosen))

    def buildable(self, name: str) -> Profile:
        """Return a profile that can be built.

        Raises:
            InputError: unknown, or refused with the reason of the recipe.
        """
        profile = self.profiles.get(name)
        if profile is None:
            names = [known for known, found in self.profiles.items() if not found.refused]
            raise InputError.one(
                "image.unknown-profile",
                f"no profile {name!r}",
                f"choose one of: {', '.join(names)}",
            )
        if profile.refused:
            raise InputError.one(
                "image.refused-profile", f"profile {name} cannot be built: {profile.refused}"
            )
        return profile


def load(path: Path) -> Recipe:
    """Read a recipe.

    Raises:
        InputError: unreadable, no TOML, or not a recipe.
    """
    try:
        return Recipe.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise read_failure(path, error) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError.one("image.recipe", str(error), where=Location(str(path))) from None
    except ValidationError as error:
        raise invalid(path, "image.recipe", error) from None


def invalid(path: Path, rule: str, error: ValidationError) -> InputError:
    """Turn pydantic's findings into problems with the path of each field."""
    return InputError(
        [
            Problem(
                rule,
                f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}",
                where=Location(str(path)),
            )
            for item in error.errors()
        ]
    )
