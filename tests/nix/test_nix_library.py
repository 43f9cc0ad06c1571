"""The functions of the flake refuse what they cannot read, and the overlay has the packages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from nixtool import Nix, NixFailedError

pytestmark = pytest.mark.nix

EXAMPLE = "three-spark-triangle"


def test_the_overlay_has_the_flakes_packages(nix: Nix, plans: dict[str, str]) -> None:
    found = nix.evaluate("library.nix", {"lock": plans[EXAMPLE]})
    assert set(found) == {"spark-appliance", "spark-engram", "spark-tp-pad"}
    for name, paths in found.items():
        assert paths["overlay"] == paths["package"], name
        assert paths["package"].endswith(".drv")


def test_modules_of_a_node_that_the_plan_does_not_have_are_refused(
    nix: Nix, plans: dict[str, str]
) -> None:
    with pytest.raises(NixFailedError) as caught:
        nix.evaluate("library.nix", {"lock": plans[EXAMPLE], "refused": "fleet"})
    assert (
        "mkFleet: nodeModules has spark8, spark9, which the plan does not have;"
        " it has spark1, spark2, spark3" in str(caught.value)
    )


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_a_plan_of_another_version_is_refused(
    nix: Nix, plans: dict[str, str], version: Any
) -> None:
    plan = json.loads((nix.root / plans[EXAMPLE].lstrip("/")).read_text(encoding="utf-8"))
    plan["version"] = version
    file = nix.source.parent / "plans" / f"version-{version!r}" / "cluster.lock.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(plan), encoding="utf-8")
    with pytest.raises(NixFailedError) as caught:
        nix.evaluate("library.nix", {"lock": nix.inside(file), "refused": "plan"})
    message = str(caught.value)
    assert "this is no plan of version 1; render it anew" in message
    assert str(nix.inside(file)) in message
