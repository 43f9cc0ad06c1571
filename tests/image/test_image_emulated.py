"""The image itself, under qemu-user: the smoke profile, and with SPARK_IMAGE a full one.

SPARK_IMAGE=DIR pytest tests/image/test_image_emulated.py    # DIR: image build -o DIR; 20 min
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_emulated import Emulated, unpacked
from test_image_smoke import downloaded  # noqa: F401 - a fixture

from spark_appliance.image import build, lock
from spark_appliance.image.recipe import load
from spark_appliance.image.store import Store

FOLDER = Path(__file__).parents[2] / "pkgs" / "oci-image"
PYTHON = "/opt/sglang/bin/python3"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smoke(
    downloaded: Store,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Emulated]:
    recipe, pinned = load(FOLDER / "recipe.toml"), lock.load(FOLDER / "image.lock.json")
    wheels = lock.load_wheels(FOLDER / recipe.wheels)
    request = build.Request(recipe, pinned, lock.select(recipe, "smoke", pinned, wheels), (), {})
    out = tmp_path_factory.mktemp("smoke") / "image"
    build.build(request, downloaded, out)
    with unpacked(out, out.parent / "root") as image:
        yield image


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    given = os.environ.get("SPARK_IMAGE")
    if not given:
        pytest.skip("SPARK_IMAGE does not name a built full image")
    with unpacked(Path(given), tmp_path_factory.mktemp("full") / "root") as image:
        yield image


def assert_cache_is_ldconfigs(image: Emulated) -> None:
    image.run("/usr/sbin/ldconfig", "-X", "-C", "/cache/real")
    real = image.run("/usr/sbin/ldconfig", "-p", "-C", "/cache/real").splitlines()
    ours = image.run("/usr/sbin/ldconfig", "-p").splitlines()
    assert [line for line in ours if "=>" in line] == [line for line in real if "=>" in line]


def test_the_cache_is_what_ldconfig_writes(smoke: Emulated) -> None:
    assert_cache_is_ldconfigs(smoke)


def test_python_finds_its_environment_and_certificates(smoke: Emulated) -> None:
    code = (
        "import json, packaging, ssl, sys; print(json.dumps([sys.prefix, packaging.__file__,"
        " len(ssl.create_default_context().get_ca_certs())]))"
    )
    prefix, file, certificates = json.loads(smoke.run(PYTHON, "-c", code))
    assert prefix == "/opt/sglang"
    assert file.startswith("/opt/sglang/lib/python3.13/site-packages/packaging/")
    assert certificates > 100


def test_the_cache_of_the_full_image(full: Emulated) -> None:
    assert_cache_is_ldconfigs(full)


def test_the_engine_imports_with_our_plugins(full: Emulated) -> None:
    code = (
        "import json, torch, flashinfer; from importlib.metadata import entry_points;"
        "from spark_engram import native;"
        "print(json.dumps([torch.__version__, flashinfer.__version__,"
        " [e.name for e in entry_points(group='sglang.srt.plugins') if 'spark' in e.name]]))"
    )
    last = full.run(PYTHON, "-c", code, timeout=1800).splitlines()[-1]
    assert json.loads(last) == ["2.14.1+cu130", "0.7.2", ["spark_engram", "spark_tp_pad"]]


def test_the_engine_prints_its_options(full: Emulated) -> None:
    out = full.run(PYTHON, "-m", "sglang.launch_server", "--help", timeout=3600)
    assert "--model-path" in out
