"""Profiles from the committed lock, with real packages from this machine's mirrors.

The full one only when asked for: it takes 2 minutes or more, 9 GB of disc and 4.3 GB of downloads.

    SPARK_IMAGE_FULL=1 pytest tests/image/test_image_smoke.py

``SPARK_IMAGE_CACHE`` keeps the downloads, ``SGLANG_ENV_WHEELS`` is a folder that has the wheels.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import image_download as real
import pytest

from spark_appliance.image import elf, native, publish, reproduce
from spark_appliance.image.store import Store

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("profile", ["smoke", "tools"])
def test_the_same_digest_twice(profile: str, downloaded: Store, tmp_path: Path) -> None:
    real.fetch(downloaded, profile)
    shuffled = tmp_path / "files in another order"
    shuffled.mkdir()
    names = [downloaded.verified(item) for item in real.pinned(profile)]
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
            [sys.executable, "-m", "spark_appliance", "image", "build", "--profile", profile,
             "--offline", "-o", str(out), *options],
            capture_output=True, text=True, check=False, umask=umask,
            env={**os.environ, **environment},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert reproduce.first_difference(tmp_path / "a", tmp_path / "deep folder" / "b") is None
    published = (real.ROOT / "docs" / "digests.md").read_text()
    for line in outputs[0].splitlines():
        assert line.split()[-1] in published, "docs/digests.md is older than the builder"


def test_the_full_image_has_the_digest_of_the_page(downloaded: Store, tmp_path: Path) -> None:
    if os.environ.get("SPARK_IMAGE_FULL") != "1":
        pytest.skip("SPARK_IMAGE_FULL=1 is not set: builds the full image, 9 GB of disc")
    given = os.environ.get("SGLANG_ENV_WHEELS")
    store = Store(downloaded.folder, [Path(given)] if given else [])
    real.fetch(store, "full")
    published = (real.ROOT / "docs" / "digests.md").read_text()
    (wanted,) = re.findall(r"^\| full \| `.+` \| `(\S+)` \| `\S+` \|$", published, re.MULTILINE)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "spark_appliance", "image", "build", "--offline",
             "--cache", str(store.folder), *(["--files", given] if given else []),
             "-o", str(tmp_path / "image"), "--reproduce", wanted],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert f"reproduced {wanted}\n" in done.stdout
        for line in publish.tables([publish.read(tmp_path / "image")]).splitlines():
            assert line in published.splitlines(), "docs/digests.md is older than the builder"
    finally:
        shutil.rmtree(tmp_path / "image", ignore_errors=True)  # pytest would keep it


def test_the_library_of_a_plugin_is_the_same_twice(downloaded: Store, tmp_path: Path) -> None:
    real.fetch(downloaded, "tools")
    needed = [*native.packages(real.LOCK, real.PLUGIN), real.compiler()]
    seeds = [downloaded.path(item).parent for item in needed]
    copy = tmp_path / "another place" / "spark-engram"
    shutil.copytree(real.ROOT / "pkgs" / "spark-engram" / "src", copy / "src")
    one = real.library(downloaded)
    two = real.library(Store(tmp_path / "two", seeds), copy)
    assert one != two
    content = one.read_bytes()
    assert content == two.read_bytes()
    assert elf.soname(content) is not None
    for symbol in (b"se_abi_version\0", b"se_crc32c\0"):
        assert symbol in content
    assert str(tmp_path).encode() not in content
    assert str(real.ROOT).encode() not in content
