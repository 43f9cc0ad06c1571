"""Run sections side by side, each with a deadline, and collect what they saw.

A section runs in a child process and hands over each fact as soon as it has it. A child that
hangs (a dead NFS server leaves it unkillable) is left behind with its output closed: its finished
facts are kept, the one it hung on is named, and the answer is not held up.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, Callable, Mapping, Sequence

PROBE_VERSION = 1
"""Version of the document; the control side refuses any other."""

READ_LIMIT = 16 << 20
"""Bytes read of one file at most."""

_PIECE = 64 << 10

SIDE_BY_SIDE = 6
"""Sections that run at the same time."""

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("docker", "image", "ls"),
    ("docker", "ps"),
    ("docker", "volume", "inspect"),
    ("docker", "volume", "ls"),
    ("docker", "image", "inspect"),
    ("dmesg", "--notime"),
    ("ibv_devinfo", "-v"),
    ("ip", "-j", "addr"),
    ("ip", "-j", "neigh"),
    ("ip", "-j", "route"),
    ("nft", "-j", "list", "ruleset"),
    ("iptables", "-S"),
    ("nmcli", "-t", "-f", "DEVICE,STATE", "device"),
    ("nvidia-smi", "--query-gpu"),
    ("nvidia-smi", "--query-compute-apps"),
    ("nvme", "get-feature"),
    ("ping", "-n"),
    ("rpcinfo", "-T", "tcp"),
    ("systemctl", "get-default"),
    ("systemctl", "is-active"),
    ("systemctl", "list-units"),
    ("systemctl", "show"),
    ("timedatectl", "show"),
)
"""Every program that the probe may start, by the beginning of its command line. All only read."""


class ProbeError(Exception):
    """A fact that could not be had; the text says why."""


class Machine:
    """The node as the sections see it. ``root`` is ``/``, or the root of a tree in tests."""

    def __init__(self, root: str = "/") -> None:
        self.root = root.rstrip("/")

    def path(self, name: str) -> str:
        """Return where an absolute path lies."""
        return self.root + name

    def read(self, name: str, limit: int = READ_LIMIT) -> bytes:
        """Return the bytes of a file, at most ``limit``."""
        try:
            # unbuffered and in pieces: files below /proc/sys refuse large reads (ENOMEM)
            with open(self.path(name), "rb", buffering=0) as file:
                pieces: list[bytes] = []
                left = limit
                while left > 0:
                    piece = file.read(min(_PIECE, left))
                    if not piece:
                        break
                    pieces.append(piece)
                    left -= len(piece)
                return b"".join(pieces)
        except OSError as error:
            raise ProbeError(f"{name}: {error.strerror or error}") from None

    def text(self, name: str, limit: int = READ_LIMIT) -> str:
        """Return a file as text without the white space around it."""
        return self.read(name, limit).decode("utf-8", "replace").strip()

    def maybe(self, name: str) -> str | None:
        """Return a file as text, None when it cannot be read."""
        try:
            return self.text(name)
        except ProbeError:
            return None

    def listing(self, name: str) -> list[str]:
        """Return the sorted names in a directory."""
        try:
            return sorted(os.listdir(self.path(name)))
        except OSError as error:
            raise ProbeError(f"{name}: {error.strerror or error}") from None

    def exists(self, name: str) -> bool:
        """Say whether a path exists."""
        return os.path.exists(self.path(name))

    def link(self, name: str) -> str | None:
        """Return the last part of a symbolic link's target, None when it is none."""
        try:
            return os.path.basename(os.readlink(self.path(name)))
        except OSError:
            return None

    def has(self, program: str) -> bool:
        """Say whether a program is on PATH."""
        return shutil.which(program) is not None

    def run(self, *argv: str, timeout: float = 5.0, check: bool = True) -> str:
        """Return what a program of ``COMMANDS`` prints.

        Raises ProbeError when it is missing, late or, with ``check``, unsuccessful.
        """
        if not any(_begins(argv, allowed) for allowed in COMMANDS):
            raise ProbeError(f"{' '.join(argv)}: not a command of the probe")
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout,
                check=False,
                env=dict(os.environ, LC_ALL="C"),
            )
        except FileNotFoundError:
            raise ProbeError(f"{argv[0]}: not installed") from None
        except subprocess.TimeoutExpired:
            raise ProbeError(f"{argv[0]}: no answer within {timeout:g} s") from None
        except OSError as error:
            raise ProbeError(f"{argv[0]}: {error.strerror or error}") from None
        if check and done.returncode != 0:
            lines = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
            raise ProbeError(
                f"{argv[0]}: status {done.returncode}{': ' + lines[-1][:200] if lines else ''}"
            )
        return done.stdout.decode("utf-8", "replace")

    def json(self, *argv: str, timeout: float = 5.0) -> Any:
        """Return what a program prints, read as JSON."""
        text = self.run(*argv, timeout=timeout)
        try:
            return json.loads(text or "[]")
        except ValueError:
            raise ProbeError(f"{argv[0]}: printed no JSON") from None


