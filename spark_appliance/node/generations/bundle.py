"""What arrives from the control machine: files with their content, and what to run afterwards."""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import dataclass
from typing import Any, Final

from spark_appliance.node.errors import PlanError
from spark_appliance.node.generations.disk import Kind, digest

VERSION: Final = 1
"""Version of the bundle and of a generation's manifest."""

_PATH: Final = re.compile(r"/(etc|usr/local)/[^\0\n]+")


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a generation; a link's content is its target."""

    path: str
    kind: Kind
    sha256: str
    mode: int
    owner: str
    group: str

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "path": self.path,
            "kind": self.kind,
            "sha256": self.sha256,
            "mode": f"{self.mode:04o}",
            "owner": self.owner,
            "group": self.group,
        }


@dataclass(frozen=True, slots=True)
class Action:
    """A command to run after a switch that touched a path beginning with one of ``paths``.

    ``needs``: a program or file without which it is skipped (another network manager, no NFS).
    ``boot``: also run when a boot takes a switch back. Then what starts later reads the files
    anyway, and waiting for it would wait for ourselves.
    """

    argv: tuple[str, ...]
    paths: tuple[str, ...]
    needs: str | None
    seconds: int
    boot: bool

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "argv": list(self.argv),
            "paths": list(self.paths),
            "needs": self.needs,
            "seconds": self.seconds,
            "boot": self.boot,
        }


@dataclass(frozen=True, slots=True)
class Watch:
    """Somebody else's files that would contradict ours: a glob, and words that must not occur."""

    pattern: str
    words: tuple[str, ...]
    advice: str

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"pattern": self.pattern, "words": list(self.words), "advice": self.advice}


@dataclass(frozen=True, slots=True)
class Manifest:
    """A generation without the contents."""

    label: str
    entries: tuple[Entry, ...]
    actions: tuple[Action, ...]
    watches: tuple[Watch, ...]

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "version": VERSION,
            "label": self.label,
            "files": [entry.as_json() for entry in self.entries],
            "actions": [action.as_json() for action in self.actions],
            "watches": [watch.as_json() for watch in self.watches],
        }


@dataclass(frozen=True, slots=True)
class Bundle:
    """A manifest with the content of every file by hash."""

    manifest: Manifest
    contents: dict[str, bytes]


def read_manifest(data: Any) -> Manifest:
    """Read a manifest.

    Raises:
        PlanError: when it is none of this version, or names a path outside /etc and /usr/local.
    """
    try:
        if data["version"] != VERSION:
            raise PlanError(f"bundle of version {data['version']!r}, this program reads {VERSION}")
        entries = tuple(_entry(item) for item in data["files"])
        actions = tuple(
            Action(
                tuple(map(str, item["argv"])),
                tuple(map(str, item["paths"])),
                item["needs"],
                int(item["seconds"]),
                bool(item["boot"]),
            )
            for item in data["actions"]
        )
        watches = tuple(
            Watch(str(item["pattern"]), tuple(map(str, item["words"])), str(item["advice"]))
            for item in data["watches"]
        )
        manifest = Manifest(str(data["label"]), entries, actions, watches)
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"the bundle is damaged ({type(error).__name__}: {error})") from None
    paths = [entry.path for entry in manifest.entries]
    if len(set(paths)) != len(paths):
        raise PlanError("the bundle is damaged: a path occurs twice")
    return manifest


def read_bundle(text: str) -> Bundle:
    """Read a bundle.

    Raises:
        PlanError: when it is damaged: no JSON, another version, a content with another hash.
    """
    try:
        data = json.loads(text)
        raw = data["contents"]
        contents = {
            str(name): base64.b64decode(str(value), validate=True) for name, value in raw.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, binascii.Error):
        raise PlanError("the bundle is damaged: it was cut off or is no JSON") from None
    manifest = read_manifest(data)
    for name, content in contents.items():
        if digest(content) != name:
            raise PlanError(f"the bundle is damaged: content {name} has another hash")
    for entry in manifest.entries:
        if entry.sha256 not in contents:
            raise PlanError(f"the bundle is damaged: {entry.path} has no content")
    return Bundle(manifest, contents)


def _entry(item: Any) -> Entry:
    path, kind = str(item["path"]), item["kind"]
    if not _PATH.fullmatch(path) or any(part in ("", ".", "..") for part in path[1:].split("/")):
        raise PlanError(f"the bundle would write {path!r}: only /etc and /usr/local are ours")
    if kind not in ("file", "link"):
        raise PlanError(f"the bundle has an entry of kind {kind!r}")
    return Entry(
        path,
        kind,
        str(item["sha256"]),
        int(item["mode"], 8),
        str(item["owner"]),
        str(item["group"]),
    )
