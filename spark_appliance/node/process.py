"""The only place that starts programs. Every call has a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from spark_appliance.node.errors import NodeError


@dataclass(frozen=True, slots=True)
class Completed:
    """How a program ended; ``status`` is its exit status, or minus the signal that killed it."""

    argv: tuple[str, ...]
    status: int
    stdout: str
    stderr: str

    @property
    def reason(self) -> str:
        """The first line of what the program said, for messages: hints come after the reason."""
        lines = [line for line in (self.stderr or self.stdout).splitlines() if line.strip()]
        return lines[0].strip() if lines else f"exit status {self.status}"


class Runner(Protocol):
    """Runs a program to its end."""

    def __call__(self, argv: Sequence[str], *, seconds: float) -> Completed:
        """Run ``argv``; raises NodeError when it is not there or takes longer than ``seconds``."""


def _environment() -> dict[str, str]:
    # messages and numbers in one language; no notify socket, which is ours
    environment = {**os.environ, "LC_ALL": "C"}
    environment.pop("NOTIFY_SOCKET", None)
    return environment


def _not_there(argv: Sequence[str]) -> NodeError:
    return NodeError(f"{argv[0]}: no such program in PATH={os.environ.get('PATH', '')}")


def _too_long(argv: Sequence[str], seconds: float) -> NodeError:
    return NodeError(f"'{' '.join(argv)}' did not end within {seconds:g} s")


def run(argv: Sequence[str], *, seconds: float) -> Completed:
    """Run a program and return how it ended, whatever its exit status.

    Raises:
        NodeError: when it cannot be started or does not end in time (it is killed then).
    """
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
            env=_environment(),
        )
    except subprocess.TimeoutExpired:
        raise _too_long(argv, seconds) from None
    except OSError:
        raise _not_there(argv) from None
    return Completed(
        tuple(argv),
        done.returncode,
        done.stdout.decode(errors="replace"),
        done.stderr.decode(errors="replace"),
    )


async def run_async(argv: Sequence[str], *, seconds: float) -> Completed:
    """Do the same without blocking; a cancelled call kills the program.

    Raises:
        NodeError: when it cannot be started or does not end in time (it is killed then).
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(),
            start_new_session=True,
        )
    except OSError:
        raise _not_there(argv) from None
    try:
        async with asyncio.timeout(seconds):
            stdout, stderr = await process.communicate()
    except TimeoutError:
        raise _too_long(argv, seconds) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return Completed(
        tuple(argv),
        process.returncode if process.returncode is not None else -signal.SIGKILL,
        stdout.decode(errors="replace"),
        stderr.decode(errors="replace"),
    )


def replace_process(argv: Sequence[str], environment: dict[str, str]) -> None:
    """Become another program; only returns by raising.

    Raises:
        NodeError: when it cannot be executed.
    """
    try:
        os.execvpe(argv[0], list(argv), environment)  # noqa: S606 - argv, no shell
    except OSError as error:
        raise NodeError(f"cannot execute {argv[0]}: {error.strerror}") from None
