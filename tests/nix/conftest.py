"""Fixtures of the tests that evaluate the flake."""

from __future__ import annotations

import json
from typing import Any

import pytest
from nixplans import NAMES, cluster_file, nixos_plan
from nixtool import Nix


@pytest.fixture(scope="session")
def plans(nix: Nix) -> dict[str, str]:
    """All examples as NixOS clusters: name -> plan, as a path for Nix."""
    result = {}
    for name in NAMES:
        folder = nix.source.parent / "plans" / name.replace("/", "-")
        folder.mkdir(parents=True)
        text = nixos_plan(cluster_file(name).parent)
        (folder / "cluster.lock.json").write_text(text, encoding="utf-8")
        result[name] = nix.inside(folder / "cluster.lock.json")
    assert len(result) >= 5
    return result


@pytest.fixture(scope="session", params=NAMES)
def fleet(request: pytest.FixtureRequest, nix: Nix, plans: dict[str, str]) -> tuple[str, Any, Any]:
    """Return name, plan and evaluated hosts of an example; each is evaluated once."""
    lock = plans[request.param]
    plan = json.loads((nix.root / lock.lstrip("/")).read_text(encoding="utf-8"))
    return request.param, plan, nix.evaluate("nix/hosts.nix", {"lock": lock})
