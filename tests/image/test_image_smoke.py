"""The smoke profile from the committed lock, with real packages from this machine's mirrors."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spark_appliance.image import elf, lock, native, reproduce, sources
from spark_appliance.image.apt import mirrors
from spark_appliance.image.errors import ImageError
from spark_appliance.image.recipe import load
from spark_appliance.image.store import Store

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "pkgs" / "oci-image"
RECIPE = load(FOLDER / "recipe.toml")
LOCK = lock.load(FOLDER / "image.lock.json")
SMOKE = lock.select(RECIPE, "smoke", LOCK, lock.load_wheels(FOLDER / RECIPE.wheels))


@pytest.fixture(scope="session")
def downloaded(tmp_path_factory: pytest.TempPathFactory) -> Store:
    given = os.environ.get("SPARK_IMAGE_CACHE")
    store = Store(Path(given) if given else tmp_path_factory.mktemp("cache"))
    try:
        missing = [wheel for wheel in SMOKE.wheels if store.locate(wheel) is None]
        store.fetch(sources.wheels(missing, RECIPE.target))
        store.fetch(sources.debian(SMOKE.debs, mirrors()))
    except ImageError as error:
        pytest.skip(f"the smoke profile cannot be downloaded: {error}")
    return store


@pytest.mark.slow
def test_the_same_digest_twice(downloaded: Store, tmp_path: Path) -> None:
    shuffled = tmp_path / "files in another order"
    shuffled.mkdir()
    names = [downloaded.verified(item) for item in (*SMOKE.debs, *SMOKE.wheels)]
    random.Random(7).shuffle(names)
    for path in names:
        shutil.copyfile(path, shuffled / path.name)
    outputs = []
    for out, options, environment, umask in (
        (tmp_path / "a", ["--cache", str(downloaded.folder)],
         {"TZ": "UTC", "LC_ALL": "C", "PYTHONHASHSEED": "0"}, 0o022),
        (tmp_path / "deep folder" / "b",
         ["--cache", str(tmp_path / "empty"), "--files", str(shuffled), "--jobs", "1"],
         {"TZ": "Pacific/Kiritimati", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "4242"}, 0o077),
    ):  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "spark_appliance", "image", "build", "--profile", "smoke",
             "--offline", "-o", str(out), *options],
            capture_output=True, text=True, check=False, umask=umask,
            env={**os.environ, **environment},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert reproduce.first_difference(tmp_path / "a", tmp_path / "deep folder" / "b") is None
    published = (ROOT / "docs" / "digests.md").read_text()
    for line in outputs[0].splitlines():
        assert line.split()[-1] in published, "docs/digests.md is older than the builder"


@pytest.mark.slow
def test_the_library_of_a_plugin_is_the_same_twice(downloaded: Store, tmp_path: Path) -> None:
    settings = RECIPE.native["spark-engram"]
    pytest.importorskip("ziglang", reason=f"needs {settings.compiler}")
    debs = native.packages(LOCK, "spark-engram")
    downloaded.fetch(sources.debian(debs, mirrors()))
    seeds = [downloaded.path(package).parent for package in debs]
    project = ROOT / "pkgs" / "spark-engram"
    copy = tmp_path / "another place" / "spark-engram"
    shutil.copytree(project / "src", copy / "src")
    one = native.build("spark-engram", settings, project, debs, Store(tmp_path / "1", seeds))
    two = native.build("spark-engram", settings, copy, debs, Store(tmp_path / "two", seeds))
    assert one != two
    content = one.read_bytes()
    assert content == two.read_bytes()
    assert elf.soname(content) is not None
    for symbol in (b"se_abi_version\0", b"se_crc32c\0"):
        assert symbol in content
    assert str(tmp_path).encode() not in content
    assert str(ROOT).encode() not in content
