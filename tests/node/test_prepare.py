from __future__ import annotations

import json
import os
import pwd
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from spark_appliance.node import prepare
from spark_appliance.node.errors import NodeError
from spark_appliance.node.plan import NodeContext
from spark_appliance.node.prepare import Owner, Preparation, owner_of, read_key

from .conftest import Log

MODEL = "models/DeepSeek-V4.1-Flash"


def shard(path: Path, size: int = 64) -> None:
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
        }
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * size)


class Disk:
    """A node whose files are all in order."""

    def __init__(self, root: Path, plan: dict[str, Any]) -> None:
        self.root, self.plan = root, plan
        plan["model"]["shards"] = 3
        self.model = root / MODEL
        self.model.mkdir(parents=True)
        names = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
        for name in names:
            shard(self.model / name)
        index = {"weight_map": {f"t{n}": name for n, name in enumerate([*names, names[0]])}}
        self.index = self.model / "model.safetensors.index.json"
        self.index.write_text(json.dumps(index))
        self.engram = root / "srv/engram"
        self.engram.mkdir(parents=True)
        for file in plan["nodes"][0]["engram"]["files"]:
            file["bytes"] = 8192
            (self.engram / file["name"]).write_bytes(b"\0" * 8192)
            self.receipt(file["name"]).write_text(
                json.dumps({"file": file["name"], "file_bytes": 8192})
            )
        self.vm = root / "proc/sys/vm"
        self.vm.mkdir(parents=True)
        for name in ("drop_caches", "compact_memory"):
            (self.vm / name).write_text("0")
        self.credentials = root / "credentials"
        self.credentials.mkdir()
        (self.credentials / "api-key").write_text("sk-s3cret\n")

    def receipt(self, name: str) -> Path:
        return self.engram / f"{name}.receipt.json"

    @property
    def first(self) -> str:
        return str(self.plan["nodes"][0]["engram"]["files"][0]["name"])


@pytest.fixture
def disk(root: Path, plan: dict[str, Any]) -> Disk:
    return Disk(root, plan)


@pytest.fixture
def preparation(
    disk: Disk, context_of: Callable[..., NodeContext], log: Log
) -> Callable[..., Preparation]:
    def make(node: str = "spark1") -> Preparation:
        return Preparation(
            context_of(disk.plan, node),
            log.journal,
            Owner("spark", os.getuid(), os.getgid()),
            {"CREDENTIALS_DIRECTORY": str(disk.credentials)},
        )

    return make


def problem(preparation: Callable[..., Preparation]) -> str:
    with pytest.raises(NodeError) as caught:
        preparation().run()
    return str(caught.value)


def test_prepares_a_node_in_order(
    disk: Disk, preparation: Callable[..., Preparation], log: Log
) -> None:
    ready = disk.root / "run/spark/ready"
    ready.parent.mkdir(parents=True)
    ready.touch()
    preparation().run()
    config = disk.root / "run/spark-engine/config.yaml"
    assert config.read_text() == 'api-key: "sk-s3cret"\n'
    assert config.stat().st_mode & 0o777 == 0o600
    assert config.stat().st_uid == os.getuid()
    assert (disk.vm / "drop_caches").read_text() == "3"
    assert (disk.vm / "compact_memory").read_text() == "1"
    cache = disk.root / "var/cache/spark-engine"
    assert cache.stat().st_mode & 0o777 == 0o750
    assert not ready.exists()  # the guard's start threshold holds again
    assert log.lines == []


def test_the_key_appears_nowhere_else(
    disk: Disk, preparation: Callable[..., Preparation], capfd: pytest.CaptureFixture[str]
) -> None:
    preparation().run()
    (disk.credentials / "api-key").unlink()
    holders = [
        file for file in disk.root.rglob("*") if file.is_file() and b"s3cret" in file.read_bytes()
    ]
    assert holders == [disk.root / "run/spark-engine/config.yaml"]
    assert "s3cret" not in "".join(capfd.readouterr())


def test_the_config_gets_the_owner(
    preparation: Callable[..., Preparation], monkeypatch: pytest.MonkeyPatch
) -> None:
    owners: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "fchown", lambda _, uid, gid: owners.append((uid, gid)))
    made = preparation()
    Preparation(made.context, made.journal, Owner("spark", 991, 992), made.environment).run()
    assert owners == [(991, 992), (991, 992)]  # config file and cache directory


def test_a_link_in_the_engines_folder_is_replaced_not_followed(
    disk: Disk, preparation: Callable[..., Preparation]
) -> None:
    victim = disk.root / "victim"
    victim.write_text("mine")
    folder = disk.root / "run/spark-engine"
    folder.mkdir(parents=True)
    (folder / "config.yaml").symlink_to(victim)
    preparation().run()
    assert victim.read_text() == "mine"
    assert not (folder / "config.yaml").is_symlink()


@given(
    key=st.text(
        alphabet=st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=200
    )
)
def test_any_key_survives_yaml(key: str) -> None:
    assert yaml.safe_load(f"api-key: {json.dumps(key)}\n") == {"api-key": key}


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"a\nb", b"a\x00b", b"\xff", b"a" * 5000, b"\xc3\xa9", b"-k"]
)
def test_a_bad_key_is_refused_without_showing_it(
    disk: Disk, preparation: Callable[..., Preparation], content: bytes
) -> None:
    (disk.credentials / "api-key").write_bytes(content)
    message = problem(preparation)
    assert "the API key in /etc/spark/api-key" in message
    assert not (disk.root / "run/spark-engine/config.yaml").exists()


def test_a_key_that_the_engine_takes_for_an_option(
    disk: Disk, preparation: Callable[..., Preparation]
) -> None:
    (disk.credentials / "api-key").write_text("-s3cret\n")
    message = problem(preparation)
    assert "the API key in /etc/spark/api-key begins with '-'" in message
    assert "write another key there" in message
    assert "s3cret" not in message


