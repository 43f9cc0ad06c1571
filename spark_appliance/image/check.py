"""Examine a built image: what no image of ours may hold, and whether every library is found."""

from __future__ import annotations

import json
import posixpath
import re
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile

from spark_appliance.errors import Problem, read_failure
from spark_appliance.image import elf
from spark_appliance.image.oci import Layout, read_image

_STICKY_FOLDERS = frozenset({"tmp", "var/tmp", "run/lock"})
_SECRETS = re.compile(
    r"(^|/)(id_(rsa|dsa|ecdsa|ed25519)|\.netrc|\.pypirc|\.git-credentials|\.npmrc"
    r"|shadow-?|gshadow-?|ssh_host_\w+_key|[^/]+\.(p12|pfx|jks))$|(^|/)\.(aws|ssh|docker)/"
)
_PRIVATE_KEY = re.compile(rb"-----BEGIN ([A-Z]+ )?PRIVATE KEY-----\s")
_TEXT_LIMIT = 64 << 10  # bytes: a key file is smaller
_DEFAULT_FOLDERS = ("usr/lib/aarch64-linux-gnu", "usr/lib")


@dataclass(frozen=True, slots=True)
class Library:
    """What the loader needs to know of one ELF file; ``inherited`` marks DT_RPATH."""

    path: str
    needed: tuple[str, ...]
    search: tuple[str, ...]
    inherited: bool


@dataclass
class Root:
    """The merged file system of an image, as far as the checks need it."""

    modes: dict[str, int] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    libraries: list[Library] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    machines: dict[str, str] = field(default_factory=dict)
    cache: bytes = b""


def read(folder: Path) -> Root:
    """Read the layers of an image. Later layers win, as in the container.

    Raises:
        InputError: the folder holds no image.
    """
    root = Root()
    for digest in read_image(folder).layers:
        path = Layout(folder).path(digest)
        try:
            with tarfile.open(path, "r:") as archive:
                for member in archive:
                    _read_member(root, member, archive)
        except OSError as error:
            raise read_failure(path, error) from None
    return root


def _read_member(root: Root, member: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
    name = member.name
    if member.issym():
        root.links[name] = member.linkname
        return
    root.modes[name] = member.mode
    if not member.isreg():
        return
    file = archive.extractfile(member)
    if file is None:
        return
    head = file.read(4)
    file.seek(0)
    if head == elf.MAGIC:
        _read_elf(root, name, file)
    elif member.size <= _TEXT_LIMIT and _PRIVATE_KEY.search(file.read()):
        root.keys.append(name)
    if name == "etc/ld.so.cache":
        file.seek(0)
        root.cache = file.read()


def _read_elf(root: Root, name: str, file: IO[bytes]) -> None:
    try:
        image = ELFFile(file)
        if image.header.e_machine != "EM_AARCH64":
            root.machines[name] = str(image.header.e_machine)
            return
        tags: dict[str, list[str]] = defaultdict(list)
        for segment in image.iter_segments():
            if isinstance(segment, DynamicSegment):
                for tag in segment.iter_tags():
                    for attribute in ("needed", "rpath", "runpath"):
                        if attribute in vars(tag):
                            tags[attribute].append(vars(tag)[attribute])
    except ELFError:
        return
    paths = tags["runpath"] or tags["rpath"]
    root.libraries.append(
        Library(
            name,
            tuple(tags["needed"]),
            tuple(part for entry in paths for part in entry.split(":") if part),
            inherited=not tags["runpath"] and bool(tags["rpath"]),
        )
    )


def problems(root: Root, expected: Mapping[str, str]) -> list[Problem]:
    """Return what is wrong.

    Args:
        root: the image.
        expected: library names that are not found by the loader's rules, with the reason why
            that is right (they come with the driver, are loaded first, or are optional).
    """
    found = list(_files(root))
    lost = unresolved(root)
    found += [
        Problem(
            "image.library-missing",
            f"{name}: needed by {', '.join(users[:3])}{' ...' if len(users) > 3 else ''}",
        )
        for name, users in sorted(lost.items())
        if name not in expected
    ]
    return found


def _files(root: Root) -> Iterator[Problem]:
    for path, mode in sorted(root.modes.items()):
        if mode & 0o6000:
            yield Problem("image.set-id", f"{path}: mode {mode:o}")
        if mode & 0o002 and not (path in _STICKY_FOLDERS and mode & 0o1000):
            yield Problem("image.world-writable", f"{path}: mode {mode:o}")
        if _SECRETS.search(path):
            yield Problem("image.secret", f"{path}: a name of secrets")
        if path.endswith(".pyc"):
            yield Problem("image.pyc", f"{path}: compiled code")
    for path in sorted(root.keys):
        yield Problem("image.secret", f"{path}: holds a private key")


def cached_names(cache: bytes) -> frozenset[str]:
    """Return the strings of ld.so.cache: names of libraries and their paths."""
    return frozenset(part.decode("utf-8", "replace") for part in cache[48:].split(b"\0"))


def unresolved(root: Root) -> dict[str, list[str]]:
    """Return library names that the loader would not find, with the files that need them.

    A library that a file with DT_RPATH may load inherits its path; that is followed for files
    of the same top folder in site-packages, where such siblings live.
    """
    cached = cached_names(root.cache)
    present = root.modes.keys() | root.links.keys()
    inherited = _inherited(root.libraries)
    lost: dict[str, list[str]] = defaultdict(list)
    for library in root.libraries:
        folders = [
            *_search(library.path, library.search), *inherited[_package(library.path)],
            *_DEFAULT_FOLDERS,
        ]  # fmt: skip
        for name in library.needed:
            if name not in cached and not any(f"{folder}/{name}" in present for folder in folders):
                lost[name].append(library.path)
    return dict(lost)


def _search(path: str, entries: Iterable[str]) -> list[str]:
    origin = "/" + posixpath.dirname(path)
    return [
        posixpath.normpath(entry.replace("${ORIGIN}", origin).replace("$ORIGIN", origin)).lstrip(
            "/"
        )
        for entry in entries
    ]


def _package(path: str) -> str:
    """Return the folder below site-packages, with auditwheel's ``.libs`` beside it merged."""
    _, found, rest = path.partition("/site-packages/")
    return rest.split("/")[0].removesuffix(".libs") if found else ""


def _inherited(libraries: Iterable[Library]) -> dict[str, list[str]]:
    paths: dict[str, list[str]] = defaultdict(list)
    for library in libraries:
        if library.inherited and _package(library.path):
            paths[_package(library.path)] += _search(library.path, library.search)
    return paths


def expected_libraries(audit: Path) -> dict[str, str]:
    """Return the libraries that the audit of the wheels explains.

    Args:
        audit: pkgs/sglang-env, with libraries.json and the results of its audit.

    Raises:
        InputError: a table cannot be read.
    """
    try:
        table = json.loads((audit / "libraries.json").read_text(encoding="utf-8"))
        results = json.loads((audit / "audit/results/elf.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise read_failure(audit, error) from None
    driver = table["providers"]["driver"]
    reasons = dict.fromkeys(driver["libraries"], driver["why"])
    for libraries in table["absent"].values():
        reasons |= libraries
    for name, users in results["without_search_path"].items():
        reasons.setdefault(name, f"loaded first by the Python code of {', '.join(users)}")
    return reasons
