"""The scripts that make ESP and root of the disk image, run as the Nix build runs them."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "modules" / "image"
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def run(
    script: str, *words: object, text: str = "", cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    # as writeShellApplication starts it
    flags = ["-o", "errexit", "-o", "nounset", "-o", "pipefail"]
    return subprocess.run(
        ["bash", *flags, FOLDER / script, *map(str, words)],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={"PATH": PATH, **env},
    )


# ---- boot-size.sh ------------------------------------------------------------------------------


def test_kernel_and_initrd_are_counted_together(tmp_path: Path) -> None:
    kernel, initrd = tmp_path / "Image", tmp_path / "initrd"
    kernel.write_bytes(bytes(600))
    (tmp_path / "real").write_bytes(bytes(401))
    initrd.symlink_to(tmp_path / "real")
    assert run("boot-size.sh", 1001, kernel, initrd).returncode == 0
    done = run("boot-size.sh", 1000, kernel, initrd)
    assert done.returncode == 1
    assert "have 1001 bytes, more than 1000 (services.spark.image.maxBootBytes)" in done.stderr
    assert "boot.initrd.availableKernelModules" in done.stderr


# ---- esp.sh ------------------------------------------------------------------------------------


def test_the_esp_depends_on_contents_alone(tmp_path: Path) -> None:
    for name in ("mkfs.vfat", "mcopy"):
        if shutil.which(name, path=PATH) is None:
            pytest.skip(f"{name} is not installed")
    names = ["EFI/BOOT/BOOTAA64.EFI", "EFI/Linux/spark-appliance_1.efi", "spark/node", "a/b/c", "z"]
    images = []
    for number, (zone, time) in enumerate((("UTC", 1), ("Asia/Tokyo", 2_000_000_000))):
        lines = []
        for name in names:
            source = tmp_path / f"{number}-{name.replace('/', '-')}"
            source.write_text(name * 1000)
            os.utime(source, (time, time))
            lines.append(f"{name}\t{source}\n")
        random.Random(number).shuffle(lines)
        image = tmp_path / f"{number}.img"
        # a file that is there is no reason for other bytes
        image.write_bytes(b"\xff" * (number * 1000))
        done = run("esp.sh", image, "40M", "0867da16", text="".join(lines), TZ=zone)
        assert done.returncode == 0, done.stderr
        images.append(image)
    first, second = (image.read_bytes() for image in images)
    assert first == second
    listed = subprocess.run(
        ["mdir", "-/", "-b", "-i", images[0], "::"], capture_output=True, text=True, check=True
    )
    assert {f"::/{name}" for name in names} <= set(listed.stdout.split())


# ---- root.sh -----------------------------------------------------------------------------------


def definition(folder: Path, *sources: Path) -> Path:
    path = folder / "20-root.conf"
    lines = "".join(f"CopyFiles={source}:/nix/store/{source.name}\n" for source in sources)
    path.write_text(f"[Partition]\nType=root-arm64\n{lines}")
    return path


def store(folder: Path) -> Path:
    path = folder / "pkg"
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "a b").write_text("x" * 5000)
    (path / "bin" / "copy").write_text("x" * 5000)
    (path / "link").symlink_to("bin/copy")
    for file in (path / "bin" / "a b", path / "bin" / "copy"):
        os.utime(file, (1_000_000_000, 1))
    return path


def sizes(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.startswith("Size")]


def test_the_size_is_that_of_the_files(tmp_path: Path) -> None:
    path = definition(tmp_path, store(tmp_path))
    before = path.read_text()
    assert run("root.sh", path, cwd=tmp_path).returncode == 0
    # 4 blocks for two files, 2 folders; all else is the 128 MiB, rounded up to a MiB
    assert sizes(path) == [f"SizeMinBytes={129 << 20}", f"SizeMaxBytes={129 << 20}"]
    assert path.read_text().startswith(before)
    assert not (tmp_path / "plain").exists()


@pytest.mark.parametrize("kind", ["link", "old"])
def test_links_and_old_times_are_copied_away(tmp_path: Path, kind: str) -> None:
    source = store(tmp_path)
    if kind == "link":
        (source / "bin" / "copy").unlink()
        (source / "bin" / "copy").hardlink_to(source / "bin" / "a b")
    else:
        os.utime(source / "bin" / "copy", (1, 1))
    path = definition(tmp_path, source)
    done = run("root.sh", path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    copy = tmp_path / "plain" / source.relative_to("/")
    assert f"CopyFiles={copy}:/nix/store/pkg\n" in path.read_text()
    assert f"CopyFiles={source}:" not in path.read_text()
    for file in ("a b", "copy"):
        status = (copy / "bin" / file).stat()
        assert (status.st_nlink, status.st_mtime) == (1, 1)
        assert status.st_atime > 315532800
        assert (copy / "bin" / file).read_text() == "x" * 5000
    assert (copy / "link").readlink() == Path("bin/copy")
    assert sizes(path) == [f"SizeMinBytes={129 << 20}", f"SizeMaxBytes={129 << 20}"]


def test_a_definition_without_files(tmp_path: Path) -> None:
    done = run("root.sh", definition(tmp_path), cwd=tmp_path)
    assert done.returncode == 1
    assert "copies no files" in done.stderr
