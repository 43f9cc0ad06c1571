"""The disk image: nobody gets in without a key, the same bytes everywhere, and a disk that grows.

The image is the module's own, around a root and a kernel that the machine's tools can make.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nixtool import REPOSITORY, Nix, NixFailedError

from spark_appliance.image.partitions import Partition, differences, partitions
from spark_appliance.names import ESP_PLAN

pytestmark = pytest.mark.nix

BUILDS = "hosttools/builds.nix"
PLAN = REPOSITORY / "examples" / "three-spark-triangle" / "cluster.lock.json"
IMAGES = ("appliance", "cluster", "node")
MIB = 1 << 20


@pytest.fixture(scope="module")
def systems(nix: Nix) -> Any:
    return nix.evaluate("image.nix")


# ---- who gets in -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IMAGES)
def test_there_is_no_password_and_no_login_without_a_key(systems: Any, name: str) -> None:
    system = systems[name]
    assert "root" in system["passwords"]
    for user, fields in system["passwords"].items():
        assert fields["password"] is None, user
        assert fields["initialPassword"] is None, user
        assert fields["hashedPasswordFile"] is None, user
        assert fields["hashedPassword"] in (None, "!"), user
        assert fields["initialHashedPassword"] in (None, "!"), user
    assert system["autologin"] is None
    assert system["sshd"] == {
        "enable": True,
        "PasswordAuthentication": False,
        "KbdInteractiveAuthentication": False,
        "PermitRootLogin": "prohibit-password",
    }


# ---- which node it is --------------------------------------------------------------------------


def test_one_image_for_all_nodes_asks_which_one_it_is(systems: Any) -> None:
    for name in ("appliance", "cluster"):
        system = systems[name]
        assert system["hostName"] == "spark"
        assert "spark-node identity --esp /boot\n" in system["identity"]
        assert "RequiresMountsFor=/boot\n" in system["identity"]
        assert "StandardError=journal+console\n" in system["identity"]
        assert system["networkd"] is True
        # the root would have taken the space
        assert system["engram"] is True
    assert systems["appliance"]["espFiles"] == {}
    plan = systems["cluster"]["espFiles"][ESP_PLAN]
    assert plan.endswith("cluster.lock.json")


def test_a_node_that_was_rolled_out_knows_it(systems: Any) -> None:
    node = systems["node"]
    assert node["identity"] is None
    assert node["hostName"] == "spark1"
    assert node["engram"] is False
    assert node["lan"].split() == [
        "[Match]",
        "Name=enP7s7",
        "[Network]",
        "DHCP=yes",
        "[Address]",
        "Address=192.168.1.11/24",
        "DuplicateAddressDetection=ipv4",
    ]


def test_every_generation_checks_what_the_firmware_loads(systems: Any) -> None:
    for name in IMAGES:
        system = systems[name]
        assert "spark-boot-size" in system["checks"]
        assert "/boot/EFI/Linux/spark-appliance_*.efi" in system["bootLoader"]


def test_nothing_of_the_image_is_random(systems: Any) -> None:
    for name in IMAGES:
        system = systems[name]
        assert system["esp"]["CopyBlocks"].endswith("spark-esp.vfat")
        (ext4,) = system["mkfs"]["ext4"]
        assert "hash_seed=" in ext4


# ---- the same bytes ----------------------------------------------------------------------------


def other_surroundings(host: Nix) -> list[str]:
    """Build below a memory file system, which lists folders in another order than a disk's."""
    argv = [*host.prefix, "stat", "--file-system", "--format=%T", "/dev/shm"]
    kind = subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()
    if kind != "tmpfs":
        pytest.skip(f"/dev/shm is no memory file system where Nix runs, but {kind or 'missing'}")
    folder = host.root / "dev" / "shm" / f"spark-nix-build-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    return ["--rebuild", "--keep-failed", "--option", "build-dir", host.inside(folder)]


@pytest.fixture
def linked(host: Nix) -> Iterator[None]:
    """Equal files of the small root are hard links, as auto-optimise-store makes them, and old."""
    root = host.build(BUILDS, "smallRoot")
    folders = [root / name / "deep" for name in ("zeta", "alpha")]
    if not os.access(root, os.W_OK):
        pytest.skip("the store cannot be changed by this user")

    def replace(folder: Path, *, link: bool) -> None:
        target = folder / "same"
        target.unlink()
        if link:
            target.hardlink_to(folder / "numbers")
        else:
            shutil.copy2(folder / "numbers", target)
        os.utime(folder, (1, 1))

    for folder in folders:
        replace(folder, link=True)
    # a last access before 1980, as in a store that came out of an archive
    os.utime(root / "beta" / "deep" / "numbers", (1, 1))
    yield
    for folder in folders:
        replace(folder, link=False)


def rebuild(host: Nix, attribute: str) -> list[str]:
    """Build again in other surroundings; returns where the image differs."""
    first = host.build(BUILDS, attribute)
    again = first.with_name(f"{first.name}.check")
    try:
        host.build(BUILDS, attribute, *other_surroundings(host))
    except NixFailedError as error:
        if "may not be deterministic" not in str(error):
            raise
        if first.is_file():
            return ["the file system of the ESP"]
        (one,), (two,) = first.glob("*.raw"), again.glob("*.raw")
        found = [str(difference) for difference in differences(one, two)]
        return found or ["other files than the image"]
    finally:
        shutil.rmtree(host.root / "dev" / "shm" / f"spark-nix-build-{os.getpid()}", True)
        shutil.rmtree(again, ignore_errors=True)
    return []


