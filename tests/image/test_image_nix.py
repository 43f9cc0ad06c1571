"""The Nix expression takes the same files into the same assembler.

Needs Nix >= 2.18, a nixpkgs tree and a poetry2nix tree: `SPARK_NIXPKGS` and `SPARK_POETRY2NIX`
name the folders, `SPARK_NIX` a command to put before Nix's programs (for a Nix in a chroot).
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from spark_appliance.image import lock
from spark_appliance.image.recipe import load

pytestmark = pytest.mark.nix
HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[1] / "pkgs" / "oci-image"


@pytest.fixture(scope="module")
def evaluated() -> dict[str, Any]:
    arguments = []
    for argument, variable in (("nixpkgs", "SPARK_NIXPKGS"), ("poetry2nix", "SPARK_POETRY2NIX")):
        if not os.environ.get(variable):
            pytest.skip(f"${variable} is not set: no {argument} tree to evaluate with")
        arguments += ["--arg", argument, os.environ[variable]]
    prefix = shlex.split(os.environ.get("SPARK_NIX", "")) or []
    if prefix and prefix[-1] == "nix":
        prefix = prefix[:-1]
    if not prefix and shutil.which("nix-instantiate") is None:
        pytest.skip("Nix is not installed and $SPARK_NIX is not set")
    done = subprocess.run(
        [*prefix, "nix-instantiate", "--eval", "--strict", "--json",
         str(HERE / "evaluate_oci.nix"), *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


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
