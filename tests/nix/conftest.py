"""Fixtures of the tests that evaluate the flake."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from nixplans import EXAMPLES, nixos_plan
from nixtool import HOST_TREE, Nix, NixMissingError, find


@pytest.fixture(scope="session")
def nix() -> Iterator[Nix]:
    try:
        found = find(f"spark-nix-test-{os.getpid()}")
    except NixMissingError as error:
        pytest.skip(f"{error}; see tests/nix/README.md")
    yield found
    shutil.rmtree(found.source.parent)


@pytest.fixture(scope="session")
def host(nix: Nix) -> Nix:
    """Nix with a tree whose packages are made of the machine's own tools."""
    if nix.host_tree is None:
        pytest.skip(f"{HOST_TREE} is not set; see tests/nix/hosttools/README.md")
    os.environ.update(NIX_CURL_FLAGS="--retry 0", NIX_HASHED_MIRRORS="")
    return nix


@pytest.fixture(scope="session")
def plans(nix: Nix) -> dict[str, str]:
    """All examples as NixOS clusters: name -> plan, as a path for Nix."""
    result = {}
    for file in sorted(EXAMPLES.glob("*/cluster.yaml")):
        folder = nix.source.parent / "plans" / file.parent.name
        folder.mkdir(parents=True)
        (folder / "cluster.lock.json").write_text(nixos_plan(file.parent), encoding="utf-8")
        result[file.parent.name] = nix.inside(folder / "cluster.lock.json")
    assert len(result) >= 4
    return result
