from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("installer", reason="needs the image extra: installer")
pytest.importorskip("debian.debfile", reason="needs the image extra: python-debian")
pytest.importorskip("elftools", reason="needs the image extra: pyelftools")
pytest.importorskip("cyclonedx", reason="needs the image extra: cyclonedx-python-lib")

import image_download as real

from spark_appliance.image.store import Store


@pytest.fixture(scope="session")
def downloaded(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A cache with the files of the smoke profile."""
    given = os.environ.get("SPARK_IMAGE_CACHE")
    store = Store(Path(given) if given else tmp_path_factory.mktemp("cache"))
    real.fetch(store, "smoke")
    return store