def test_a_unit_without_credential_is_told_what_it_needs(
    disk: Disk, context_of: Callable[..., NodeContext]
) -> None:
    with pytest.raises(NodeError, match="needs LoadCredential=api-key:/etc/spark/api-key"):
        read_key(context_of(disk.plan), {})


def test_no_key_file_no_config(disk: Disk, preparation: Callable[..., Preparation]) -> None:
    disk.plan["nodes"][0]["config_file"] = None
    preparation().run()
    assert not (disk.root / "run/spark-engine").exists()


def test_missing_shards_are_counted_and_named(
    disk: Disk, preparation: Callable[..., Preparation]
) -> None:
    (disk.model / "model-00002-of-00003.safetensors").unlink()
    assert (
        "/models/DeepSeek-V4.1-Flash: found 2 shards, expected 3; "
        "missing: model-00002-of-00003.safetensors" in problem(preparation)
    )


def test_a_truncated_shard_is_found_by_its_own_header(
    disk: Disk, preparation: Callable[..., Preparation]
) -> None:
    path = disk.model / "model-00003-of-00003.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 1)
    shown = "/models/DeepSeek-V4.1-Flash/model-00003-of-00003.safetensors"
    assert f"{shown}: found {size - 1} bytes, expected {size}; copy it again" in problem(
        preparation
    )


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, struct.pack("<Q", 2) + b"[]", b"\x09" * 7])
def test_what_is_no_safetensors_is_said(
    disk: Disk, preparation: Callable[..., Preparation], content: bytes
) -> None:
    (disk.model / "model-00001-of-00003.safetensors").write_bytes(content)
    assert "model-00001-of-00003.safetensors: is no safetensors file" in problem(preparation)


def test_another_number_of_shards_than_planned(
    disk: Disk, preparation: Callable[..., Preparation]
) -> None:
    disk.plan["model"]["shards"] = 48
    assert "found 3 shards, the plan expects 48" in problem(preparation)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 1}'])
def test_a_broken_index(disk: Disk, preparation: Callable[..., Preparation], content: str) -> None:
    disk.index.write_text(content)
    assert "index.json: is no index of a checkpoint" in problem(preparation)


def test_a_worker_is_asked_about_its_mount(
    disk: Disk, preparation: Callable[..., Preparation]
) -> None:
    disk.model.rename(disk.model.parent / "elsewhere")
    [problem_of_worker] = preparation("spark2").checkpoint()
    assert problem_of_worker.endswith("is it mounted? (spark-appliance share)")
    [problem_of_head] = preparation("spark1").checkpoint()
    assert problem_of_head.endswith("no such directory; copy the checkpoint there")


def test_a_small_model_is_one_file(disk: Disk, preparation: Callable[..., Preparation]) -> None:
    disk.plan["model"]["shards"] = 1
    disk.index.unlink()
    shard(disk.model / "model.safetensors")
    assert preparation().checkpoint() == []


def test_engram_sizes_are_exact(disk: Disk, preparation: Callable[..., Preparation]) -> None:
    os.truncate(disk.engram / disk.first, 4096)
    assert f"/srv/engram/{disk.first}: found 4096 bytes, expected 8192; pack again" in problem(
        preparation
    )


def test_engram_needs_file_and_receipt(disk: Disk, preparation: Callable[..., Preparation]) -> None:
    (disk.engram / disk.first).unlink()
    assert f"/srv/engram/{disk.first}: No such file or directory" in problem(preparation)
    (disk.engram / disk.first).write_bytes(b"\0" * 8192)
    disk.receipt(disk.first).unlink()
    assert f"{disk.first}.receipt.json: missing or no JSON" in problem(preparation)
    disk.receipt(disk.first).write_text(json.dumps({"file": "other.bin", "file_bytes": 8192}))
    assert "found file 'other.bin' of 8192 bytes" in problem(preparation)


def test_all_problems_come_at_once(disk: Disk, preparation: Callable[..., Preparation]) -> None:
    os.truncate(disk.engram / disk.first, 1)
    disk.plan["model"]["shards"] = 48
    message = problem(preparation)
    assert "expects 48" in message
    assert "expected 8192" in message


def test_a_replaced_nccl_is_compared(disk: Disk, preparation: Callable[..., Preparation]) -> None:
    (disk.root / "opt").mkdir()
    (disk.root / "opt/libnccl.so.2").write_bytes(b"nccl")
    disk.plan["nodes"][0]["nccl_library"] = {"path": "/opt/libnccl.so.2", "sha256": "0" * 64}
    assert "/opt/libnccl.so.2: found sha256 " in problem(preparation)
    disk.plan["nodes"][0]["nccl_library"]["path"] = "/opt/nothing"
    assert "/opt/nothing: No such file or directory" in problem(preparation)


def test_caches_that_cannot_be_dropped_are_a_warning(
    disk: Disk, preparation: Callable[..., Preparation], log: Log
) -> None:
    for name in ("drop_caches", "compact_memory"):
        (disk.vm / name).unlink()
        (disk.vm / name).mkdir()
    preparation().run()
    assert [line[:3] for line in log.lines] == ["<4>", "<4>"]


def test_an_unknown_user_is_an_error() -> None:
    with pytest.raises(NodeError, match="there is no user 'no-such-user'"):
        owner_of("no-such-user")
    entry = pwd.getpwuid(os.getuid())
    assert owner_of(entry.pw_name) == Owner(entry.pw_name, entry.pw_uid, entry.pw_gid)


def test_the_header_limit_is_that_of_safetensors() -> None:
    assert prepare.MAX_HEADER == 100_000_000
