"""Our own Python projects, installed into the last layer straight from their source.

A build back end would write its version into the wheel; these trees depend on the source alone.
A project may need one native library, which is compiled beforehand and given as a file.
"""

from __future__ import annotations

import csv
import hashlib
import io
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_appliance.errors import InputError, read_failure
from spark_appliance.image import elf
from spark_appliance.image.errors import ImageError
from spark_appliance.image.recipe import Native
from spark_appliance.image.tree import Tree
from spark_appliance.image.wheels import INSTALLER, Layout, console_script, record_hash


@dataclass(frozen=True, slots=True)
class Plugin:
    """A project: its folder, its package folder, and native libraries beside its modules."""

    name: str
    version: str
    package: Path
    project: Mapping[str, Any]
    libraries: Mapping[str, bytes]

    @property
    def digest(self) -> str:
        """sha256 over what is installed, for labels and for the reuse of a layer."""
        tree = Tree()
        install(tree, self, Layout("0"))
        total = hashlib.sha256()
        for path, entry in tree.sorted():
            content = entry.content if isinstance(entry.content, bytes) else b""
            total.update(f"{path}\0{entry.mode:o}\0{len(content)}\0".encode() + content)
        return total.hexdigest()


def load(folder: Path, native: Native | None = None, library: Path | None = None) -> Plugin:
    """Read a project, and check its native library if the recipe says that it has one.

    Raises:
        InputError: no readable pyproject.toml, or a native library that is missing or built for
            another machine.
    """
    path = folder / "pyproject.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise read_failure(path, error) from None
    tool = data["tool"]
    packages = (
        tool["scikit-build"]["wheel"]["packages"]
        if "scikit-build" in tool
        else tool["hatch"]["build"]["targets"]["wheel"]["packages"]
    )
    project = data["project"]
    name = project["name"]
    files = {}
    if native is not None:
        files[native.library] = _read_library(name, library)
    return Plugin(name, project["version"], folder / packages[0], project, files)


def _read_library(name: str, library: Path | None) -> bytes:
    if library is None:
        raise InputError.one("image.plugin-library", f"{name} needs its native library")
    try:
        content = library.read_bytes()
    except OSError as error:
        raise read_failure(library, error) from None
    if elf.soname(content) is None:
        raise InputError.one("image.plugin-library", f"{library}: not a shared library for aarch64")
    return content


def install(tree: Tree, plugin: Plugin, layout: Layout) -> None:
    """Add a project: modules, native library, metadata, entry points, scripts and RECORD."""
    files: dict[str, tuple[bytes, int]] = {}
    top = plugin.package.name
    try:
        for path in sorted(plugin.package.rglob("*")):
            relative = path.relative_to(plugin.package)
            if path.is_file() and "__pycache__" not in relative.parts and path.suffix != ".so":
                files[f"{top}/{relative.as_posix()}"] = (path.read_bytes(), 0o644)
        for name, content in plugin.libraries.items():
            files[f"{top}/{name}"] = (content, 0o755)
    except OSError as error:
        raise ImageError(f"{error.filename}: cannot read: {error.strerror}") from None
    info = f"{plugin.name.replace('-', '_')}-{plugin.version}.dist-info"
    files[f"{info}/METADATA"] = (_metadata(plugin.project).encode(), 0o644)
    files[f"{info}/INSTALLER"] = (f"{INSTALLER}\n".encode(), 0o644)
    scripts = plugin.project.get("scripts", {})
    groups = dict(plugin.project.get("entry-points", {}))
    if scripts:
        groups["console_scripts"] = scripts
    if groups:
        files[f"{info}/entry_points.txt"] = (_entry_points(groups).encode(), 0o644)
    rows = []
    for name, target in sorted(scripts.items()):
        module, _, attribute = target.partition(":")
        content = console_script(layout, module, attribute)
        tree.file(f"{layout.prefix}/bin/{name}", content, 0o755)
        rows.append((f"../../../bin/{name}", str(record_hash(content)), str(len(content))))
    for name, (content, mode) in files.items():
        tree.file(f"{layout.site}/{name}", content, mode)
        rows.append((name, str(record_hash(content)), str(len(content))))
    rows.append((f"{info}/RECORD", "", ""))
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(sorted(rows))
    tree.file(f"{layout.site}/{info}/RECORD", text.getvalue())


def _metadata(project: Mapping[str, Any]) -> str:
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {project['version']}",
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}",
        f"Requires-Python: {project['requires-python']}",
        *(f"Requires-Dist: {item}" for item in project.get("dependencies", ())),
    ]
    return "\n".join(lines) + "\n"


def _entry_points(groups: Mapping[str, Mapping[str, str]]) -> str:
    return "\n".join(
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in sorted(items.items()))
        for group, items in sorted(groups.items())
    )
