"""Where generations are kept: ``/var/lib/spark/generations``.

Each has ``manifest.json`` and ``contents.json`` (contents by hash).
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from spark_appliance.node.errors import NodeError
from spark_appliance.node.generations.bundle import Bundle, Manifest, read_manifest
from spark_appliance.node.generations.disk import Kind, digest, flush_folder, put

FOLDER: Final = "var/lib/spark/generations"
KEPT: Final = 5
"""Generations that stay for a rollback, besides the current and the confirmed one."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A file of somebody else that ours replaced; it comes back on uninstall."""

    kind: Kind
    sha256: str
    mode: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class State:
    """What is installed.

    ``current``: whose files lie in place (0: none). ``confirmed``: the one to which the node
    returns by itself. ``switching``: the target of a switch that has begun and not ended;
    ``mixed``: every generation of which files may lie in place since then.
    ``activated``: whether the commands after the last switch all worked. ``shared``: paths that
    were there with our very content before us; they stay. ``folders``: made by us.
    """

    current: int = 0
    confirmed: int = 0
    switching: int | None = None
    mixed: tuple[int, ...] = ()
    activated: bool = True
    saved: dict[str, Saved] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    next: int = 1

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "version": 1,
            "current": self.current,
            "confirmed": self.confirmed,
            "switching": self.switching,
            "mixed": list(self.mixed),
            "activated": self.activated,
            "saved": {
                path: {
                    "kind": saved.kind,
                    "sha256": saved.sha256,
                    "mode": f"{saved.mode:04o}",
                    "uid": saved.uid,
                    "gid": saved.gid,
                }
                for path, saved in self.saved.items()
            },
            "shared": list(self.shared),
            "folders": list(self.folders),
            "next": self.next,
        }


class Store:
    """The generations below a root folder (``/`` on a node)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / FOLDER

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store: two installers at once would mix their files.

        Raises:
            NodeError: when another program holds it.
        """
        try:
            self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            handle = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise NodeError(f"cannot use {self.folder}: {error.strerror}; are you root?") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise NodeError(
                f"another install is at work on this node ({self.folder}/lock): wait for it"
            ) from None
        try:
            yield
        finally:
            os.close(handle)

    def state(self) -> State:
        """Return the state; a node without one has nothing installed.

        Raises:
            NodeError: when it cannot be read: without it nobody knows what is ours.
        """
        path = self.folder / "state.json"
        try:
            data = json.loads(path.read_bytes())
            return State(
                current=int(data["current"]),
                confirmed=int(data["confirmed"]),
                switching=None if data["switching"] is None else int(data["switching"]),
                mixed=tuple(map(int, data["mixed"])),
                activated=bool(data["activated"]),
                saved={
                    name: Saved(
                        item["kind"], item["sha256"], int(item["mode"], 8), item["uid"], item["gid"]
                    )
                    for name, item in data["saved"].items()
                },
                shared=tuple(data["shared"]),
                folders=tuple(data["folders"]),
                next=int(data["next"]),
            )
        except FileNotFoundError:
            return State()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise NodeError(f"cannot read {path}: {error}") from None

    def write_state(self, state: State) -> State:
        """Write the state in one step and return it."""
        text = json.dumps(state.as_json(), indent=1, sort_keys=True) + "\n"
        put(self.folder / "state.json", "file", text.encode(), 0o644, None)
        return state

    def add(self, bundle: Bundle, state: State) -> State:
        """Write a generation under the next number; it is complete or not there."""
        number = state.next
        state = self.write_state(replace(state, next=number + 1))
        final, partial = self.folder / str(number), self.folder / f"{number}.partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(mode=0o700)
            contents = {
                name: base64.b64encode(content).decode()
                for name, content in bundle.contents.items()
            }
            text = json.dumps(contents, sort_keys=True)
            put(partial / "contents.json", "file", text.encode(), 0o600, None)
            text = json.dumps(bundle.manifest.as_json(), indent=1, sort_keys=True) + "\n"
            put(partial / "manifest.json", "file", text.encode(), 0o600, None)
            partial.rename(final)
            flush_folder(self.folder)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise NodeError(f"cannot write {final}: {error.strerror}") from None
        return state

    def manifest(self, number: int) -> Manifest:
        """Return a generation; number 0 is the empty one.

        Raises:
            NodeError: when it is not there or damaged.
        """
        if number == 0:
            return Manifest("nothing", (), (), ())
        path = self.folder / str(number) / "manifest.json"
        try:
            return read_manifest(json.loads(path.read_bytes()))
        except (OSError, ValueError) as error:
            known = ", ".join(map(str, self.numbers())) or "none"
            raise NodeError(f"no generation {number} ({error}); there are: {known}") from None

    def contents(self, number: int) -> dict[str, bytes]:
        """Return a generation's contents by hash; number 0 has none.

        Raises:
            NodeError: when they are not there or damaged.
        """
        if number == 0:
            return {}
        path = self.folder / str(number) / "contents.json"
        try:
            data = json.loads(path.read_bytes())
            contents = {name: base64.b64decode(text) for name, text in data.items()}
        except (OSError, ValueError, AttributeError) as error:
            raise NodeError(f"generation {number} is damaged: {path}: {error}") from None
        wrong = [name for name, content in contents.items() if digest(content) != name]
        if wrong:
            raise NodeError(f"generation {number} is damaged: {path}: {wrong[0]} has another hash")
        return contents

    def save(self, sha256: str, content: bytes) -> None:
        """Keep the content of somebody else's file."""
        (self.folder / "saved").mkdir(mode=0o700, exist_ok=True)
        put(self.folder / "saved" / sha256, "file", content, 0o600, None)

    def saved_content(self, sha256: str) -> bytes:
        """Return the content of somebody else's file.

        Raises:
            NodeError: when it is not there.
        """
        path = self.folder / "saved" / sha256
        try:
            return path.read_bytes()
        except OSError as error:
            raise NodeError(f"cannot read {path}: {error.strerror}") from None

    def numbers(self) -> list[int]:
        """Return the complete generations, oldest first."""
        if not self.folder.is_dir():
            return []
        names = (path.name for path in self.folder.iterdir())
        return sorted(int(name) for name in names if name.isdecimal())

    def drop(self, numbers: set[int]) -> None:
        """Remove generations that nobody ever confirmed: a rollback must not lead to them."""
        for number in numbers - {0}:
            shutil.rmtree(self.folder / str(number), ignore_errors=True)

    def prune(self, state: State) -> None:
        """Remove what is too old for a rollback, and halves of a write that was cut off."""
        wanted = {state.current, state.confirmed, *state.mixed}
        for number in self.numbers()[:-KEPT]:
            if number not in wanted:
                shutil.rmtree(self.folder / str(number), ignore_errors=True)
        for path in self.folder.glob("*.partial"):
            shutil.rmtree(path, ignore_errors=True)
