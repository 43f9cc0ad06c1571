"""The tables of docs/digests.md, made from built images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_appliance.errors import InputError, Location, read_failure
from spark_appliance.files import write_text
from spark_appliance.image.build import LABEL
from spark_appliance.image.errors import write_failure
from spark_appliance.image.oci import REF_NAME, Image, Layout, read_image, read_index

BEGIN = "<!-- begin: spark-appliance image digests -->"
END = "<!-- end: spark-appliance image digests -->"

_UNNAMED = "-"


@dataclass(frozen=True, slots=True)
class Published:
    """One image: its reference, what identifies it, and its layers as (name, digest, bytes).

    ``labels`` are those of its own labels that name what it was made of, as (name, value).
    """

    reference: str
    image: Image
    layers: tuple[tuple[str, str, int], ...]
    labels: tuple[tuple[str, str], ...]

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
    annotations = (item.get("annotations") or {} for item in read_index(folder)["manifests"])
    reference = next(found[REF_NAME] for found in annotations if REF_NAME in found)
    config = layout.json(image.config)
    try:
        sizes = [layer["size"] for layer in layout.json(image.manifest)["layers"]]
        names = _names(config.get("history") or [], len(sizes))
        labels = (config.get("config") or {}).get("Labels") or {}
        own = tuple(sorted((n, v) for n, v in labels.items() if n.startswith(LABEL)))
    except (KeyError, TypeError, AttributeError):
        raise InputError.one(
            "image.layout",
            "manifest or config is not as OCI's image-spec has it",
            "give a folder made by spark-appliance image build",
            Location(str(folder)),
        ) from None
    return Published(reference, image, tuple(zip(names, image.layers, sizes, strict=True)), own)


def _names(history: Sequence[dict[str, Any]], layers: int) -> list[str]:
    """Name each layer by the last word of what made it; history is optional in images of others."""
    words = [
        (entry.get("created_by") or "").split() for entry in history if not entry.get("empty_layer")
    ]
    if len(words) != layers:
        return [_UNNAMED] * layers
    return [found[-1] if found else _UNNAMED for found in words]


def tables(images: Sequence[Published]) -> str:
    """Return the images as one Markdown table, and layers and labels of each as two more."""
    lines = ["| profile | reference | manifest | image id |", "|---|---|---|---|"]
    lines += [
        f"| {one.profile} | `{one.reference}` | `{one.image.manifest}` | `{one.image.config}` |"
        for one in images
    ]
    for one in images:
        lines += ["", f"| layer of {one.profile} | digest | bytes |", "|---|---|---|"]
        lines += [f"| {name} | `{digest}` | {size} |" for name, digest, size in one.layers]
        if one.labels:
            lines += ["", f"| label of {one.profile} | value |", "|---|---|"]
            lines += [f"| {name} | `{value}` |" for name, value in one.labels]
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
    except UnicodeDecodeError:
        raise InputError.one(
            "image.digests", "no UTF-8 text", "give the page docs/digests.md", Location(str(page))
        ) from None
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