def _begins(argv: Sequence[str], allowed: Sequence[str]) -> bool:
    if len(argv) < len(allowed):
        return False
    last = len(allowed) - 1
    return all(
        # a last word such as --query-gpu goes on with '=...'
        word == given or (position == last and given.startswith(word + "="))
        for position, (word, given) in enumerate(zip(allowed, argv))
    )


class Facts:
    """Where a section puts what it saw; each fact is handed over at once."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def put(self, key: str, look: Callable[..., Any], *args: Any) -> Any:
        """Put the value of ``look(*args)`` under ``key``, or the reason why there is none."""
        self._write(json.dumps(["start", key]))
        try:
            value = look(*args)
            line = json.dumps(["value", key, value])
        except ProbeError as error:
            self._write(json.dumps(["error", key, str(error)]))
        except Exception as error:
            self._write(json.dumps(["error", key, f"{type(error).__name__}: {error}"]))
        else:
            self._write(line)
            return value
        return None


Section = Callable[[Machine, Mapping[str, Any], Facts], None]


def answer(
    machine: Machine,
    request: Mapping[str, Any],
    sections: Sequence[tuple[str, Section, float]],
    total: float,
) -> dict[str, Any]:
    """Run the sections (name, function, deadline in seconds) and return the document.

    Nothing starts once ``total`` seconds have passed.
    """
    started = time.time()
    begin = time.monotonic()
    results: dict[str, dict[str, Any]] = {}
    waiting = list(sections)
    running: dict[int, _Child] = {}
    while waiting or running:
        while waiting and len(running) < SIDE_BY_SIDE:
            name, section, deadline = waiting.pop(0)
            left = total - (time.monotonic() - begin)
            if left <= 0:
                results[name] = {"errors": {"*": f"not started within {total:g} s"}}
                continue
            child = _Child(name, min(deadline, left))
            child.start(machine, request, section)
            running[child.reader] = child
        if not running:
            continue
        nearest = min(child.until for child in running.values())
        ready, _, _ = select.select(list(running), [], [], max(0.0, nearest - time.monotonic()))
        now = time.monotonic()
        for reader in list(running):
            child = running[reader]
            ended = child.receive() if reader in ready else False
            if ended or now >= child.until:
                results[child.name] = child.finish(ended)
                del running[reader]
    return {
        "probe": PROBE_VERSION,
        "node": request.get("node"),
        "uid": os.getuid(),
        "python": "{}.{}.{}".format(*sys.version_info[:3]),
        "started": started,
        "ended": time.time(),
        "sections": {name: results[name] for name, _, _ in sections},
    }


class _Child:
    """A section in its own process and session."""

    def __init__(self, name: str, deadline: float) -> None:
        self.name = name
        self.deadline = deadline
        self.until = time.monotonic() + deadline
        self.reader = -1
        self._pid = -1
        self._buffer = b""

    def start(self, machine: Machine, request: Mapping[str, Any], section: Section) -> None:
        """Fork; the child never returns from here."""
        self.reader, writer = os.pipe()
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid:
            os.close(writer)
            return
        status = 1
        try:
            os.setsid()
            os.close(self.reader)
            # the SSH channel stays open as long as anyone holds its ends
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)

            def write(line: str) -> None:
                data = line.encode() + b"\n"
                while data:
                    data = data[os.write(writer, data) :]

            section(machine, request, Facts(write))
            status = 0
        except BaseException as error:  # the last chance to say what went wrong
            text = json.dumps(["error", "*", f"{type(error).__name__}: {error}"])
            os.write(writer, text.encode() + b"\n")
        finally:
            os._exit(status)

    def receive(self) -> bool:
        """Take what is there; returns True at the end of the child's output."""
        data = os.read(self.reader, 1 << 20)
        self._buffer += data
        return not data

    def finish(self, ended: bool) -> dict[str, Any]:
        """Kill what is left and return the section's facts and errors."""
        os.close(self.reader)
        if not ended:
            with contextlib.suppress(OSError):
                os.killpg(self._pid, signal.SIGKILL)
        # a process that hangs in the kernel cannot be waited for; init takes it over
        os.waitpid(self._pid, 0 if ended else os.WNOHANG)
        facts: dict[str, Any] = {}
        errors: dict[str, str] = {}
        current: str | None = None
        for line in self._buffer.split(b"\n"):
            try:
                kind, key, *rest = json.loads(line)
            except ValueError:
                continue
            if kind == "start":
                current = key
            elif kind == "value":
                facts[key], current = rest[0], None
            else:
                errors[key], current = rest[0], None
        if not ended:
            errors[current or "*"] = f"no answer within {self.deadline:g} s"
        elif current is not None:
            errors[current] = "the section ended early"
        facts["errors"] = errors
        return facts
