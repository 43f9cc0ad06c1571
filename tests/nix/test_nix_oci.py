"""The container image through Nix: the same files, the same assembler, the same digest."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import image_download as real
import pytest
from nixtool import HOST_TREE, Nix

from spark_appliance.image import build, native, oci, reproduce
from spark_appliance.image.store import Store

pytestmark = pytest.mark.nix
BUILDS = "hosttools/builds.nix"
MACHINES = ["x86_64", "aarch64"]
PROFILES = ["full", "tools", "smoke"]


@pytest.fixture(scope="module")
def evaluated(nix: Nix) -> dict[str, Any]:
    return dict(nix.evaluate("oci.nix"))


def sha256(text: str) -> str:
    """Return a hash in hex, whether Nix gave hex or an SRI string."""
    if text.startswith("sha256-"):
        return base64.b64decode(text.removeprefix("sha256-")).hex()
    return text.removeprefix("sha256:")


def pinned(items: list[dict[str, str]]) -> set[tuple[str, str]]:
    return {(item["file"], sha256(item["outputHash"])) for item in items}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("profile", PROFILES)
def test_the_same_files(profile: str, machine: str, evaluated: dict[str, Any]) -> None:
    chosen = real.chosen(profile)
    got = evaluated[f"{machine}-linux"][profile]
    compiled = real.PLUGIN in real.RECIPE.profiles[profile].plugins
    debs = {*chosen.debs, *(native.packages(real.LOCK, real.PLUGIN) if compiled else ())}
    assert pinned(got["debs"]) == {(d.file, d.sha256) for d in debs}
    assert pinned(got["wheels"]) == {(w.file, w.sha256) for w in chosen.wheels}
    compiler = native.compiler(real.PLUGIN, real.NATIVE, machine)
    assert pinned(got["compilers"]) == ({(compiler.file, compiler.sha256)} if compiled else set())
    assert all(re.match("mirror://debian/.*pool/", deb["url"]) for deb in got["debs"])


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("profile", PROFILES)
def test_the_same_assembler(profile: str, machine: str, evaluated: dict[str, Any]) -> None:
    got = evaluated[f"{machine}-linux"][profile]
    command = got["command"]
    assert f"-m spark_appliance image build --offline --profile {profile}" in command
    assert "--without" not in command
    assert "--plugin-library" not in command
    for item in (*got["debs"], *got["wheels"], *got["compilers"]):
        assert item["file"] in command


@pytest.mark.parametrize("machine", MACHINES)
def test_a_library_that_is_given_is_not_compiled(machine: str, evaluated: dict[str, Any]) -> None:
    got = evaluated[f"{machine}-linux"]["given"]
    assert got["compilers"] == []
    assert "--plugin-library=spark-engram=/given/libspark_engram.so" in got["command"]


# ---- really built, with the tools of the machine ------------------------------------------------


@pytest.fixture(scope="module")
def host(nix: Nix) -> Nix:
    if nix.host_tree is None:
        pytest.skip(f"{HOST_TREE} is not set; see tests/nix/hosttools/README.md")
    os.environ.update(NIX_CURL_FLAGS="--retry 0", NIX_HASHED_MIRRORS="")
    return nix


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Store:
    given = os.environ.get("SPARK_IMAGE_CACHE")
    return Store(Path(given) if given else tmp_path_factory.mktemp("cache"))


def add_to_store(nix: Nix, items: list[dict[str, str]], paths: dict[str, Path]) -> None:
    """Put files where Nix would have fetched them: its own fetch needs mirrors by name."""
    folder = nix.source.parent / "fetched"
    folder.mkdir()
    for item in items:
        if (nix.root / item["path"].lstrip("/")).exists():
            continue
        copy = folder / item["name"]
        shutil.copyfile(paths[item["file"]], copy)
        subprocess.run(
            [*nix.prefix, "nix-store", "--add-fixed", "sha256", nix.inside(copy)],
            check=True,
            capture_output=True,
        )
        copy.unlink()
    folder.rmdir()


Both = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def both(
    host: Nix, cache: Store, evaluated: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Both:
    """Build a profile through Nix and without it; returns the two layouts."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(profile: str) -> tuple[Path, Path]:
        if profile not in made:
            real.fetch(cache, profile)
            got = evaluated[f"{os.uname().machine}-linux"][profile]
            paths = {item.file: cache.verified(item) for item in real.pinned(profile)}
            add_to_store(host, [*got["debs"], *got["wheels"], *got["compilers"]], paths)
            through_nix = host.build(BUILDS, f"images.oci-{profile}")
            without = tmp_path_factory.mktemp(profile) / "image"
            build.build(real.request(profile, cache), cache, without)
            made[profile] = through_nix, without
        return made[profile]

    return make


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["smoke", "tools"])
def test_the_digest_is_the_same_through_nix(profile: str, both: Both) -> None:
    through_nix, without = both(profile)
    # the first difference by layer, file and bytes is what a failure shows
    assert reproduce.first_difference(through_nix, without) is None
    assert oci.read_image(through_nix) == oci.read_image(without)


@pytest.mark.slow
def test_another_library_is_a_difference_that_is_named(both: Both, host: Nix) -> None:
    _, without = both("tools")
    altered = host.build(BUILDS, "images.altered")
    difference = reproduce.first_difference(altered, without)
    assert difference is not None
    assert difference.layer == len(oci.read_image(without).layers) - 1
    # RECORD, which holds the hash of the library, comes before it
    assert difference.path.endswith("/site-packages/spark_engram-0.1.0.dist-info/RECORD")
    assert difference.begin is not None


@pytest.mark.slow
def test_the_digest_of_the_full_image(host: Nix, cache: Store, evaluated: dict[str, Any]) -> None:
    """SPARK_IMAGE is a full image, SGLANG_ENV_WHEELS its wheels; 9 GB of disc, which Nix keeps."""
    given, wheels = os.environ.get("SPARK_IMAGE"), os.environ.get("SGLANG_ENV_WHEELS")
    if not given or not wheels:
        pytest.skip("SPARK_IMAGE and SGLANG_ENV_WHEELS do not name a full image and its wheels")
    store = Store(cache.folder, [Path(wheels)])
    real.fetch(store, "full")
    got = evaluated[f"{os.uname().machine}-linux"]["full"]
    paths = {item.file: store.verified(item) for item in real.pinned("full")}
    add_to_store(host, [*got["debs"], *got["wheels"], *got["compilers"]], paths)
    through_nix = host.build(BUILDS, "images.oci")
    assert reproduce.first_difference(through_nix, Path(given)) is None
    assert oci.read_image(through_nix) == oci.read_image(Path(given))
