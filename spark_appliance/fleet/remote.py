"""One node: run something there with a deadline, written down, and stoppable.

What needs root runs through ``sudo -n`` unless the SSH user is root already.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from spark_appliance import process
from spark_appliance.errors import OperationError
from spark_appliance.fleet.evidence import Record, RunFolder
from spark_appliance.fleet.redact import redact
from spark_appliance.model.plan import NodePlan
from spark_appliance.process import FailedError, ProcessError, Sessions, Stream, TimedOutError
from spark_appliance.ssh import Host, UnreachableError

AS_ROOT: Final = (
    "sh",
    "-c",
    'if [ "$(id -u)" = 0 ]; then exec "$@"; fi; exec sudo -n -- "$@"',
    "sh",
)
"""Prefix of a command that needs root."""

_SSH_FAILED: Final = 255

_REMEDIES: Final = (
    (
        "a password is required",
        "let your user use sudo there without a password, or log in as root",
    ),
    ("sudo: not found", "log in as root, or install sudo"),
    ("spark-node: not found", "install the node first: spark-appliance install"),
    ("spark-node: command not found", "install the node first: spark-appliance install"),
)


class StepError(OperationError):
    """A step on a node failed: which node, which step, why, and what to do."""

    def __init__(self, node: str, step: str, reason: str, remedy: str = "") -> None:
        self.node = node
        self.step = step
        self.reason = reason
        tail = f"\n    remedy: {remedy}" if remedy else ""
        super().__init__(f"{node}: {step}: {reason}{tail}")


class NodeGoneError(StepError):
    """The node cannot be reached, or did not answer in time."""


class Stopped(Exception):  # noqa: N818 - not an error: the user asked for it
    """The step was ended from here."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a step gave back."""

    status: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A dry run: commands are collected instead of run."""

    commands: list[tuple[str, str, tuple[str, ...], str | None]] = field(default_factory=list)

    def add(self, node: str, step: str, argv: Sequence[str], input_text: str | None) -> None:
        """Collect one command."""
        self.commands.append((node, step, tuple(argv), input_text))


@dataclass(frozen=True, slots=True)
class Remote:
    """A node of the plan with its SSH destination."""

    plan: NodePlan
    host: Host
    evidence: RunFolder | None = None
    sessions: Sessions = field(default_factory=Sessions)
    rehearsal: Rehearsal | None = None

    @property
    def name(self) -> str:
        """Name in the plan."""
        return self.plan.name

    def run(
        self,
        step: str,
        argv: Sequence[str],
        *,
        seconds: float,
        root: bool = False,
        check: bool = True,
        text: str | None = None,
        rehearsed: str = "",
    ) -> Answer:
        """Run a command to its end.

        ``step`` says in a few words what it is for; ``seconds`` is its deadline; ``text`` its
        standard input; ``rehearsed`` what a dry run takes for its output.

        Raises:
            NodeGoneError: without a connection, or after the deadline.
            StepError: with ``check``, for a status other than 0.
            Stopped: when it was ended from here.
        """
        words = [*AS_ROOT, *argv] if root else list(argv)
        command = self.host.argv(words)
        if self.rehearsal is not None:
            self.rehearsal.add(self.name, step, command, text)
            return Answer(0, rehearsed, "")
        started, clock = time.time(), time.monotonic()
        answer, error = self._run(command, seconds, text)
        self._record(step, command, started, time.monotonic() - clock, answer, text, error)
        if error is not None:
            raise self._explain(step, error) from None
        if answer is None:
            raise Stopped
        if check and answer.status != 0:
            raise self._failure(step, answer)
        return answer

    def json(
        self,
        step: str,
        argv: Sequence[str],
        *,
        seconds: float,
        root: bool = False,
        rehearsed: Any = None,
    ) -> Any:
        """Run a command that answers with one JSON document and return it.

        Raises:
            StepError: as ``run``, and when the answer is no JSON.
        """
        canned = json.dumps(rehearsed)
        answer = self.run(step, argv, seconds=seconds, root=root, rehearsed=canned)
        try:
            return json.loads(answer.stdout)
        except ValueError:
            raise StepError(
                self.name, step, "the answer is no JSON", "install this version on the node"
            ) from None

    @contextlib.contextmanager
    def lines(
        self, step: str, argv: Sequence[str], *, seconds: float, root: bool = False
    ) -> Iterator[Iterator[str]]:
        """Run a command and read its lines while it runs; leaving the context ends it.

        The run folder gets the command with its end, not the lines: there is no bound to them.

        Raises:
            StepError: while iterating, as ``run``.
        """
        command = self.host.argv([*AS_ROOT, *argv] if root else list(argv))
        started, clock = time.time(), time.monotonic()
        answer: Answer | None = None  # until it ended by itself
        error: ProcessError | None = None

        def read(stream: Stream) -> Iterator[str]:
            nonlocal answer
            yield from map(redact, stream)
            if not stream.stopped:
                answer = Answer(0, "", "")

        try:
            with (
                process.stream(command, timeout=seconds) as stream,
                self.sessions.holding(stream),
            ):
                yield read(stream)
        except FailedError as failed:
            done = failed.completed
            answer = Answer(done.returncode, "", done.stderr)
            if done.returncode == _SSH_FAILED:
                error = UnreachableError(done, self.host.destination)
            raise self._explain(step, failed) from None
        except ProcessError as caught:
            error = caught
            raise self._explain(step, caught) from None
        finally:
            self._record(step, command, started, time.monotonic() - clock, answer, None, error)

    def _record(
        self,
        step: str,
        command: Sequence[str],
        started: float,
        seconds: float,
        answer: Answer | None,
        text: str | None,
        error: ProcessError | None,
    ) -> None:
        if self.evidence is None:
            return
        self.evidence.add(
            Record(
                self.name,
                step,
                tuple(command),
                started,
                seconds,
                None if answer is None else answer.status,
                "" if answer is None else answer.stdout,
                "" if answer is None else answer.stderr,
                text,
                None if error is None else str(error).splitlines()[0],
            )
        )

    def _run(
        self, command: Sequence[str], seconds: float, text: str | None
    ) -> tuple[Answer | None, ProcessError | None]:
        lines: list[str] = []
        try:
            with (
                process.stream(command, timeout=seconds, input=text) as stream,
                self.sessions.holding(stream),
            ):
                lines.extend(stream)
                if self.sessions.closed:
                    return None, None
        except FailedError as error:
            done = error.completed
            answer = Answer(done.returncode, _joined(lines), done.stderr)
            if done.returncode == _SSH_FAILED:
                return answer, UnreachableError(done, self.host.destination)
            return answer, None
        except ProcessError as error:
            return None, error
        return Answer(0, _joined(lines), ""), None

    def _failure(self, step: str, answer: Answer) -> StepError:
        said = redact(answer.stderr.strip() or answer.stdout.strip())
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        # rsync's last line is about its protocol; the server's reason stands above it
        told = [line for line in lines if line.startswith("@ERROR: ")] or lines[-1:]
        reason = told[0] if told else f"exit status {answer.status}"
        remedy = next((help_ for mark, help_ in _REMEDIES if mark in said), "")
        return StepError(self.name, step, reason, remedy)

    def _explain(self, step: str, error: ProcessError) -> StepError:
        if isinstance(error, UnreachableError):
            text, _, remedy = str(error).partition("\n    remedy: ")
            reason = text.split("no SSH connection: ", 1)[-1]
            return NodeGoneError(self.name, step, f"no SSH connection: {reason}", remedy)
        if isinstance(error, TimedOutError):
            return NodeGoneError(
                self.name,
                step,
                f"no end after {error.timeout:g} s",
                f"look at the node: ssh {shlex.quote(self.host.destination)}",
            )
        if isinstance(error, FailedError):
            done = error.completed
            if done.returncode == _SSH_FAILED:
                return self._explain(step, UnreachableError(done, self.host.destination))
            return self._failure(step, Answer(done.returncode, done.stdout, done.stderr))
        text, _, remedy = str(error).partition("\n    remedy: ")
        return StepError(self.name, step, text, remedy)


def _joined(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
