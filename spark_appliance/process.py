"""The only module that starts programs.

Every call takes an argument vector (never a shell string), has a deadline and runs the program
in its own session, so that one kill reaches everything it started. Nothing here logs or repeats
``input`` or ``env``: that is where secrets travel.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from spark_appliance.errors import OperationError

# Seconds between SIGTERM and SIGKILL: enough for ssh to send its disconnect.
_KILL_GRACE_S = 2.0
# Lines of stderr that an error message repeats.
_STDERR_LINES = 5


@dataclass(frozen=True, slots=True)
class Completed:
    """A program that ended: its argv, exit status (negative: signal) and decoded output."""

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str


class ProcessError(OperationError):
    """Base of what can go wrong with a program; ``argv`` is what was started."""

    def __init__(self, argv: Sequence[str], message: str) -> None:
        self.argv = tuple(argv)
        super().__init__(message)


class ProgramMissingError(ProcessError):
    """The program is not on PATH or not executable."""


class TimedOutError(ProcessError):
    """The program ran past its deadline (``timeout`` seconds) and was killed."""

    def __init__(self, argv: Sequence[str], timeout: float) -> None:
        self.timeout = timeout
        super().__init__(argv, f"{shlex.join(argv)}: not finished after {timeout:g} s, killed")


class FailedError(ProcessError):
    """The program ended with a non-zero status; ``completed`` has its output."""

    def __init__(self, completed: Completed) -> None:
        self.completed = completed
        tail = "\n".join(completed.stderr.strip().splitlines()[-_STDERR_LINES:])
        status = completed.returncode
        how = f"exit status {status}" if status >= 0 else f"signal {-status}"
        super().__init__(
            completed.argv, f"{shlex.join(completed.argv)}: {how}" + (f"\n{tail}" if tail else "")
        )


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    input: str | None = None,  # noqa: A002 - the name subprocess uses
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> Completed:
    """Run a program to its end and return its output.

    ``timeout`` is in seconds; ``input`` goes to its standard input (None: empty); ``env`` is
    added to this process's environment. Output is decoded as UTF-8, bad bytes replaced.

    Raises ProgramMissingError, TimedOutError and, with ``check``, FailedError for a non-zero
    status.
    """
    with tempfile.TemporaryFile() as stderr:
        process = _start(argv, stderr, env)
        try:
            stdout, _ = process.communicate((input or "").encode(), timeout=timeout)
        except subprocess.TimeoutExpired:
            _kill(process)
            raise TimedOutError(argv, timeout) from None
        except BaseException:
            _kill(process)
            raise
        completed = Completed(
            tuple(argv), process.returncode, stdout.decode(errors="replace"), _text(stderr)
        )
    if check and completed.returncode != 0:
        raise FailedError(completed)
    return completed


class Stream:
    """A running program whose standard output is read line by line.

    Iterate it for lines without their end, which is a newline or a carriage return: programs that
    redraw one line (rsync's progress) end it with the latter alone. The iteration ends when the
    program closes its output; it then raises TimedOutError, or FailedError for a non-zero status,
    unless ``stop`` was called.
    """

    def __init__(
        self, argv: Sequence[str], process: subprocess.Popen[bytes], stderr: IO[bytes]
    ) -> None:
        self._argv = tuple(argv)
        self._process = process
        self._stderr = stderr
        self._stopped = False
        self._expired: float | None = None

    def __iter__(self) -> Iterator[str]:
        if self._process.stdout is None:  # pragma: no cover - _start always makes the pipe
            return
        text = io.TextIOWrapper(self._process.stdout, encoding="utf-8", errors="replace")
        for line in text:
            yield line.rstrip("\n")
        returncode = self._process.wait()
        if self._expired is not None:
            raise TimedOutError(self._argv, self._expired)
        if returncode != 0 and not self._stopped:
            raise FailedError(Completed(self._argv, returncode, "", _text(self._stderr)))

    @property
    def stopped(self) -> bool:
        """Whether ``stop`` was called."""
        return self._stopped

    def stop(self) -> None:
        """End the program; the iteration then ends without an error. May be called twice."""
        self._stopped = True
        _kill(self._process)

    def _expire(self, timeout: float) -> None:
        self._expired = timeout
        _kill(self._process)


@contextlib.contextmanager
def stream(
    argv: Sequence[str],
    *,
    timeout: float,
    input: str | None = None,  # noqa: A002 - the name subprocess uses
    env: Mapping[str, str] | None = None,
) -> Iterator[Stream]:
    """Run a program and read its lines while it runs; leaving the context ends it.

    The arguments are those of ``run``. Raises ProgramMissingError at once, the rest while
    iterating.
    """
    with tempfile.TemporaryFile() as stderr:
        process = _start(argv, stderr, env)
        running = Stream(argv, process, stderr)
        timer = threading.Timer(timeout, running._expire, (timeout,))
        timer.daemon = True
        timer.start()
        feeder = threading.Thread(target=_feed, args=(process, input or ""), daemon=True)
        feeder.start()
        try:
            yield running
        finally:
            timer.cancel()
            _kill(process)
            feeder.join()
            if process.stdout is not None:
                process.stdout.close()


def _start(
    argv: Sequence[str], stderr: IO[bytes], env: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    # stderr goes to a file, not a pipe: ssh's connection-sharing master may outlive the program
    # with stderr open, and a pipe would then never reach its end.
    try:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, **env} if env else None,
            start_new_session=True,
        )
    except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
        raise ProgramMissingError(
            argv,
            f"cannot start {argv[0]}: {error.strerror or error}\n"
            f"    remedy: install {argv[0]} or put it on PATH",
        ) from None


def _feed(process: subprocess.Popen[bytes], text: str) -> None:
    if process.stdin is None:  # pragma: no cover - _start always makes the pipe
        return
    # A program may end without reading what it is given.
    with contextlib.suppress(BrokenPipeError, OSError):
        process.stdin.write(text.encode())
    with contextlib.suppress(BrokenPipeError, OSError):
        process.stdin.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_KILL_GRACE_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _text(stderr: IO[bytes]) -> str:
    stderr.seek(0)
    return stderr.read().decode(errors="replace")


class Sessions:
    """Everything that runs now, so that an interrupt ends all of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Stream] = set()
        self.closed = False

    @contextlib.contextmanager
    def holding(self, stream: Stream) -> Iterator[None]:
        """Keep a stream among the running ones."""
        with self._lock:
            self._open.add(stream)
            closed = self.closed
        if closed:
            stream.stop()
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(stream)

    def close(self) -> None:
        """End everything that runs and everything that will be started."""
        with self._lock:
            self.closed = True
            streams = list(self._open)
        for stream in streams:
            stream.stop()
