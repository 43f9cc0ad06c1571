"""docs/digests.md against this tree, without a build.

An image id is the hash of a config, which names the hashes of layers and plugins: all of them stand
on the page, so id and manifest can be made again from the page, the recipe and the locks. Whether
the layers are what this tree makes is shown by the builds of ``test_image_smoke``.

    SPARK_IMAGE=DIR pytest tests/image/test_image_digests.py    # DIR: a built full image
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import image_download as real
import pytest

from spark_appliance.image import build, layer, oci, plugins, publish
from spark_appliance.image.wheels import Layout

PAGE = (real.ROOT / "docs" / "digests.md").read_text()
TABLES = PAGE.partition(publish.BEGIN)[2].partition(publish.END)[0]
PROFILES = [name for name, profile in real.RECIPE.profiles.items() if not profile.refused]
STALE = "docs/digests.md is older than the tree: build the image and write the page anew"


@dataclass(frozen=True)
class Row:
    """What the page says of one profile."""

    reference: str
    image: oci.Image
    layers: list[layer.Result]
    labels: dict[str, str]


def row(profile: str) -> Row:
    cells = {
        lines[0]: [[cell.strip(" `") for cell in line.split(" | ")] for line in lines[2:]]
        for block in TABLES.strip().split("\n\n")
        for lines in [[line.strip("| ") for line in block.splitlines()]]
    }
    (found,) = [row for row in cells["profile | reference | manifest | image id"]
                if row[0] == profile]  # fmt: skip
    layers = [
        layer.Result(name, "", digest, int(size), 0, (), {})
        for name, digest, size in cells[f"layer of {profile} | digest | bytes"]
    ]
    image = oci.Image(found[2], found[3], tuple(one.digest for one in layers))
    labels = dict(cells[f"label of {profile} | value"])
    return Row(found[1], image, layers, labels)


def plugin_labels(labels: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in labels.items() if ".plugin." in name}


@pytest.mark.parametrize("profile", PROFILES)
def test_the_page_fits_recipe_locks_and_plugins(profile: str, tmp_path: Path) -> None:
    said = row(profile)
    # their libraries would have to be compiled: what is in no label is the same without them
    loaded = tuple(
        plugins.load(real.ROOT / "pkgs" / name) for name in real.RECIPE.profiles[profile].plugins
    )
    request = build.Request(real.RECIPE, real.LOCK, real.chosen(profile), loaded, {})
    assert said.reference == build.reference_of(request)
    assert [one.name for one in said.layers] == [*(j.name for j in build.jobs(request)), "glue"]
    config = build.config(request, Layout(real.RECIPE.target.python), said.layers)
    labels = config["config"]["Labels"]
    for plugin in loaded:
        name = f"{build.LABEL}plugin.{plugin.name}"
        if plugin.name in real.RECIPE.native:
            assert said.labels[name].startswith(f"{plugin.version} sha256:"), STALE
            labels[name] = said.labels[name]
    own = {name: value for name, value in labels.items() if name.startswith(build.LABEL)}
    assert said.labels == own, STALE
    made = oci.Layout(tmp_path)
    made.create()
    image = oci.write_image(
        made,
        config=config,
        layers=[one.blob for one in said.layers],
        reference=said.reference,
        sbom=b"{}",
        variant=real.RECIPE.target.variant,
        architecture=real.RECIPE.target.architecture,
    )
    assert image == said.image, STALE


def test_profiles_have_the_same_plugins() -> None:
    """The slow test builds tools, not full: a plugin written into one row alone is seen here."""
    full, tools = (plugin_labels(row(profile).labels) for profile in ("full", "tools"))
    assert full == tools, STALE
    assert len(full) == len(real.RECIPE.profiles["full"].plugins)


def test_a_built_full_image_is_the_one_of_the_page() -> None:
    given = os.environ.get("SPARK_IMAGE")
    if not given:
        pytest.skip("SPARK_IMAGE does not name a built full image")
    found = publish.read(Path(given))
    assert found.profile == "full"
    assert found.image == row("full").image, STALE
    for line in publish.tables([found]).splitlines():
        assert line in TABLES.splitlines(), STALE
