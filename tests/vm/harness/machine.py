"""A guest as a test sees it: the NixOS test driver's ``Machine``, and cables that can be pulled."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from harness import cpio
from harness import spec as specs
from harness.base_image import BaseImage
from harness.guest_files import BACKDOOR_READY
from harness.log import say
from harness.monitor import Monitor
from harness.spec import Spec

STATE_BYTES = 6 << 30
"""Size of the sparse disk that keeps what a guest writes."""

BOOT_SECONDS = 600.0
ASK_SECONDS = 0.3
"""Between two looks at something in a guest: each look costs an emulated fork."""


class Machine:
    """A guest. Commands run as root in a shell; time-outs are seconds."""

    def __init__(
        self, spec: Spec, image: BaseImage, folder: Path, descriptors: Mapping[int, int]
    ) -> None:
        self.name = spec.name
        self.spec = spec
        self.folder = folder
        self._image = image
        self._descriptors = descriptors
        self._process: subprocess.Popen[bytes] | None = None
        self._monitor: Monitor | None = None
        self._shell: socket.socket | None = None
        self._pending = b""
        self._connected = False
        self._sent = 0
        folder.mkdir(parents=True)
        for serial, mib in spec.disks.items():
            with (folder / f"{serial}.raw").open("wb") as file:
                file.truncate(mib << 20)
        state = folder / "state.raw"
        with state.open("wb") as file:
            file.truncate(STATE_BYTES)
        mkfs = shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        options = ["-qF", "-E", "lazy_itable_init=1,nodiscard", "-O", "^resize_inode"]
        subprocess.run([mkfs or "mkfs.ext4", *options, state], check=True)

    # -- life --------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether QEMU runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Switch on; returns at once."""
        if self.running:
            return
        self._hang_up()
        for name in ("monitor", "shell"):
            (self.folder / name).unlink(missing_ok=True)
        own = {
            "etc/hostname": (0o644, f"{self.name}\n"),
            "etc/machine-id": (0o644, f"{self.spec.number:032x}\n"),
            "etc/systemd/system/multi-user.target.d/vm.conf": (
                0o644,
                "[Unit]\n" + "".join(f"Wants={unit}\n" for unit in self.spec.units),
            ),
            **self.spec.files,
        }
        overlay = {f"overlay/{path}": (mode, text.encode()) for path, (mode, text) in own.items()}
        (self.folder / "initrd").write_bytes(
            self._image.initrd.read_bytes() + cpio.archive(overlay)
        )
        argv = specs.command(self.spec, self._image, self.folder, self._descriptors)
        with (self.folder / "qemu.log").open("ab") as log:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=tuple(self._descriptors.values()),
            )
        while not ((self.folder / "monitor").exists() and (self.folder / "shell").exists()):
            if not self.running:
                said = (self.folder / "qemu.log").read_text(errors="replace")[-2000:]
                raise AssertionError(f"{self.name}: QEMU ended: {said}")
            select.select([], [], [], 0.02)
        self._monitor = Monitor(self.folder / "monitor")
        self._shell = socket.socket(socket.AF_UNIX)
        self._shell.connect(str(self.folder / "shell"))
        self._pending, self._connected = b"", False
        say(self.name, "switched on")

    def crash(self) -> None:
        """Cut the power: nothing in the guest is flushed."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._hang_up()
        say(self.name, "power cut")

    def shutdown(self) -> None:
        """Switch off in order."""
        self._send("poweroff")
        assert self._process is not None
        self._process.wait(timeout=300)
        self._hang_up()

    def reboot(self) -> None:
        """Switch off in order and on again."""
        self.shutdown()
        self.start()

    def _hang_up(self) -> None:
        if self._monitor is not None:
            with contextlib.suppress(OSError):
                self._monitor.close()
        if self._shell is not None:
            self._shell.close()
        self._monitor = self._shell = None
        self._connected = False

    # -- commands ----------------------------------------------------------------------------

    def execute(self, command: str, timeout: int | None = 900) -> tuple[int, str]:
        """Run a command; returns its exit status and output."""
        self._connect()
        # One fork and no exec: a subshell of the guest's bash, framed by a mark that no command
        # can print. NixOS's own way (timeout, bash, base64) costs ten times as much here.
        self._sent += 1
        mark = f"\x1e{os.urandom(6).hex()}-{self._sent}:"
        body = shlex.quote(f"set -euo pipefail; {command}")
        self._send(f"( eval {body}\n) </dev/null; printf '%s%d\\n' {shlex.quote(mark)} $?")
        text = self._until(mark.encode(), timeout).decode(errors="replace")
        return int(self._until(b"\n", 60)), text

    def succeed(self, *commands: str, timeout: int | None = None) -> str:
        """Run commands that must succeed; returns their output."""
        output = ""
        for line in commands:
            status, text = self.execute(line, timeout or 900)
            if status:
                raise AssertionError(f"{self.name}: `{line}` failed ({status}):\n{text}")
            output += text
        return output

    def fail(self, *commands: str, timeout: int | None = None) -> str:
        """Run commands that must fail; returns their output."""
        output = ""
        for line in commands:
            status, text = self.execute(line, timeout or 900)
            if not status:
                raise AssertionError(f"{self.name}: `{line}` unexpectedly succeeded:\n{text}")
            output += text
        return output

    def wait_until_succeeds(self, command: str, timeout: int = 900) -> str:
        """Repeat a command until it succeeds; returns its output."""
        return self._retry(command, lambda status: status == 0, timeout)

    def wait_until_fails(self, command: str, timeout: int = 900) -> str:
        """Repeat a command until it fails; returns its output."""
        return self._retry(command, lambda status: status != 0, timeout)

    def wait_for_unit(self, unit: str, timeout: int = 900) -> None:
        """Wait until a unit is active; fails at once when it has failed."""
        end = time.monotonic() + timeout
        while True:
            text = self.succeed(f"systemctl show --property=ActiveState,Job {shlex.quote(unit)}")
            values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
            state = values.get("ActiveState", "")
            if state == "active":
                return
            idle = state == "inactive" and values.get("Job", "0") in ("", "0")
            if idle and "No jobs" not in self.execute("systemctl list-jobs")[1]:
                idle = False
            if state == "failed" or idle or time.monotonic() > end:
                said = self.execute(f"systemctl status --no-pager {shlex.quote(unit)}")[1]
                raise AssertionError(f"{self.name}: {unit} is {state}:\n{said}")
            select.select([], [], [], ASK_SECONDS)

    def wait_for_open_port(self, port: int, addr: str = "localhost", timeout: int = 900) -> None:
        """Wait until something listens."""
        self.wait_until_succeeds(f"exec 3<>/dev/tcp/{addr}/{port}", timeout)

    def wait_for_file(self, filename: str, timeout: int = 900) -> None:
        """Wait until a file exists."""
        self.wait_until_succeeds(f"test -e {shlex.quote(filename)}", timeout)

    def _retry(self, command: str, good: Callable[[int], bool], timeout: int) -> str:
        end = time.monotonic() + timeout
        while True:
            status, text = self.execute(command, timeout)
            if good(status):
                return text
            if time.monotonic() > end:
                raise AssertionError(
                    f"{self.name}: after {timeout} s `{command}` still gives {status}:\n{text}"
                )
            select.select([], [], [], ASK_SECONDS)

    def _connect(self) -> None:
        self.start()
        if not self._connected:
            self._until(BACKDOOR_READY.encode() + b"\n", BOOT_SECONDS)
            self._connected = True

    def _send(self, line: str) -> None:
        assert self._shell is not None
        self._shell.sendall(line.encode() + b"\n")

    def _until(self, mark: bytes, timeout: float | None) -> bytes:
        """Return what the guest's shell prints up to a mark, which is dropped."""
        assert self._shell is not None
        end = time.monotonic() + (timeout or 1e9)
        while mark not in self._pending:
            left = max(0.0, end - time.monotonic())
            if not select.select([self._shell], [], [], left)[0]:
                raise AssertionError(f"{self.name}: no answer from the guest in {timeout:g} s")
            data = self._shell.recv(1 << 20)
            if not data:
                raise AssertionError(f"{self.name}: the guest is gone")
            self._pending += data
        before, _, self._pending = self._pending.partition(mark)
        return before

    # -- faults ------------------------------------------------------------------------------

    def plug(self, cable: str, *, connected: bool) -> None:
        """Put this end of a cable in or pull it out; a real cable has two ends (driver)."""
        if self._monitor is not None and self.running:
            self._monitor.command("set_link", name=cable, up=connected)
