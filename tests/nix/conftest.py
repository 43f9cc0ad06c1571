"""Fixtures of the tests that evaluate the flake."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from nixplans import MACHINES, NAMES, nixos_lock
from nixtool import HOST_TREE, Nix


@pytest.fixture(scope="session")
def host(nix: Nix) -> Nix:
    """Nix with a tree whose packages are made of the machine's own tools."""
    if nix.host_tree is None:
        pytest.skip(f"{HOST_TREE} is not set; see tests/nix/hosttools/README.md")
    os.environ.update(NIX_CURL_FLAGS="--retry 0", NIX_HASHED_MIRRORS="")
    return nix


@pytest.fixture(scope="session")
def plans(nix: Nix) -> dict[str, str]:
    """The committed plans of all examples as NixOS clusters: name -> path for Nix."""
    return {name: nix.inside(nix.source / nixos_lock(name)) for name in NAMES}


@pytest.fixture(scope="session", params=NAMES)
def fleet(request: pytest.FixtureRequest, nix: Nix, plans: dict[str, str]) -> tuple[str, Any, Any]:
    """Return name, plan and evaluated hosts of an example; each is evaluated once."""
    lock = plans[request.param]
    plan = json.loads((nix.root / lock.lstrip("/")).read_text(encoding="utf-8"))
    arguments = {"lock": lock}
    if request.param != MACHINES:  # an example is one of the flake's outputs
        arguments["cluster"] = plan["name"]
    return request.param, plan, nix.evaluate("hosts.nix", arguments)
