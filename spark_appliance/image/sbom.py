"""The bill of materials of an image: CycloneDX 1.6, written by cyclonedx-python-lib.

It is attached to the image as an artefact, beside the manifest: the digest of the image does not
depend on the version of that library.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, License, LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from spark_appliance.image.lock import DebPackage, Selection, Wheel
from spark_appliance.image.plugins import Plugin

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_OID, "spark-appliance/image")
_TIME = datetime(1980, 1, 1, tzinfo=UTC)
"""The library wants a time; a fixed one keeps the bytes equal."""


def read_licences(wheel_lock: Path) -> dict[str, Any]:
    """Return what the wheels state of their licences, as the audit beside the lock noted it."""
    path = wheel_lock.parent / "audit" / "results" / "licences.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["packages"])
    except (OSError, ValueError, KeyError):
        return {}


def build(
    selection: Selection,
    plugins: Sequence[Plugin],
    licences: Mapping[str, Any],
    *,
    name: str,
    version: str,
    distribution: str,
) -> bytes:
    """Return the document.

    Args:
        selection: the packages and wheels of the image.
        plugins: our own projects in it.
        licences: by wheel name, as ``read_licences`` returns them.
        name: name of the image.
        version: version of the image.
        distribution: qualifier of Debian package URLs, such as "trixie".
    """
    components = [
        *(_deb(package, distribution) for package in selection.debs),
        *(_wheel(wheel, licences.get(wheel.name, {})) for wheel in selection.wheels),
        *(_plugin(plugin) for plugin in plugins),
    ]
    bom = Bom(components=components, serial_number=uuid.uuid5(_NAMESPACE, selection.digest))
    bom.metadata.timestamp = _TIME
    root = Component(type=ComponentType.CONTAINER, name=name, version=version, bom_ref=name)
    bom.metadata.component = root
    bom.register_dependency(root, components)
    document = json.loads(JsonV1Dot6(bom).output_as_string())
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()


def _sha256(digest: str) -> list[HashType]:
    return [HashType(alg=HashAlgorithm.SHA_256, content=digest)]


def _deb(package: DebPackage, distribution: str) -> Component:
    return Component(
        type=ComponentType.LIBRARY,
        name=package.name,
        version=package.version,
        bom_ref=f"deb:{package.name}@{package.version}",
        purl=PackageURL(
            "deb", "debian", package.name, package.version,
            {"arch": package.architecture, "distro": distribution},
        ),
        hashes=_sha256(package.sha256),
        licenses=[DisjunctiveLicense(name=item) for item in package.licences],
        properties=[Property(name="spark-appliance:pool", value=package.pool)],
    )  # fmt: skip


def _wheel(wheel: Wheel, licence: Mapping[str, Any]) -> Component:
    return Component(
        type=ComponentType.LIBRARY,
        name=wheel.name,
        version=wheel.version,
        bom_ref=f"pypi:{wheel.name}@{wheel.version}",
        purl=PackageURL("pypi", name=wheel.name, version=wheel.version),
        hashes=_sha256(wheel.sha256),
        licenses=_licences(licence),
        properties=[Property(name="spark-appliance:wheel", value=wheel.file)],
    )


def _plugin(plugin: Plugin) -> Component:
    return Component(
        type=ComponentType.LIBRARY,
        name=plugin.name,
        version=plugin.version,
        bom_ref=f"plugin:{plugin.name}@{plugin.version}",
        licenses=[LicenseExpression(str(plugin.project["license"]))],
        properties=[Property(name="spark-appliance:tree", value=plugin.digest)],
    )


def _licences(licence: Mapping[str, Any]) -> Iterable[License]:
    if licence.get("expression"):
        return [LicenseExpression(licence["expression"])]
    names = {licence.get("name"), *licence.get("classifiers", ())}
    return [DisjunctiveLicense(name=name) for name in sorted(filter(None, names))]
