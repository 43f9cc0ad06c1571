"""The script that makes the Engram file system never touches anything that holds data."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from nixtool import REPOSITORY

SCRIPT = REPOSITORY / "modules" / "engram" / "format.sh"
SIZE = 64 << 20
PROGRAMS = ("blkid", "wipefs", "lsblk", "cmp", "mkfs.ext4", "mkfs.vfat", "sfdisk", "mkfs.xfs")
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


def program(name: str) -> str:
    found = shutil.which(name, path=PATH)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    with path.open("wb") as file:
        file.truncate(SIZE)
    return path


def run(disk: Path, fstype: str = "ext4") -> subprocess.CompletedProcess[str]:
    for name in ("blkid", "wipefs", "cmp", "mkfs.ext4"):
        program(name)
    # as writeShellApplication starts it
    return subprocess.run(
        ["bash", "-o", "errexit", "-o", "nounset", "-o", "pipefail", SCRIPT, fstype, disk],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": PATH},
    )


def kind(disk: Path) -> str:
    return subprocess.run(
        [program("blkid"), "-p", "-o", "value", "-s", "TYPE", disk],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()


def test_an_empty_disk_gets_a_file_system_once(disk: Path) -> None:
    assert run(disk).returncode == 0
    assert kind(disk) == "ext4"
    before = disk.read_bytes()
    again = run(disk)
    assert again.returncode == 0, again.stderr
    assert "already has ext4" in again.stdout
    assert disk.read_bytes() == before


def test_another_file_system_is_refused(disk: Path) -> None:
    subprocess.run([program("mkfs.vfat"), disk], check=True, capture_output=True)
    refused(disk, "holds vfat")


def test_a_partition_table_is_refused(disk: Path) -> None:
    subprocess.run(
        [program("sfdisk"), "--quiet", disk], input="label: gpt\n,\n", text=True, check=True
    )
    refused(disk, "holds")


@pytest.mark.parametrize("position", [0, 4096, (16 << 20) - 1, SIZE - 1, SIZE - (16 << 20)])
def test_data_without_any_signature_is_refused(disk: Path, position: int) -> None:
    with disk.open("r+b") as file:
        file.seek(position)
        file.write(b"x")
    refused(disk, "has data in its")


def test_a_second_file_system_type_is_refused_on_a_used_disk(disk: Path) -> None:
    assert run(disk).returncode == 0
    before = disk.read_bytes()
    done = run(disk, "xfs")
    assert done.returncode == 1
    assert "holds ext4" in done.stderr
    assert disk.read_bytes() == before


def test_a_missing_or_tiny_device_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path / "none")
    assert done.returncode == 1
    assert "does not exist" in done.stderr
    small = tmp_path / "small"
    small.write_bytes(bytes(1 << 20))
    done = run(small)
    assert done.returncode == 1
    assert "is only 1048576 bytes" in done.stderr


def refused(disk: Path, why: str) -> None:
    before = disk.read_bytes()
    done = run(disk)
    assert done.returncode == 1, done
    assert why in done.stderr
    assert "nothing was changed" in done.stderr
    assert disk.read_bytes() == before
