"""What a user copies works as it is."""

from __future__ import annotations

import pytest
from nixtool import REPOSITORY, Nix

TEMPLATE = REPOSITORY / "templates" / "default"
EXAMPLE = REPOSITORY / "examples" / "three-spark-triangle"


@pytest.mark.parametrize("name", ["cluster.yaml", "cluster.lock.json"])
def test_it_starts_from_the_triangle_example(name: str) -> None:
    assert (TEMPLATE / name).read_bytes() == (EXAMPLE / name).read_bytes()


@pytest.mark.nix
def test_it_gives_hosts_images_and_the_command(nix: Nix) -> None:
    outputs = nix.evaluate("template.nix")
    assert outputs["hosts"] == {name: name for name in ("spark1", "spark2", "spark3")}
    assert outputs["image"].endswith(".drv")
    assert outputs["firstBoot"].endswith(".drv")
    assert outputs["firstBoot"] != outputs["image"]
    assert outputs["app"] == "app"
