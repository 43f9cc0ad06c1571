"""The Nix expression takes the same files into the same assembler.

Needs what tests/nix/README.md says.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest
from nixtool import Nix

from spark_appliance.image import lock
from spark_appliance.image.recipe import load

pytestmark = pytest.mark.nix
FOLDER = Path(__file__).resolve().parents[2] / "pkgs" / "oci-image"


@pytest.fixture(scope="module")
def evaluated(nix: Nix) -> dict[str, Any]:
    return dict(nix.evaluate("../image/evaluate_oci.nix"))


def sha256(text: str) -> str:
    """Return a hash in hex, whether Nix gave hex or an SRI string."""
    if text.startswith("sha256-"):
        return base64.b64decode(text.removeprefix("sha256-")).hex()
    return text.removeprefix("sha256:")


@pytest.mark.parametrize("profile", ["full", "smoke"])
def test_the_same_files(profile: str, evaluated: dict[str, Any]) -> None:
    recipe = load(FOLDER / "recipe.toml")
    pinned = lock.load(FOLDER / "image.lock.json")
    chosen = lock.select(recipe, profile, pinned, lock.load_wheels(FOLDER / recipe.wheels))
    got = evaluated[profile]
    assert {(d["file"], sha256(d["outputHash"])) for d in got["debs"]} == {
        (d.file, d.sha256) for d in chosen.debs
    }
    assert {(w["file"], sha256(w["outputHash"])) for w in got["wheels"]} == {
        (w.file, w.sha256) for w in chosen.wheels
    }
    assert all(re.match("mirror://debian/.*pool/", deb["url"]) for deb in got["debs"])


@pytest.mark.parametrize("profile", ["full", "smoke"])
def test_the_same_assembler(profile: str, evaluated: dict[str, Any]) -> None:
    command = evaluated[profile]["command"]
    assert f"-m spark_appliance image build --offline --profile {profile}" in command
    for item in (*evaluated[profile]["debs"], *evaluated[profile]["wheels"]):
        assert item["file"] in command
