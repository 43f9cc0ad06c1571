"""The bill of materials of the environment: CycloneDX 1.6, the same bytes for the same lock."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cyclonedx.model.license import License

    from audit.metadata import Licence

EPOCH = datetime(1980, 1, 1, tzinfo=UTC)
"""The library wants a time; a fixed one keeps the bytes equal (the oldest that a ZIP can hold)."""

NAMESPACE = uuid.uuid5(uuid.NAMESPACE_OID, "spark-appliance/sglang-env")


def build(
    lock: Mapping[str, Any], project: Mapping[str, Any], licences: Mapping[str, Licence]
) -> str:
    """Return the document as JSON text.

    Args:
        lock: the parsed, pruned lock.
        project: `[tool.poetry]` of pyproject.toml.
        licences: by package name, as the wheels state them.
    """
    root = Component(
        type=ComponentType.APPLICATION,
        name=project["name"],
        version=project["version"],
        description=project["description"],
        bom_ref=project["name"],
    )
    components = {entry["name"]: _component(entry, licences) for entry in lock["package"]}
    bom = Bom(
        components=components.values(),
        serial_number=uuid.uuid5(NAMESPACE, json.dumps(lock["package"], sort_keys=True)),
    )
    bom.metadata.timestamp = EPOCH
    bom.metadata.component = root
    bom.register_dependency(
        root,
        [
            components[canonicalize_name(name)]
            for name in project["dependencies"]
            if name != "python"
        ],
    )
    for entry in lock["package"]:
        bom.register_dependency(
            components[entry["name"]],
            [components[canonicalize_name(name)] for name in entry.get("dependencies", {})],
        )
    document = json.loads(JsonV1Dot6(bom).output_as_string())
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _component(entry: Mapping[str, Any], licences: Mapping[str, Licence]) -> Component:
    file = entry["files"][0]
    return Component(
        type=ComponentType.LIBRARY,
        name=entry["name"],
        version=entry["version"],
        description=entry["description"],
        bom_ref=f"{entry['name']}@{entry['version']}",
        purl=PackageURL("pypi", name=entry["name"], version=entry["version"]),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=file["hash"].removeprefix("sha256:"))],
        licenses=_licences(licences[entry["name"]]),
        properties=[Property(name="spark-appliance:wheel", value=file["file"])],
    )


def _licences(licence: Licence) -> Iterable[License]:
    """Return the SPDX expression alone if there is one, else every name that the wheel states."""
    if licence.expression:
        return [LicenseExpression(licence.expression)]
    names = {name for name in (licence.name, *licence.classifiers) if name}
    return [DisjunctiveLicense(name=name) for name in sorted(names)]
