from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from spark_appliance.cli import cli
from spark_appliance.errors import InputError
from spark_appliance.image import disk
from spark_appliance.image.errors import ImageError

CONTENT = bytes(range(256)) * 4096 * 5  # more than one chunk


def entry(**changes: object) -> str:
    device: dict[str, object] = {
        "path": "/dev/sdx", "type": "disk", "size": 64_000_000_000, "log-sec": 512,
        "model": "Ultra Fit ", "serial": "4C53", "tran": "usb", "ro": False, "mountpoints": [None],
    }  # fmt: skip
    return json.dumps({"blockdevices": [{**device, **changes}]})


def test_model_and_size_are_shown() -> None:
    assert str(disk.parse(entry())) == "/dev/sdx: Ultra Fit 4C53 usb, 64.0 GB"
    assert "no model" in str(disk.parse(entry(model=None, serial=None, tran=None)))
    disk.check(disk.parse(entry()), 1_000_000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "part"}, "a part, not a whole disk"),
        ({"mountpoints": ["/mnt"]}, "in use: /mnt"),
        ({"children": [{"mountpoints": ["/boot"], "children": [{"mountpoints": ["/"]}]}]},
         "in use: /boot, /"),
        ({"children": [{"mountpoints": ["[SWAP]"]}]}, r"in use: \[SWAP\]"),
        ({"ro": True}, "write-protected"),
        ({"size": 999}, "too small"),
        ({"log-sec": 4096}, "sectors of 4096 bytes"),
    ],
)  # fmt: skip
def test_wrong_disks_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        disk.check(disk.parse(entry(**changes)), 1_000_000)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    image, device = tmp_path / "image.raw", tmp_path / "device"
    image.write_bytes(CONTENT)
    device.write_bytes(b"\xff" * (len(CONTENT) + 512))
    steps: list[tuple[str, int, int]] = []
    digest = disk.write(image, device, lambda *step: steps.append(step))
    assert digest == hashlib.sha256(CONTENT).hexdigest()
    assert device.read_bytes() == CONTENT + b"\xff" * 512
    size = len(CONTENT)
    assert ("write", size, size) in steps
    assert steps[-1] == ("verify", size, size)


def test_a_disk_that_returns_other_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image, device = tmp_path / "image.raw", tmp_path / "device"
    image.write_bytes(CONTENT)
    device.write_bytes(b"\xff" * len(CONTENT))
    real = disk._hash

    def rot(target: object, size: int, progress: disk.Progress) -> str:
        data = bytearray(device.read_bytes())
        data[1000] ^= 1
        device.write_bytes(data)
        return real(target, size, progress)  # type: ignore[arg-type]

    monkeypatch.setattr(disk, "_hash", rot)
    with pytest.raises(ImageError, match="reads back other bytes"):
        disk.write(image, device)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x28\xb5\x2f\xfd" + b"\0" * 508, "zstd -d"),
        (b"\x1f\x8b" + b"\0" * 510, "gzip -d"),
        (b"\0" * 511, "unfinished download"),
        (b"", "unfinished download"),
    ],
)
def test_images_that_are_no_raw_images(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(content)
    with pytest.raises(InputError, match=message):
        disk.image_size(tmp_path / "image")


@pytest.mark.parametrize("command", ["write", "compare"])
def test_a_pipe_is_no_image(command: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "image")
    argv = ["image", command, str(tmp_path / "image"), str(tmp_path / "device")]
    done = CliRunner().invoke(cli, argv)
    assert isinstance(done.exception, InputError)
    assert "neither a file nor a disk" in str(done.exception)


def test_full_device(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("/dev/full does not exist")
    image = tmp_path / "image.raw"
    image.write_bytes(CONTENT)
    with pytest.raises(ImageError, match="No space left"):
        disk.write(image, Path("/dev/full"))


def test_the_command_asks_and_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image, device = tmp_path / "image.raw", tmp_path / "device"
    sfdisk = shutil.which("sfdisk", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if sfdisk is None:
        pytest.skip("sfdisk is not installed")
    image.write_bytes(CONTENT)
    table = 'label: gpt\nsize=2MiB, type=uefi, name="spark-esp"\n'
    subprocess.run([sfdisk, "-q", image], input=table, text=True, check=True)
    content = image.read_bytes()
    device.write_bytes(b"\xff" * len(CONTENT))
    target = disk.parse(entry(path=str(device)))
    monkeypatch.setattr(disk, "inspect", lambda _: target)
    argv = ["image", "write", str(image), str(device)]
    asked = CliRunner().invoke(cli, argv, input="n\n")
    assert asked.exit_code == 1
    assert "Ultra Fit 4C53 usb, 64.0 GB" in asked.stdout
    assert device.read_bytes() == b"\xff" * len(CONTENT)
    done = CliRunner().invoke(cli, [*argv, "--yes"])
    assert done.exit_code == 0
    assert f"sha256:{hashlib.sha256(content).hexdigest()}" in done.stdout
    assert device.read_bytes() == content


def test_a_file_is_no_disk(tmp_path: Path) -> None:
    if shutil.which("lsblk") is None:
        pytest.skip("lsblk is not installed")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ImageError, match="not a block device"):
        disk.inspect(tmp_path / "file")
