"""Run programs of a built image under qemu-user, in a sandbox, without root or an engine."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spark_appliance.image import oci


class Emulated:
    """An unpacked image; ``run`` starts one of its programs."""

    def __init__(self, layout: Path, root: Path) -> None:
        self.root = root
        image = oci.read_image(layout)
        config = oci.Layout(layout).json(image.config)["config"]
        self._environment = dict(item.split("=", 1) for item in config["Env"])
        for program in ("bwrap", "qemu-aarch64-static"):
            if shutil.which(program) is None:
                pytest.skip(f"{program} is not installed")
        for digest in image.layers:
            with tarfile.open(oci.Layout(layout).path(digest)) as archive:
                for member in archive:
                    # links of an image point to absolute paths inside it: "tar" would be refused
                    archive.extract(member, root, filter="fully_trusted")

    def run(self, *argv: str, timeout: float = 120) -> str:
        qemu = shutil.which("qemu-aarch64-static")
        (self.root / "qemu").touch()
        command = ["bwrap", "--bind", str(self.root), "/", "--ro-bind", str(qemu), "/qemu"]
        command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--clearenv"]
        for name, value in self._environment.items():
            command += ["--setenv", name, value]
        # the default CPU model emulates pointer authentication, ten times slower
        command += ["--setenv", "QEMU_CPU", "neoverse-n1", "--chdir", "/cache", "/qemu", *argv]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextmanager
def unpacked(layout: Path, root: Path) -> Iterator[Emulated]:
    root.mkdir()
    try:
        yield Emulated(layout, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)
