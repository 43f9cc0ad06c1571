"""Switch from one generation to another: what would change, what forbids it, and doing it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from spark_appliance.node.errors import NodeError
from spark_appliance.node.generations.bundle import Bundle, Entry, Manifest
from spark_appliance.node.generations.disk import (
    Found,
    digest,
    flush_folder,
    look,
    make_folders,
    owner_ids,
    put,
    remove,
)
from spark_appliance.node.generations.store import Saved, State, Store

Change = Literal["create", "replace", "chmod", "remove", "restore", "same"]

ASIDE: Final = ".spark-saved"
"""Suffix under which uninstall leaves a file of ours that somebody edited; nothing reads it."""

_MAX_DIFF_BYTES: Final = 200_000


class ConflictError(NodeError):
    """Files that are not ours, or no longer as we wrote them, are in the way: exit status 4."""

    exit_status = 4

    def __init__(self, conflicts: list[Conflict]) -> None:
        self.conflicts = conflicts
        lines = [f"{conflict.path}: {conflict.reason}" for conflict in conflicts]
        super().__init__(
            "nothing was changed: " + "; ".join(lines) + "; look at them (--diff), then move them "
            "away, or give --adopt: foreign files are kept and come back on uninstall"
        )


@dataclass(frozen=True, slots=True)
class Conflict:
    """A path that may not be overwritten without being asked."""

    path: str
    reason: str
    edited: bool


@dataclass(frozen=True, slots=True)
class Step:
    """What a switch does to one path."""

    path: str
    change: Change
    entry: Entry | None
    found: Found | None
    foreign: bool = False
    edited: bool = False


@dataclass(frozen=True, slots=True)
class Preview:
    """Everything a switch would do."""

    steps: tuple[Step, ...]
    conflicts: tuple[Conflict, ...]
    shared: tuple[str, ...]

    @property
    def changed(self) -> tuple[str, ...]:
        """Paths that would change."""
        return tuple(step.path for step in self.steps if step.change != "same")


def preview(store: Store, state: State, target: Manifest) -> Preview:
    """Compare the disk with a generation."""
    ours: dict[str, set[str]] = {}
    for number in sorted({state.current, *state.mixed}):
        for entry in store.manifest(number).entries:
            ours.setdefault(entry.path, set()).add(entry.sha256)
    steps: list[Step] = []
    conflicts: list[Conflict] = []
    shared: list[str] = []
    for entry in target.entries:
        found = look(_at(store.root, entry.path))
        owned = entry.path in ours and entry.path not in state.shared
        if found is None:
            steps.append(Step(entry.path, "create", entry, None))
            continue
        if found.kind == entry.kind and found.sha256 == entry.sha256:
            same_mode = entry.kind == "link" or found.mode == entry.mode
            if not owned:
                shared.append(entry.path)
            change: Change = "same" if same_mode or not owned else "chmod"
            steps.append(Step(entry.path, change, entry, found, foreign=not owned))
            continue
        edited = owned and found.sha256 not in ours[entry.path]
        if not owned:
            conflicts.append(Conflict(entry.path, "is not ours", edited=False))
        elif edited:
            conflicts.append(Conflict(entry.path, "was edited on the node", edited=True))
        steps.append(Step(entry.path, "replace", entry, found, foreign=not owned, edited=edited))
    wanted = {entry.path for entry in target.entries}
    for path in sorted(set(ours) - wanted):
        if path in state.shared:
            continue
        found = look(_at(store.root, path))
        gone: Change = "restore" if path in state.saved else "remove"
        if found is None and gone == "remove":
            continue
        edited = found is not None and found.sha256 not in ours[path]
        if found is not None and edited:
            if gone == "restore" and found.sha256 == state.saved[path].sha256:
                continue  # a switch that was cut off had put it back already
            conflicts.append(Conflict(path, "was edited on the node", edited=True))
        steps.append(Step(path, gone, None, found, edited=edited))
    return Preview(tuple(steps), tuple(conflicts), tuple(shared))


def drift(store: Store, state: State) -> list[dict[str, Any]]:
    """Return where the disk is not as the current generation wrote it.

    Raises:
        NodeError: when the generation or a file of it cannot be read.
    """
    return describe(preview(store, state, store.manifest(state.current)))


def switch(
    store: Store,
    number: int,
    *,
    adopt: bool = False,
    aside: bool = False,
    before: Callable[[], None] = lambda: None,
) -> tuple[State, Preview]:
    """Make a generation current; returns the new state and what was done.

    ``before`` runs once nothing forbids the switch any more and before anything changes.
    ``aside`` moves files of ours that were edited out of the way instead of refusing them.
    Interrupted anywhere, the next switch (to this or to any other generation) goes on from there.

    Raises:
        ConflictError: when foreign or edited files are in the way; nothing was changed.
        NodeError: when a file cannot be written.
    """
    state = store.state()
    target = store.manifest(number)
    plan = preview(store, state, target)
    stopped = [c for c in plan.conflicts if not (c.edited and aside)]
    if stopped and not adopt:
        raise ConflictError(list(stopped))
    before()
    saved = dict(state.saved)
    for step in plan.steps:
        if step.found is None or step.change not in ("replace", "remove"):
            continue
        if step.foreign or step.edited:
            store.save(step.found.sha256, step.found.content)
        if step.foreign and step.path not in saved:
            found = step.found
            saved[step.path] = Saved(found.kind, found.sha256, found.mode, found.uid, found.gid)
    wanted = {entry.path for entry in target.entries}
    shared = tuple(sorted((set(state.shared) & wanted - set(saved)) | set(plan.shared)))
    folders = [*state.folders]
    for step in plan.steps:
        if step.entry is not None:
            folders += _missing_folders(store.root, step.path, folders)
    state = store.write_state(
        replace(
            state,
            switching=number,
            mixed=tuple(sorted({state.current, number, *state.mixed})),
            saved=saved,
            shared=shared,
            folders=tuple(folders),
        )
    )
    contents = store.contents(number)
    for step in plan.steps:
        _do(store, state, contents, step, aside=aside)
    # only when everything is on the disk may the state say so
    for folder in sorted({_at(store.root, step.path).parent for step in plan.steps}):
        if folder.is_dir():
            flush_folder(folder)
    left = {path: item for path, item in saved.items() if path in wanted}
    state = store.write_state(
        replace(state, current=number, switching=None, mixed=(), activated=False, saved=left)
    )
    return state, plan


def confirm(store: Store) -> State:
    """Make the current generation the one to which the node returns.

    Raises:
        NodeError: when a switch was cut off.
    """
    state = store.state()
    if state.switching is not None:
        raise NodeError(
            f"the switch to generation {state.switching} was cut off: apply it again or roll back"
        )
    return store.write_state(replace(state, confirmed=state.current))


def remove_folders(store: Store, state: State) -> None:
    """Remove the folders that we made, as far as they are empty."""
    for name in reversed(state.folders):
        path = _at(store.root, name)
        try:
            path.rmdir()
        except OSError:
            continue


def same_generation(store: Store, state: State, manifest: Manifest) -> int | None:
    """Return the number of the current or half-done generation if it is this one."""
    for number in (state.switching, state.current):
        if number:
            other = store.manifest(number)
            if replace(other, label="") == replace(manifest, label=""):
                return number
    return None


def warnings(root: Path, manifest: Manifest) -> list[str]:
    """Return what other files on the node contradict this generation."""
    found = []
    own = {entry.path for entry in manifest.entries}
    for watch in manifest.watches:
        for path in sorted(root.glob(watch.pattern.lstrip("/"))):
            name = "/" + str(path.relative_to(root))
            if name in own or not path.is_file():
                continue
            try:
                text = path.read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            words = [word for word in watch.words if word in text]
            if words:
                found.append(f"{name} names {', '.join(words)}: {watch.advice}")
    return found


def difference(store: Store, bundle: Bundle, plan: Preview) -> str:
    """Return a unified diff of the disk against a bundle that was not applied yet."""
    parts = []
    for step in plan.steps:
        if step.change == "same":
            continue
        old = step.found.content if step.found else b""
        new = bundle.contents[step.entry.sha256] if step.entry else _restored(store, step)
        parts.append(_diff(step, old, new))
    return "".join(parts)


def _diff(step: Step, old: bytes, new: bytes) -> str:
    head = f"# {step.change} {step.path}" + (" (not ours)" if step.foreign else "")
    if step.change == "chmod" and step.entry is not None and step.found is not None:
        return f"{head}: mode {step.found.mode:04o} -> {step.entry.mode:04o}\n"
    if step.entry is not None and step.entry.kind == "link":
        return f"{head} -> {os.fsdecode(new)}\n"
    if len(new) > _MAX_DIFF_BYTES or b"\0" in new or b"\0" in old:
        return f"{head}: {len(old)} -> {len(new)} bytes, sha256 {digest(new)}\n"
    lines = difflib.unified_diff(
        old.decode(errors="replace").splitlines(keepends=True),
        new.decode(errors="replace").splitlines(keepends=True),
        fromfile=step.path if old else "/dev/null",
        tofile=step.path if step.entry or new else "/dev/null",
    )
    return f"{head}\n" + "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def _restored(store: Store, step: Step) -> bytes:
    item = store.state().saved.get(step.path)
    return store.saved_content(item.sha256) if item is not None else b""


def _do(store: Store, state: State, contents: dict[str, bytes], step: Step, *, aside: bool) -> None:
    path = _at(store.root, step.path)
    entry = step.entry
    if entry is not None:
        if step.change == "same":
            return
        make_folders(path, store.root)
        owner = owner_ids(entry.owner, entry.group)
        put(path, entry.kind, contents[entry.sha256], entry.mode, owner, flush=False)
        return
    if step.change == "restore":
        item = state.saved[step.path]
        content = store.saved_content(item.sha256)
        owner = (item.uid, item.gid) if os.geteuid() == 0 else None
        put(path, item.kind, content, item.mode, owner, flush=False)
        return
    if step.edited and aside and step.found is not None:
        copy = path.with_name(path.name + ASIDE)
        put(copy, step.found.kind, step.found.content, step.found.mode, None, flush=False)
    remove(path)


def _missing_folders(root: Path, path: str, known: list[str]) -> list[str]:
    missing: list[str] = []
    folder = Path(path).parent
    while str(folder) != "/" and not _at(root, str(folder)).exists():
        if str(folder) not in known:
            missing.append(str(folder))
        folder = folder.parent
    return list(reversed(missing))


def _at(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def describe(plan: Preview) -> list[dict[str, Any]]:
    """Return what a switch does as plain data, unchanged files left out."""
    return [
        {"path": step.path, "change": step.change, "foreign": step.foreign}
        for step in plan.steps
        if step.change != "same"
    ]
