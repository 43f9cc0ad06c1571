"""``prepare``: everything that must be right on this node before the engine may start."""

from __future__ import annotations

import grp
import hashlib
import json
import os
import pwd
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spark_appliance.node.errors import NodeError
from spark_appliance.node.files import read_json, remove, write_atomic
from spark_appliance.node.guard import READY_FILE
from spark_appliance.node.journal import Journal
from spark_appliance.node.plan import NodeContext

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
RECEIPT_SUFFIX: Final = ".receipt.json"
CREDENTIAL: Final = "api-key"

MAX_HEADER: Final = 100_000_000
"""Longest header that safetensors itself accepts, bytes (safetensors format description)."""

MAX_KEY: Final = 4096


@dataclass(frozen=True, slots=True)
class Owner:
    """The engine's user."""

    name: str
    uid: int
    gid: int


def owner_of(user: str) -> Owner:
    """Look up a user.

    Raises:
        NodeError: when there is none.
    """
    try:
        entry = pwd.getpwnam(user)
        grp.getgrgid(entry.pw_gid)
    except KeyError:
        raise NodeError(f"there is no user {user!r} on this node: install the node again") from None
    return Owner(user, entry.pw_uid, entry.pw_gid)


@dataclass(frozen=True, slots=True)
class Preparation:
    """Checks and prepares one node for a start of its rank."""

    context: NodeContext
    journal: Journal
    owner: Owner
    environment: Mapping[str, str]

    def run(self) -> None:
        """Do all of it.

        Raises:
            NodeError: with every problem of the files, or with what could not be written.
        """
        remove(self.context.path(READY_FILE))
        problems = [*self.checkpoint(), *self.engram(), *self.library()]
        if problems:
            raise NodeError("; ".join(problems))
        self.write_config()
        self.cache_directory()
        self.free_memory()

    def checkpoint(self) -> list[str]:
        """Return what is wrong with the checkpoint: index, number of shards, size of each."""
        model = self.context.plan.view("model")
        path, shards = model.text("path"), model.integer("shards")
        folder = self.context.path(path)
        index = folder / INDEX_NAME
        mode = self.context.node.view("weights").text("mode")
        remedy = (
            "is it mounted? (spark-appliance share)"
            if mode == "nfs" and not self.context.is_head
            else "copy the checkpoint there"
        )
        if not folder.is_dir():
            return [f"{path}: no such directory; {remedy}"]
        if shards == 1 and not index.exists() and (folder / SINGLE_NAME).exists():
            names = {SINGLE_NAME}
        else:
            try:
                weight_map = json.loads(index.read_bytes())["weight_map"]
                names = {str(name) for name in weight_map.values()}
            except OSError as error:
                return [f"{path}/{INDEX_NAME}: {error.strerror}; {remedy}"]
            except (ValueError, KeyError, TypeError, AttributeError):
                return [f"{path}/{INDEX_NAME}: is no index of a checkpoint; copy it again"]
        problems = []
        if len(names) != shards:
            problems.append(
                f"{path}/{INDEX_NAME}: found {len(names)} shards, the plan expects {shards}; "
                "set model.shards or copy the right checkpoint"
            )
        missing = sorted(name for name in names if not (folder / name).is_file())
        if missing:
            problems.append(
                f"{path}: found {len(names) - len(missing)} shards, expected {len(names)}; "
                f"missing: {_some(missing)}; {remedy}"
            )
        for name in sorted(names.difference(missing)):
            problem = _shard_problem(folder / name, f"{path}/{name}")
            if problem is not None:
                problems.append(problem)
        return problems

    def engram(self) -> list[str]:
        """Return what is wrong with the packed Engram files: presence, exact size, receipt.

        Without its file a rank would read rows over the network, silently slow (field notes
        P45), so absence is fatal.
        """
        engram = self.context.node.optional_view("engram")
        if engram is None:
            return []
        directory = engram.text("directory")
        folder = self.context.path(directory)
        remedy = "pack again: systemctl restart spark-engram-pack.service"
        problems = []
        for file in engram.views("files"):
            name, expected = file.text("name"), file.integer("bytes")
            try:
                found = (folder / name).stat().st_size
            except OSError as error:
                problems.append(f"{directory}/{name}: {error.strerror}; {remedy}")
                continue
            if found != expected:
                problems.append(
                    f"{directory}/{name}: found {found} bytes, expected {expected}; {remedy}"
                )
            receipt = f"{name}{RECEIPT_SUFFIX}"
            values = read_json(folder / receipt)
            if values is None:
                problems.append(f"{directory}/{receipt}: missing or no JSON; {remedy}")
            elif values.get("file") != name or values.get("file_bytes") != expected:
                problems.append(
                    f"{directory}/{receipt}: found file {values.get('file')!r} of "
                    f"{values.get('file_bytes')!r} bytes, expected {name!r} of {expected}; {remedy}"
                )
        return problems

    def library(self) -> list[str]:
        """Return what is wrong with a replaced NCCL: one that differs between ranks hangs them."""
        library = self.context.node.optional_view("nccl_library")
        if library is None:
            return []
        path, expected = library.text("path"), library.optional_text("sha256")
        try:
            with self.context.path(path).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            return [f"{path}: {error.strerror}; copy the cluster's NCCL there"]
        if expected is not None and found != expected:
            return [f"{path}: found sha256 {found}, expected {expected}; copy it again"]
        return []

    def write_config(self) -> None:
        """Write the engine's config file with the API key, readable by the engine's user alone.

        Raises:
            NodeError: when the key is not there, is no single line, or the file cannot be written.
        """
        target = self.context.node.optional_text("config_file")
        if target is None:
            return
        key = read_key(self.context, self.environment)
        # a JSON string is a YAML double-quoted scalar
        content = f"api-key: {json.dumps(key)}\n"
        owner = (self.owner.uid, self.owner.gid)
        write_atomic(self.context.path(target), content, mode=0o600, owner=owner)

    def cache_directory(self) -> None:
        """Make the directory of compiled kernels, owned by the engine's user.

        Raises:
            NodeError: when it cannot be made.
        """
        path = self.context.path(self.context.node.text("cache_directory"))
        try:
            path.mkdir(mode=0o750, parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                os.fchown(handle, self.owner.uid, self.owner.gid)
            finally:
                os.close(handle)
        except OSError as error:
            raise NodeError(f"{path}: {error.strerror}") from None

    def free_memory(self) -> None:
        """Drop the page cache and compact memory: a full cache killed loads at 73-97 %.

        The engine's budget counts what is available at that moment (field notes 4.4).
        """
        os.sync()
        for name, value in (("drop_caches", "3"), ("compact_memory", "1")):
            path = self.context.path(f"/proc/sys/vm/{name}")
            try:
                path.write_text(value, encoding="ascii")
            except OSError as error:
                self.journal.warning(f"{path}: {error.strerror}; the engine may find less memory")


def read_key(context: NodeContext, environment: Mapping[str, str]) -> str:
    """Return the API key out of the unit's credential.

    Raises:
        NodeError: when the unit has no credential, it is not one line of text, or begins with -.
    """
    source = context.plan.view("api").optional_text("key_file")
    folder = environment.get("CREDENTIALS_DIRECTORY")
    if not folder:
        raise NodeError(
            f"the unit gives no credential: it needs LoadCredential={CREDENTIAL}:{source}"
        )
    try:
        text = (Path(folder) / CREDENTIAL).read_bytes()[: MAX_KEY + 1].decode()
    except OSError as error:
        raise NodeError(f"credential {CREDENTIAL} (from {source}): {error.strerror}") from None
    except UnicodeDecodeError:
        raise NodeError(f"the API key in {source} is no text") from None
    key = text.strip()
    if not key or len(key) > MAX_KEY or not key.isprintable() or not key.isascii():
        raise NodeError(
            f"the API key in {source} must be one line of 1 to {MAX_KEY} printable ASCII characters"
        )
    if key.startswith("-"):
        # SGLang makes "--api-key KEY", two words, out of its config file
        raise NodeError(
            f"the API key in {source} begins with '-', which the engine takes for an option; "
            "write another key there, for example of openssl rand -hex 32"
        )
    return key


def _shard_problem(path: Path, shown: str) -> str | None:
    """Compare a shard's size with the one that its own header announces."""
    try:
        found = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if not 2 <= length <= MAX_HEADER:
                return f"{shown}: is no safetensors file; copy it again"
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except OSError as error:
        return f"{shown}: {error.strerror}"
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error):
        return f"{shown}: is no safetensors file; copy it again"
    if found != expected:
        return f"{shown}: found {found} bytes, expected {expected}; copy it again"
    return None


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