@pytest.mark.slow
@pytest.mark.usefixtures("linked")
def test_esp_and_root_are_the_same_in_other_surroundings(host: Nix) -> None:
    assert rebuild(host, "image") == []


@pytest.mark.slow
def test_the_esp_alone_is_the_same(host: Nix) -> None:
    assert rebuild(host, "esp") == []


@pytest.mark.slow
def test_the_surroundings_do_change_what_systemd_repart_makes_alone(host: Nix) -> None:
    argv = [*host.prefix, "systemd-repart", "--version"]
    version = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()[1]
    if int(version) >= 261:
        pytest.skip(f"systemd {version} sorts what it copies to a FAT file system")
    found = rebuild(host, "stock")
    assert [text.split(",")[0] for text in found] == ["partition spark-esp"]


@pytest.mark.slow
def test_a_kernel_that_the_firmware_cannot_load_is_refused(host: Nix) -> None:
    with pytest.raises(NixFailedError, match="have 3000000 bytes, more than 2999999"):
        host.build(BUILDS, "largeKernel")


# ---- the first boot: a disk that grows -----------------------------------------------------------


class Disk:
    """An image on a larger disk, in a folder that Nix's root sees."""

    def __init__(self, host: Nix, raw: Path, definitions: Any, size: int) -> None:
        self.host = host
        self.folder = host.source.parent / "disk"
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "repart.d").mkdir(parents=True)
        for name, settings in definitions.items():
            lines = "".join(f"{key}={value}\n" for key, value in settings.items())
            (self.folder / "repart.d" / f"{name}.conf").write_text(f"[Partition]\n{lines}")
        self.path = self.folder / "disk.raw"
        shutil.copyfile(raw, self.path)
        self.before = {found.label: self.read(found) for found in partitions(self.path)}
        with self.path.open("r+b") as file:
            file.truncate(size)

    def read(self, partition: Partition) -> bytes:
        with self.path.open("rb") as file:
            file.seek(partition.start)
            return file.read(partition.size)

    def boot(self) -> str:
        """Run systemd-repart as the initrd does; returns what it says."""
        inside = self.host.inside(self.folder)
        argv = [*self.host.prefix, "systemd-repart", "--dry-run=no", "--empty=refuse"]
        argv += ["--offline=yes", "--discard=no", "--pretty=no"]
        argv += [f"--definitions={inside}/repart.d", f"{inside}/disk.raw"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def run(self, partition: Partition, *argv: str) -> str:
        """Run a program on a copy of a partition, ``FILE`` in its arguments."""
        file = self.folder / "partition"
        file.write_bytes(self.read(partition))
        words = [word.replace("FILE", self.host.inside(file)) for word in argv]
        done = subprocess.run(
            [*self.host.prefix, *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def definitions(nix: Nix) -> Any:
    return nix.evaluate("disk.nix")


@pytest.fixture(scope="module")
def raw(host: Nix) -> Path:
    (image,) = host.build(BUILDS, "image").glob("*.raw")
    return image


@pytest.mark.slow
def test_the_root_grows_and_engram_gets_its_partition_once(
    host: Nix, raw: Path, definitions: Any
) -> None:
    disk = Disk(host, raw, definitions, 1024 * MIB)
    disk.boot()
    esp, root, engram = partitions(disk.path)
    assert (esp.label, root.label, engram.label) == ("spark-esp", "spark-root", "spark-engram")
    assert esp.size == 96 * MIB
    assert engram.size == 256 * MIB
    assert root.size > 640 * MIB
    # all of the disk but the second partition table
    assert engram.end > 1022 * MIB

    # what was there is there
    assert disk.read(esp) == disk.before["spark-esp"]
    assert disk.read(root)[: len(disk.before["spark-root"])] == disk.before["spark-root"]

    disk.run(engram, "e2fsck", "-f", "-n", "FILE")
    assert disk.run(engram, "blkid", "-p", "-o", "value", "-s", "TYPE", "FILE") == "ext4\n"
    # what systemd-growfs asks of the kernel, asked of e2fsprogs
    disk.run(root, "sh", "-c", "e2fsck -f -p FILE && resize2fs FILE && e2fsck -f -n FILE")

    after = disk.path.read_bytes()
    disk.boot()
    assert partitions(disk.path) == (esp, root, engram)
    assert disk.path.read_bytes() == after


@pytest.mark.slow
def test_a_small_disk_has_no_engram_partition_but_grows(
    host: Nix, raw: Path, definitions: Any
) -> None:
    disk = Disk(host, raw, definitions, 300 * MIB)
    disk.boot()
    esp, root = partitions(disk.path)
    assert (esp.label, root.label) == ("spark-esp", "spark-root")
    assert root.end > 298 * MIB


@pytest.mark.slow
def test_a_partition_of_the_owner_stays(host: Nix, raw: Path, definitions: Any) -> None:
    disk = Disk(host, raw, definitions, 1024 * MIB)
    entry = "start=500MiB, size=8MiB, type=linux, name=mine\n"
    argv = ["sfdisk", "--quiet", "--append", str(disk.path)]
    subprocess.run(argv, input=entry, text=True, check=True)
    (mine,) = (found for found in partitions(disk.path) if found.label == "mine")
    disk.boot()
    assert mine in partitions(disk.path)
