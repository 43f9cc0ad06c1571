"""The tables of docs/digests.md, made from built images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spark_appliance.errors import InputError, Location, read_failure
from spark_appliance.files import write_text
from spark_appliance.image.errors import write_failure
from spark_appliance.image.oci import REF_NAME, Image, Layout, read_image, read_index

BEGIN = "<!-- begin: spark-appliance image digests -->"
END = "<!-- end: spark-appliance image digests -->"


@dataclass(frozen=True, slots=True)
class Published:
    """One image: its reference, what identifies it, and its layers as (name, digest, bytes)."""

    reference: str
    image: Image
    layers: tuple[tuple[str, str, int], ...]

    @property
    def profile(self) -> str:
        """The profile, which the reference ends with."""
        return self.reference.rpartition("-")[2]


def read(folder: Path) -> Published:
    """Read a built image.

    Raises:
        InputError: the folder holds none.
    """
    image, layout = read_image(folder), Layout(folder)
    annotations = (item.get("annotations", {}) for item in read_index(folder)["manifests"])
    reference = next(found[REF_NAME] for found in annotations if REF_NAME in found)
    history = layout.json(image.config)["history"]
    sizes = [layer["size"] for layer in layout.json(image.manifest)["layers"]]
    names = [entry["created_by"].split()[-1] for entry in history]
    return Published(reference, image, tuple(zip(names, image.layers, sizes, strict=True)))


def tables(images: Sequence[Published]) -> str:
    """Return the images as one Markdown table, and the layers of each as another."""
    lines = ["| profile | reference | manifest | image id |", "|---|---|---|---|"]
    lines += [
        f"| {one.profile} | `{one.reference}` | `{one.image.manifest}` | `{one.image.config}` |"
        for one in images
    ]
    for one in images:
        lines += ["", f"| layer of {one.profile} | digest | bytes |", "|---|---|---|"]
        lines += [f"| {name} | `{digest}` | {size} |" for name, digest, size in one.layers]
    return "\n".join(lines) + "\n"


def write(page: Path, images: Sequence[Published]) -> None:
    """Replace what stands between the two marks of a page.

    Raises:
        InputError: the page cannot be read, or lacks the marks.
        ImageError: it cannot be written.
    """
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise read_failure(page, error) from None
    before, begin, rest = text.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError.one(
            "image.digests", "has no marks for the tables", f"put in: {BEGIN} and {END}",
            Location(str(page)),
        )  # fmt: skip
    try:
        write_text(page, f"{before}{begin}{tables(images)}{end}{after}")
    except OSError as error:
        raise write_failure(page, error) from None
