"""The tables of docs/digests.md come from built images."""

from __future__ import annotations

from pathlib import Path

import image_inputs as inputs
import pytest
from click.testing import CliRunner

from spark_appliance.cli import cli
from spark_appliance.errors import InputError
from spark_appliance.image import oci, publish


@pytest.fixture
def built(tmp_path: Path) -> Path:
    out = tmp_path / "out"
    assert CliRunner().invoke(cli, inputs.write(tmp_path / "inputs").argv(out)).exit_code == 0
    return out


def test_the_tables_name_manifest_id_and_every_layer(built: Path) -> None:
    result = CliRunner().invoke(cli, ["image", "digests", str(built)], catch_exceptions=False)
    image = oci.read_image(built)
    lines = result.stdout.splitlines()
    assert lines[2] == f"| full | `small:1.0-full` | `{image.manifest}` | `{image.config}` |"
    sizes = [oci.Layout(built).path(digest).stat().st_size for digest in image.layers]
    assert lines[6:] == [
        f"| {name} | `{digest}` | {size} |"
        for name, digest, size in zip(
            ("base", "cuda", "rest", "glue"), image.layers, sizes, strict=True
        )
    ]


def test_only_what_stands_between_the_marks_is_replaced(built: Path, tmp_path: Path) -> None:
    page = tmp_path / "digests.md"
    page.write_text(f"before\n{publish.BEGIN}\nold\n{publish.END}\nafter\n")
    argv = ["image", "digests", str(built), "--write", str(page)]
    for _ in range(2):
        assert CliRunner().invoke(cli, argv, catch_exceptions=False).exit_code == 0
        tables = publish.tables([publish.read(built)])
        assert page.read_text() == f"before\n{publish.BEGIN}\n{tables}{publish.END}\nafter\n"


def test_a_page_without_marks_is_left_alone(built: Path, tmp_path: Path) -> None:
    page = tmp_path / "digests.md"
    page.write_text("text\n")
    with pytest.raises(InputError, match="no marks for the tables"):
        publish.write(page, [publish.read(built)])
    assert page.read_text() == "text\n"


def test_the_committed_page_has_the_marks() -> None:
    text = (Path(__file__).parents[2] / "docs" / "digests.md").read_text()
    assert text.index(publish.BEGIN) < text.index(publish.END)
