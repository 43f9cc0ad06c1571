"""What docs/image.md says is saved by leaving files out, measured on the real files.

``SGLANG_ENV_WHEELS`` names a folder of the locked wheels (4.1 GB).
"""

from __future__ import annotations

import os
import re
import zipfile
from collections import Counter
from pathlib import Path

import image_download as real
import pytest
from debian.debfile import DebFile

from spark_appliance.image import sources
from spark_appliance.image.apt import mirrors
from spark_appliance.image.store import Store

pytestmark = pytest.mark.slow
_DATA = re.compile(r"^[^/]+\.data/(platlib|purelib)/")


def dropped_of_wheels(folder: Path) -> Counter[str]:
    """Return the bytes that each reason of the recipe saves."""
    files = {wheel.name: wheel.file for wheel in real.WHEELS}
    saved: Counter[str] = Counter()
    for drop in real.RECIPE.wheels_drop:
        why = "self-tests" if drop.why.startswith("self-tests") else drop.why
        with zipfile.ZipFile(folder / files[drop.wheel]) as archive:
            found = [
                item.file_size
                for item in archive.infolist()
                if not item.is_dir() and re.match(drop.paths, _DATA.sub("", item.filename))
            ]
        assert found, f"{drop.wheel}: {drop.paths} matches nothing"
        saved[why] += sum(found)
    return saved


def dropped_of_packages(store: Store) -> Counter[str]:
    saved: Counter[str] = Counter()
    for package in real.chosen("full").debs:
        with DebFile(str(store.verified(package))) as archive:
            for member in archive.data.tgz():
                name = member.name.removeprefix("./")
                rule = next((d for d in real.RECIPE.debian.drop if re.match(d.paths, name)), None)
                if rule is not None:
                    saved[rule.why] += member.size
    assert set(saved) <= {drop.why for drop in real.RECIPE.debian.drop}
    return saved


def test_the_table_says_what_is_saved(downloaded: Store) -> None:
    folder = os.environ.get("SGLANG_ENV_WHEELS")
    if not folder:
        pytest.skip("$SGLANG_ENV_WHEELS is not set: no folder of the wheels")
    debs = real.chosen("full").debs
    downloaded.fetch(sources.debian([d for d in debs if not downloaded.locate(d)], mirrors()))
    wheels = dropped_of_wheels(Path(folder))
    packages = dropped_of_packages(downloaded)
    expected = [round(size / 1e6) for size in wheels.values() if size >= 1e6]
    expected.append(round(sum(packages.values()) / 1e6))
    page = (real.ROOT / "docs" / "image.md").read_text()
    table = page[page.index("## Left out") : page.index("Kept although")]
    assert sorted(map(int, re.findall(r"\| (\d+) MB \|", table))) == sorted(expected)
