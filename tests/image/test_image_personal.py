"""Keys, plan and name on the ESP of an image, and where two images differ."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from spark_appliance import process
from spark_appliance.cli import cli
from spark_appliance.errors import InputError
from spark_appliance.image import disk, partitions, personal
from spark_appliance.image.errors import ImageError

PLAN = Path(__file__).parents[2] / "examples/three-spark-triangle/cluster.lock.json"


def public(kind: str, *fields: bytes) -> str:
    """Return a public key as ssh-keygen writes it, without a comment."""
    parts = [kind.encode(), *fields]
    blob = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return f"{kind} {base64.b64encode(blob).decode()}"


BARE = public("ssh-ed25519", bytes(range(32)))
KEY = f"{BARE} you@laptop\n"
MIB = 1 << 20
ENVIRONMENT = {**os.environ, "MTOOLSRC": "/dev/null", "MTOOLS_SKIP_CHECK": "1"}


def program(name: str) -> str:
    path = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A raw image as ours: ESP and root, with a boot loader and nothing of an owner."""
    path = tmp_path / "image.raw"
    with path.open("wb") as file:
        file.truncate(60 * MIB)
    table = "label: gpt\nfirst-lba: 2048\n"
    table += 'size=48MiB, type=uefi, name="spark-esp"\n'
    table += 'size=4MiB, type=linux, name="spark-root"\n'
    subprocess.run([program("sfdisk"), "-q", path], input=table, text=True, check=True)
    argv = [program("mkfs.vfat"), "-F", "32", "--offset", "2048", path, str(48 * 1024)]
    subprocess.run(argv, check=True, capture_output=True)
    return path


def content(image: Path, name: str) -> bytes:
    start = partitions.esp(image).start
    argv = [program("mtype"), "-i", f"{image}@@{start}", f"::/{name}"]
    return subprocess.run(argv, check=True, capture_output=True, env=ENVIRONMENT).stdout


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.pub"
    path.write_text(f"# mine\n{KEY}")
    return path


def test_partitions_in_bytes(image: Path) -> None:
    assert partitions.partitions(image) == (
        partitions.Partition("spark-esp", MIB, 48 * MIB),
        partitions.Partition("spark-root", 49 * MIB, 4 * MIB),
    )


def test_files_are_on_the_esp_and_can_be_replaced(image: Path, keys: Path) -> None:
    program("mcopy")
    before = image.read_bytes()
    personal.put(image, personal.collect(keys, PLAN, "spark2"))
    assert content(image, "spark/authorized_keys").decode() == f"# mine\n{KEY}"
    assert content(image, "spark/cluster.lock.json") == PLAN.read_bytes()
    assert content(image, "spark/node") == b"spark2\n"
    personal.put(image, personal.collect(None, None, "spark3"))
    assert content(image, "spark/node") == b"spark3\n"
    assert content(image, "spark/authorized_keys").decode().endswith(KEY)
    after = image.read_bytes()
    assert after[: 1 * MIB] == before[: 1 * MIB]
    assert after[49 * MIB :] == before[49 * MIB :]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNz\n", "this is a private key"),
        ("", "no key"),
        ("# only a comment\n\n", "no key"),
        (f"{KEY}hunter2\n", r"keys\.pub:2:1: error: no public SSH key"),
        ("ssh-ed25519\n", "no public SSH key"),
        (BARE[:-4], "a part of one"),
        (BARE[:-2], "a part of one"),
        (BARE.replace("ssh-ed25519", "ssh-rsa"), "no public SSH key"),
        (public("ssh-ed25519", bytes(31)), "a part of one"),
        (public("ssh-rsa", b"\1\0\1"), "a part of one"),
        ('command="echo ssh-rsa AAAAB3" garbage\n', "no public SSH key"),
        (f"<RSAKeyValue> {KEY}", "no public SSH key"),
        (f"192.168.1.11 {KEY}", "no public SSH key"),
        (f"spark1 {KEY}", "no public SSH key"),
        (f'from="10.0.0.0/8 {KEY}', "no public SSH key"),
        (" # only a comment, indented\n", "no key"),
        (f"# a comment\r{KEY}\rhunter2\r", r":4:1: error: no public SSH key"),
    ],
)
def test_what_is_no_public_key(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "keys.pub").write_text(text)
    with pytest.raises(InputError, match=message):
        personal.collect(tmp_path / "keys.pub", None, None)


