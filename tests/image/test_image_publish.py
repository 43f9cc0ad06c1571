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
    assert lines[6:10] == [
        f"| {name} | `{digest}` | {size} |"
        for name, digest, size in zip(
            ("base", "cuda", "rest", "glue"), image.layers, sizes, strict=True
        )
    ]
    lock = oci.Layout(built).json(image.config)["config"]["Labels"]["dev.spark-appliance.lock"]
    assert lines[10:] == [
        "",
        "| label of full | value |",
        "|---|---|",
        "| dev.spark-appliance.debian-snapshot | `20260101T000000Z` |",
        f"| dev.spark-appliance.lock | `{lock}` |",
        "| dev.spark-appliance.profile | `full` |",
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


def test_a_page_that_is_no_text(built: Path, tmp_path: Path) -> None:
    page = tmp_path / "digests.md"
    page.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"digests\.md: error: no UTF-8 text"):
        publish.write(page, [publish.read(built)])
    assert page.read_bytes() == b"\xff\xfe"


@pytest.mark.parametrize(
    ("history", "names"),
    [
        ([{"created_by": "make a"}, {"created_by": "CMD x", "empty_layer": True}, {}], ["a", "-"]),
        ([{"created_by": ""}, {"created_by": "b"}], ["-", "b"]),
        ([{"created_by": "make a"}], ["-", "-"]),
        (None, ["-", "-"]),
    ],
)
def test_images_of_others(history: object, names: list[str], tmp_path: Path) -> None:
    layout = oci.Layout(tmp_path)
    layout.create()
    config = {} if history is None else {"history": history}
    image = oci.write_image(
        layout, config=config, layers=[layout.put(b"1"), layout.put(b"22")], reference="x:1-full",
        sbom=b"{}", variant="v8", architecture="arm64",
    )  # fmt: skip
    read = publish.read(tmp_path)
    assert read.layers == tuple(zip(names, image.layers, (1, 2), strict=True))


def test_a_config_that_is_none(tmp_path: Path) -> None:
    layout = oci.Layout(tmp_path)
    layout.create()
    oci.write_image(
        layout, config={"history": ["a"]}, layers=[layout.put(b"1")], reference="x:1-full",
        sbom=b"{}", variant="v8", architecture="arm64",
    )  # fmt: skip
    with pytest.raises(InputError, match="not as OCI's image-spec"):
        publish.read(tmp_path)


@pytest.mark.parametrize("command", ["digests", "check"])
def test_a_folder_without_an_image(command: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["image", command, str(tmp_path)])
    assert isinstance(done.exception, InputError)
    text = str(done.exception)
    assert text.startswith(f"{tmp_path}: error: no image in this folder")
    assert "remedy: make one: spark-appliance image build -o DIR" in text


def test_the_committed_page_has_the_marks() -> None:
    text = (Path(__file__).parents[2] / "docs" / "digests.md").read_text()
    assert text.index(publish.BEGIN) < text.index(publish.END)
