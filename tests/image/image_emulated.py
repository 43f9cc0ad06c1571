"""Run programs of a built image under qemu-user, in a sandbox, without root or an engine.

A program that starts others (nvcc, ninja, spark-engram pack) needs a kernel that knows what to do
with arm64 files. Linux 6.7 and later can be told so inside a user name space, where nothing of the
machine changes; there everything runs as it would on arm64. Elsewhere single programs still run.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from spark_appliance.image import oci

QEMU = "qemu-aarch64-static"
# ELF header of a program or library for aarch64, and which bits of it count
# (qemu's scripts/qemu-binfmt-conf.sh).
_MAGIC = rb"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
_MASK = rb"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
_REGISTER = """\
set -e
mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
printf '%s' "$1" > /proc/sys/fs/binfmt_misc/register
shift
exec "$@"
"""


class Emulated:
    """An unpacked image; ``run`` starts one of its programs.

    ``starts_programs`` says whether these may start others. ``config`` is the image's own, with
    environment, user, entrypoint and command.
    """

    def __init__(self, layout: Path, root: Path) -> None:
        self.layout = layout
        self.root = root
        image = oci.read_image(layout)
        self.config = oci.Layout(layout).json(image.config)["config"]
        self.environment = dict(item.split("=", 1) for item in self.config["Env"])
        for program in ("bwrap", "tar", QEMU):
            if shutil.which(program) is None:
                pytest.skip(f"{program} is not installed (bubblewrap, tar, qemu-user-static)")
        self._qemu = str(shutil.which(QEMU))
        self.starts_programs = _started([*self._with_kernel(), "true"])
        stamp = root.with_name(f"{root.name}.digest")
        if not stamp.is_file() or stamp.read_text() != image.manifest:
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(parents=True)
            for digest in image.layers:
                # -P: links of an image point to absolute paths inside it
                subprocess.run(
                    ["tar", "-xPf", oci.Layout(layout).path(digest), "-C", root, "--no-same-owner"],
                    check=True,
                )
            stamp.write_text(image.manifest)

    def _with_kernel(self) -> list[str]:
        # F: the kernel opens qemu now, so that it need not be inside the sandbox
        entry = f":aarch64:M::{_MAGIC.decode()}:{_MASK.decode()}:{self._qemu}:F"
        return ["unshare", "-Urm", "sh", "-c", _REGISTER, "sh", entry]

    def run(
        self,
        *argv: str,
        timeout: float = 300,
        stdin: str | None = None,
        binds: Mapping[str, Path] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> str:
        """Return what a program prints that must succeed; arguments as for ``complete``."""
        done = self.complete(*argv, timeout=timeout, stdin=stdin, binds=binds, variables=variables)
        assert done.returncode == 0, f"{shlex.join(argv)}: {done.returncode}\n{done.stderr}"
        return done.stdout

    def complete(
        self,
        *argv: str,
        timeout: float = 300,
        stdin: str | None = None,
        binds: Mapping[str, Path] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end.

        ``binds`` are folders of the image and what is to be seen there instead, read-only;
        ``variables`` come on top of the image's environment.
        """
        # only /cache can be written, as for the user that the image runs as
        command = ["bwrap", "--ro-bind", str(self.root), "/"]
        command += ["--bind", str(self.root / "cache"), "/cache"]
        command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--clearenv"]
        for place, path in (binds or {}).items():
            command += ["--ro-bind", str(path), place]
        for name, value in (self.environment | dict(variables or {})).items():
            command += ["--setenv", name, value]
        # the default CPU model emulates pointer authentication, ten times slower
        command += ["--setenv", "QEMU_CPU", "neoverse-n1", "--chdir", "/cache"]
        if self.starts_programs:
            command = [*self._with_kernel(), *command, *argv]
        else:
            (self.root / "qemu").touch()
            command += ["--ro-bind", self._qemu, "/qemu", "/qemu", *argv]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, check=False, input=stdin
        )

    def needs_programs(self) -> None:
        """Skip a test whose program starts others, where the kernel cannot."""
        if not self.starts_programs:
            pytest.skip(
                "no binfmt_misc in a user name space (Linux 6.7, unprivileged user name spaces): "
                "a program of the image cannot start another"
            )


def _started(argv: list[str]) -> bool:
    try:
        return subprocess.run(argv, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@contextmanager
def unpacked(layout: Path, root: Path) -> Iterator[Emulated]:
    """Unpack an image into a new folder, which goes away at the end."""
    try:
        yield Emulated(layout, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)
