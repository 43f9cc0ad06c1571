"""The committed recipe and lock, and the real files of a profile, for the tests that need them.

``SPARK_IMAGE_CACHE`` names a folder that keeps what is downloaded between runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("debian.debfile", reason="needs the image extra: python-debian")

from spark_appliance.image import build, lock, native, plugins, sources
from spark_appliance.image.apt import mirrors
from spark_appliance.image.errors import ImageError
from spark_appliance.image.recipe import Compiler, load
from spark_appliance.image.store import Store

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "pkgs" / "oci-image"
RECIPE = load(FOLDER / "recipe.toml")
LOCK = lock.load(FOLDER / "image.lock.json")
WHEELS = lock.load_wheels(FOLDER / RECIPE.wheels)
PLUGIN = "spark-engram"
"""The one plugin with a native library."""
NATIVE = RECIPE.native[PLUGIN]


def chosen(profile: str) -> lock.Selection:
    """Return what a profile takes from the locks."""
    return lock.select(RECIPE, profile, LOCK, WHEELS)


def compiler() -> Compiler:
    """Return the compiler for this machine."""
    return native.compiler(PLUGIN, NATIVE)


def pinned(profile: str) -> list[lock.DebPackage | lock.Wheel | Compiler]:
    """Return every file that a profile is built from, those of the native library included."""
    selection = chosen(profile)
    files: list[lock.DebPackage | lock.Wheel | Compiler] = [*selection.debs, *selection.wheels]
    if PLUGIN in RECIPE.profiles[profile].plugins:
        files += [*native.packages(LOCK, PLUGIN), compiler()]
    return files


def fetch(store: Store, profile: str) -> None:
    """Bring the files of a profile into a cache; skips the test where they cannot be had."""
    missing = [item for item in pinned(profile) if store.locate(item) is None]
    try:
        store.fetch(
            sources.wheels([m for m in missing if isinstance(m, lock.Wheel)], RECIPE.target)
        )
        for item in missing:
            if isinstance(item, Compiler):
                store.fetch(sources.compiler(item, RECIPE.target))
        debs = [m for m in missing if isinstance(m, lock.DebPackage)]
        store.fetch(sources.debian(debs, mirrors()) if debs else [])
    except ImageError as error:
        pytest.skip(f"the files of the profile {profile} cannot be downloaded: {error}")


def library(store: Store, project: Path = ROOT / "pkgs" / PLUGIN) -> Path:
    """Compile the native library, as ``image build`` does."""
    return native.build(NATIVE, compiler(), project, native.packages(LOCK, PLUGIN), store)


def request(profile: str, store: Store) -> build.Request:
    """Return what ``image build`` would build from a cache that holds the files."""
    names = RECIPE.profiles[profile].plugins
    loaded = tuple(
        plugins.load(
            ROOT / "pkgs" / name,
            RECIPE.native.get(name),
            library(store) if name == PLUGIN else None,
        )
        for name in names
    )
    return build.Request(RECIPE, LOCK, chosen(profile), loaded, {})
