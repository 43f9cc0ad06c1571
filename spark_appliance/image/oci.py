"""An OCI image layout (image-spec 1.1): blobs, manifest, index."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_appliance.errors import InputError, Location

LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
"""Uncompressed: gzip and zstd bytes depend on library version and threads, and so would the
digest. Whoever moves the image compresses it for the way."""
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
SBOM_TYPE = "application/vnd.cyclonedx+json"
REF_NAME = "org.opencontainers.image.ref.name"


@dataclass(frozen=True, slots=True)
class Blob:
    """A blob's digest ("sha256:...") and size in bytes."""

    digest: str
    size: int

    def descriptor(self, media_type: str) -> dict[str, Any]:
        """Return the OCI descriptor."""
        return {"mediaType": media_type, "digest": self.digest, "size": self.size}


def canonical(data: Any) -> bytes:
    """Return JSON with sorted keys and without spaces, ASCII only."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


class Layout:
    """A folder in which a layout is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def blobs(self) -> Path:
        """The folder of the blobs."""
        return self.folder / "blobs" / "sha256"

    def path(self, digest: str) -> Path:
        """Return where the blob of a digest lies."""
        return self.blobs / digest.removeprefix("sha256:")

    def create(self) -> None:
        """Make the folders."""
        self.blobs.mkdir(parents=True)

    def put(self, content: bytes) -> Blob:
        """Write a small blob."""
        digest = "sha256:" + hashlib.sha256(content).hexdigest()
        self.path(digest).write_bytes(content)
        return Blob(digest, len(content))

    def put_stream(self, chunks: Iterable[bytes]) -> Blob:
        """Write a blob from a stream; it gets its name when it is whole."""
        partial = self.blobs / f"partial-{os.getpid()}"
        total = hashlib.sha256()
        size = 0
        try:
            with partial.open("wb", buffering=1 << 20) as file:
                for chunk in chunks:
                    total.update(chunk)
                    size += len(chunk)
                    file.write(chunk)
            digest = "sha256:" + total.hexdigest()
            partial.rename(self.path(digest))
        finally:
            partial.unlink(missing_ok=True)
        return Blob(digest, size)

    def json(self, digest: str) -> Any:
        """Read a JSON blob.

        Raises:
            InputError: missing or not JSON.
        """
        return _read_json(self.path(digest))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError.one(
            "image.layout", f"cannot read: {error}", where=Location(str(path))
        ) from None


@dataclass(frozen=True, slots=True)
class Image:
    """What identifies an image: manifest and config digest (the image id), and its layers."""

    manifest: str
    config: str
    layers: tuple[str, ...]


def write_image(
    layout: Layout,
    *,
    config: Mapping[str, Any],
    layers: Sequence[Blob],
    reference: str,
    sbom: bytes,
    variant: str,
    architecture: str,
) -> Image:
    """Write config, manifest, SBOM and index over layers that are already there.

    ``manifest.json`` is for ``docker load`` of engines that do not read OCI layouts.
    """
    config_blob = layout.put(canonical(config))
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": config_blob.descriptor(CONFIG_TYPE),
        "layers": [layer.descriptor(LAYER_TYPE) for layer in layers],
    }
    manifest_blob = layout.put(canonical(manifest))
    subject = manifest_blob.descriptor(MANIFEST_TYPE)
    empty = layout.put(b"{}")
    attached = layout.put(
        canonical(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST_TYPE,
                "artifactType": SBOM_TYPE,
                "config": empty.descriptor(EMPTY_TYPE),
                "layers": [layout.put(sbom).descriptor(SBOM_TYPE)],
                "subject": subject,
            }
        )
    )
    platform = {"architecture": architecture, "os": "linux", "variant": variant}
    index = {
        "schemaVersion": 2,
        "mediaType": INDEX_TYPE,
        "manifests": [
            {**subject, "platform": platform, "annotations": {REF_NAME: reference}},
            {**attached.descriptor(MANIFEST_TYPE), "artifactType": SBOM_TYPE},
        ],
    }
    (layout.folder / "index.json").write_bytes(canonical(index))
    (layout.folder / "oci-layout").write_bytes(canonical({"imageLayoutVersion": "1.0.0"}))
    docker = {
        "Config": _relative(config_blob),
        "RepoTags": [reference],
        "Layers": [_relative(layer) for layer in layers],
    }
    (layout.folder / "manifest.json").write_bytes(canonical([docker]))
    return Image(manifest_blob.digest, config_blob.digest, tuple(b.digest for b in layers))


def _relative(blob: Blob) -> str:
    return "blobs/sha256/" + blob.digest.removeprefix("sha256:")


def read_index(folder: Path) -> Any:
    """Return the index of a layout.

    Raises:
        InputError: missing or not JSON.
    """
    path = folder / "index.json"
    if not path.exists():
        raise InputError.one(
            "image.layout",
            "no image in this folder (no index.json)",
            "make one: spark-appliance image build -o DIR",
            Location(str(folder)),
        )
    return _read_json(path)


def read_image(folder: Path) -> Image:
    """Read the image of a layout that this program wrote.

    Raises:
        InputError: the folder is no such layout.
    """
    index = read_index(folder)
    try:
        digest = next(
            item["digest"] for item in index["manifests"] if REF_NAME in item.get("annotations", {})
        )
        manifest = Layout(folder).json(digest)
        layers = tuple(layer["digest"] for layer in manifest["layers"])
        return Image(digest, manifest["config"]["digest"], layers)
    except (KeyError, StopIteration, TypeError):
        raise InputError.one(
            "image.layout", "no image in this layout", where=Location(str(folder))
        ) from None
