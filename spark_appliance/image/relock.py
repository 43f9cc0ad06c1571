"""Write image.lock.json: apt resolves, this module notes the result with its reasons."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path

from debian.copyright import Copyright, NotMachineReadableError
from debian.debfile import DebError, DebFile

from spark_appliance.image import apt
from spark_appliance.image.lock import FORMAT, DebianLock, DebPackage, Denied, ImageLock
from spark_appliance.image.recipe import Native, Recipe

Fetch = Callable[[list[DebPackage]], Mapping[str, Path]]
"""Brings packages onto this machine: sha256 -> path."""


def resolve(recipe: Recipe, mirrors: apt.Mirrors, fetch: Fetch) -> ImageLock:
    """Resolve every buildable profile against the suites of the recipe.

    Raises:
        ImageError: apt cannot be used, or finds no solution.
    """
    with apt.scratch() as folder:
        private = apt.PrivateApt(Path(folder), recipe, mirrors)
        private.update()
        denied = apt.parse(stanzas := private.show(recipe.debian.denied))
        private.deny(stanzas)
        profiles = {
            name: private.closure(recipe.roots(name))
            for name, profile in recipe.profiles.items()
            if not profile.refused
        }
        # packages that a plugin is compiled against are unpacked alone, without their closure
        profiles |= {
            Native.profile(name): tuple(sorted(native.debian))
            for name, native in recipe.native.items()
        }
        chosen = {name for names in profiles.values() for name in names}
        candidates = apt.parse(private.show(chosen))
        releases = private.releases()
    packages = [
        _package(
            candidates,
            name,
            recipe,
            tuple(sorted(p for p, names in profiles.items() if name in names)),
        )
        for name in sorted(chosen)
    ]
    files = fetch(packages)
    packages = [
        package.model_copy(update={"licences": read_licences(files[package.sha256], package.name)})
        for package in packages
    ]
    return ImageLock(
        format=FORMAT,
        debian=DebianLock(
            snapshot=max(releases.values()),
            releases=releases,
            packages=tuple(packages),
            denied=tuple(
                Denied(
                    name=name,
                    reason=reason,
                    wanted_by=tuple(apt.wanted_by(candidates, name, denied[name].provides)),
                )
                for name, reason in sorted(recipe.debian.denied.items())
            ),
        ),
    )


def _package(
    candidates: Mapping[str, apt.Candidate],
    name: str,
    recipe: Recipe,
    profiles: tuple[str, ...],
) -> DebPackage:
    entry = candidates[name]
    reason = recipe.debian.roots.get(name)
    dependants = ", ".join(apt.wanted_by(candidates, name, entry.provides))
    return DebPackage(
        name=name,
        version=entry.version,
        architecture=entry.architecture,
        source=entry.source,
        archive=apt.SECURITY if entry.pool.startswith("pool/updates/") else apt.MAIN,
        pool=entry.pool,
        sha256=entry.sha256,
        size=entry.size,
        installed_kib=entry.installed_kib,
        licences=(),
        profiles=profiles,
        why=reason or (f"needed by {dependants}" if dependants else ", ".join(profiles)),
    )


def read_licences(path: Path, name: str) -> tuple[str, ...]:
    """Return the licence names of a package's copyright file; empty if it states none by machine.

    A copyright folder that is a link to another package's states nothing of its own.
    """
    with DebFile(str(path)) as package:
        wanted = f"usr/share/doc/{name}/copyright"
        try:
            if not package.data.has_file(wanted):
                return ()
            text = package.data.get_content(wanted)
        except (DebError, KeyError, OSError):  # a link that leaves the package
            return ()
    if not isinstance(text, bytes):
        return ()
    try:
        document = Copyright(io.StringIO(text.decode("utf-8", "replace")), strict=False)
    except (NotMachineReadableError, ValueError):  # free text
        return ()
    licences = [getattr(paragraph, "license", None) for paragraph in document.all_paragraphs()]
    return tuple(sorted({getattr(licence, "synopsis", "") for licence in licences} - {""}))