@pytest.mark.parametrize(
    "line",
    [
        KEY,
        f'from="10.0.0.0/8",no-pty {KEY}',
        f'restrict,command="echo \\"a b\\" ssh-rsa",No-X11-Forwarding\t{KEY}',
        public("sk-ssh-ed25519@openssh.com", bytes(32), b"ssh:") + " you\n",
        public("sk-ecdsa-sha2-nistp256@openssh.com", b"nistp256", bytes(65), b"ssh:"),
        public("ecdsa-sha2-nistp256", b"nistp256", bytes(65)),
        public("ssh-rsa", b"\1\0\1", bytes(257)),
        f"  # mine\n \t\n  {KEY}",
        KEY.replace("\n", "\r\n"),
        f"# mine\r{KEY.strip()}\r",
        f"\ufeff{KEY}",
    ],
)
def test_public_keys(line: str, tmp_path: Path) -> None:
    (tmp_path / "keys.pub").write_bytes(line.encode())
    (file,) = personal.collect(tmp_path / "keys.pub", None, None)
    wanted = line.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")
    assert file.content == wanted.encode()


def test_keys_of_ssh_keygen(tmp_path: Path) -> None:
    for kind in ("ed25519", "rsa", "ecdsa"):
        argv = [program("ssh-keygen"), "-q", "-t", kind, "-N", "", "-f", tmp_path / kind]
        subprocess.run(argv, check=True)
        assert personal.collect(tmp_path / f"{kind}.pub", None, None)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "keys.pub").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="no public SSH key"):
        personal.collect(tmp_path / "keys.pub", None, None)


def test_names_are_those_of_the_plan() -> None:
    with pytest.raises(InputError, match=r"has no node spark9[^\n]*\n *remedy: it has spark1, spa"):
        personal.collect(None, PLAN, "spark9")
    with pytest.raises(InputError, match="is no node name"):
        personal.collect(None, None, "../x")
    with pytest.raises(InputError, match="there is no plan"):
        personal.collect(None, Path("/nowhere"), None)


def test_an_image_of_somebody_else(image: Path, tmp_path: Path) -> None:
    subprocess.run([program("sfdisk"), "-q", "--part-label", image, "1", "EFI"], check=True)
    with pytest.raises(ImageError, match="no partition spark-esp"):
        partitions.esp(image)
    (tmp_path / "zeros").write_bytes(bytes(MIB))
    with pytest.raises(ImageError, match="no partition table"):
        partitions.esp(tmp_path / "zeros")


