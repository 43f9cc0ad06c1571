"""flake.lock holds real values that Nix takes as they are."""

from __future__ import annotations

import json
import re

import pytest
from nixtool import REPOSITORY, Nix

LOCK = json.loads((REPOSITORY / "flake.lock").read_text(encoding="utf-8"))

# Written down apart from the lock, so that an edit of one alone is noticed.
PINS = {
    "nixpkgs": (
        "774debe7a0d1b496e35677ad955a1011c6ff74f3",
        "sha256-nQyFkMR78WP6PiXKkDW2SjqzLf/spQqjRuxRGSbcV8k=",
        1790920529,
    ),
    "poetry2nix": (
        "ce2369db77f45688172384bbeb962bc6c2ea6f94",
        "sha256-cX98bUuKuihOaRp8dNV1Mq7u6/CQZWTPth2IJPATBXc=",
        1743690424,
    ),
    "nixos-dgx-spark": (
        "f1ebf94a047a16d40f3ff811961574b92d9c4e1e",
        "sha256-lL6X+0XMdQOiT1FQRrerB9ACTnr3vdv9Wpz8U0RCkS8=",
        1787054876,
    ),
}
NOT_FLAKES = {"poetry2nix", "nixos-dgx-spark"}


def test_three_inputs_and_no_more() -> None:
    assert LOCK["version"] == 7
    assert LOCK["root"] == "root"
    assert LOCK["nodes"]["root"] == {"inputs": {name: name for name in PINS}}
    assert set(LOCK["nodes"]) == {"root", *PINS}


@pytest.mark.parametrize("name", sorted(PINS))
def test_pins(name: str) -> None:
    node = LOCK["nodes"][name]
    rev, nar_hash, modified = PINS[name]
    locked = node["locked"]
    assert (locked["rev"], locked["narHash"], locked["lastModified"]) == (rev, nar_hash, modified)
    assert locked["type"] == node["original"]["type"] == "github"
    assert node.get("flake", True) is (name not in NOT_FLAKES)
    assert set(node) <= {"locked", "original", "flake"}


def test_originals_are_those_of_the_flake() -> None:
    text = (REPOSITORY / "flake.nix").read_text(encoding="utf-8")
    urls = re.findall(r'url = "github:([^"]+)"', text)
    originals = [LOCK["nodes"][name]["original"] for name in PINS]
    assert sorted(urls) == sorted(
        "/".join([o["owner"], o["repo"], *([o["ref"]] if "ref" in o else [])]) for o in originals
    )


@pytest.mark.nix
def test_nix_takes_it_unchanged(nix: Nix) -> None:
    """Offline: Nix compares the lock with flake.nix and has nothing to add or to fetch."""
    found = json.loads(
        nix.run("flake", "metadata", "--json", "--offline", "--no-update-lock-file", nix.flake)
    )
    assert found["locks"] == LOCK


@pytest.mark.nix
@pytest.mark.parametrize("name", sorted(NOT_FLAKES))
def test_small_inputs_have_the_locked_hash(nix: Nix, name: str) -> None:
    if not nix.trees:
        pytest.skip("SPARK_NIX_ONLINE: Nix fetched the inputs and compared the hashes itself")
    assert nix.run("hash", "path", nix.trees[name]).strip() == PINS[name][1]


@pytest.mark.nix
def test_flake_show_through_nix_itself(nix: Nix) -> None:
    """The command line's own way to the outputs, with inputs replaced by the trees."""
    shown = json.loads(nix.run("flake", "show", "--json", *nix.overrides, nix.flake))
    assert set(shown["packages"]) == {"aarch64-linux", "x86_64-linux", "aarch64-darwin"}
    assert {"triangle-spark1", "appliance"} <= set(shown["nixosConfigurations"])