def refused(image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Ask to write an image without options; return why nothing was asked or written."""
    monkeypatch.setattr(disk, "inspect", lambda _: pytest.fail("too late"))
    done = CliRunner().invoke(cli, ["image", "write", str(image), str(tmp_path / "device")])
    assert isinstance(done.exception, ImageError), done.output
    return str(done.exception)


@pytest.mark.parametrize("size", [8 * MIB, 52 * MIB, 53 * MIB, 60 * MIB - 512])
def test_a_part_of_an_image_is_refused(
    image: Path, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with image.open("r+b") as file:
        file.truncate(size)
    reason = refused(image, tmp_path, monkeypatch)
    assert "unfinished download" in reason or "only a part of the image" in reason


def test_a_foreign_image_and_one_with_more_behind_are_refused(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with image.open("r+b") as file:
        file.truncate(61 * MIB)
    assert "second partition table" in refused(image, tmp_path, monkeypatch)
    (tmp_path / "zeros").write_bytes(bytes(MIB))
    assert "no partition table" in refused(tmp_path / "zeros", tmp_path, monkeypatch)


def test_a_partition_that_ends_far_behind_the_file(
    image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = {"start": 2048, "size": 1 << 50, "name": "spark-root"}
    table = json.dumps({"partitiontable": {"label": "gpt", "partitions": [far]}})
    monkeypatch.setattr(process, "run", lambda *_, **__: process.Completed((), 0, table, ""))
    with pytest.raises(ImageError, match="ends at byte 62914560, its partition spark-root at"):
        partitions.differences(image, image)


def test_comparing_stops_where_both_end(image: Path) -> None:
    with image.open("rb") as a, image.open("rb") as b:
        assert partitions._differing(a, b, 1 << 60) is None


def test_a_full_esp(image: Path) -> None:
    program("mcopy")
    huge = personal.EspFile("spark/huge", bytes(49 * MIB))
    with pytest.raises(ImageError, match=r"mcopy: .*\n.*the image itself is complete"):
        personal.put(image, [huge])


def test_missing_programs_are_told_before_anything_is_written(
    image: Path, keys: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = tmp_path / "device"
    device.write_bytes(bytes(60 * MIB))
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["image", "write", str(image), str(device), "--authorized-keys", str(keys), "--yes"]
    done = CliRunner().invoke(cli, words)
    assert isinstance(done.exception, ImageError)
    assert "install mtools" in str(done.exception)
    with pytest.raises(ImageError, match="install fdisk"):
        partitions.partitions(image)
    assert device.read_bytes() == bytes(60 * MIB)


def write(image: Path, device: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    entry = disk.Disk(
        str(device), "disk", device.stat().st_size, 512, "Ultra Fit", "1", "usb", False, ()
    )
    monkeypatch.setattr(disk, "inspect", lambda _: entry)
    argv = ["image", "write", str(image), str(device), "--yes", *words]
    done = CliRunner().invoke(cli, argv, catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_the_command_writes_and_then_makes_it_the_owners(
    image: Path, keys: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program("mcopy")
    device = tmp_path / "device"
    device.write_bytes(b"\xff" * (60 * MIB))
    before = image.read_bytes()
    words = ["--authorized-keys", str(keys), "--plan", str(PLAN), "--node", "spark1"]
    output = write(image, device, monkeypatch, *words)
    assert "on the ESP: spark/authorized_keys" in output
    assert "nobody can log in" not in output
    assert content(device, "spark/node") == b"spark1\n"
    assert image.read_bytes() == before
    assert [found.label for found in partitions.differences(image, device)] == ["spark-esp"]


def test_without_keys_it_says_so(
    image: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = tmp_path / "device"
    device.write_bytes(bytes(60 * MIB))
    assert "nobody can log in" in write(image, device, monkeypatch)
    assert device.read_bytes() == image.read_bytes()


@pytest.mark.parametrize(
    ("offset", "text"),
    [
        (49 * MIB + 12345, "partition spark-root, bytes 12345 to 12346"),
        (MIB, "partition spark-esp, bytes 0 to 1"),
        (600, "outside of the partitions, bytes 600 to 601"),
        (60 * MIB - 1, f"outside of the partitions, bytes {60 * MIB - 1} to {60 * MIB}"),
    ],
)
def test_a_difference_is_named(image: Path, tmp_path: Path, offset: int, text: str) -> None:
    other = tmp_path / "other.raw"
    data = bytearray(image.read_bytes())
    data[offset] ^= 0xFF
    other.write_bytes(data)
    assert [str(found) for found in partitions.differences(image, other)] == [text]
    done = CliRunner().invoke(cli, ["image", "compare", str(image), str(other)])
    assert done.exit_code == 1
    assert text in done.output


def test_equal_and_shorter_images(image: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.raw"
    other.write_bytes(image.read_bytes())
    done = CliRunner().invoke(cli, ["image", "compare", str(image), str(other)])
    assert (done.exit_code, done.output) == (0, "the same bytes\n")
    with other.open("r+b") as file:
        file.truncate(50 * MIB)
    found = partitions.differences(image, other)
    assert [difference.label for difference in found] == ["spark-root", ""]
    for pair in ((image, tmp_path / "nothing"), (tmp_path / "nothing", image)):
        with pytest.raises(InputError, match=r"cannot read .*: No such file"):
            partitions.differences(*pair)


def test_a_disk_that_the_kernel_holds(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def busy(path: Path, flags: int) -> int:
        if flags & os.O_EXCL:
            raise OSError(16, "Device or resource busy")
        return real(path, flags)

    monkeypatch.setattr(disk.os, "open", busy)
    with pytest.raises(ImageError, match="in use by the kernel"):
        disk.write(image, Path("/dev/null"))


def test_a_corrupted_read_back_is_found(
    image: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("mcopy")
    real = process.run

    def rot(argv: list[str], **words: object) -> process.Completed:
        done = real(argv, **words)  # type: ignore[arg-type]
        if argv[0] == "mcopy" and argv[-1].endswith("/back"):
            Path(argv[-1]).write_bytes(b"x")
        return done

    monkeypatch.setattr(process, "run", rot)
    with pytest.raises(ImageError, match="reads back other bytes"):
        personal.put(image, personal.collect(keys, None, None))
