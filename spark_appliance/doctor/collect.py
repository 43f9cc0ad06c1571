"""Ask all nodes at once, one SSH session each, and take what comes back. Never hangs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, Literal

from spark_appliance import process
from spark_appliance.doctor.document import MAX_BYTES, BadDocument, read_document
from spark_appliance.doctor.probe.main import TOTAL
from spark_appliance.doctor.program import LAUNCHER
from spark_appliance.doctor.registry import Answer
from spark_appliance.process import FailedError, ProgramMissingError, Sessions, TimedOutError
from spark_appliance.ssh import Host, UnreachableError

PROBE_DEADLINE: Final = TOTAL + 20
"""Seconds for a whole session: the probe's own bound, and room to connect."""

DEEP_DEADLINE: Final = 120
"""Seconds for the measurements on one node."""

_SSH_FAILED = 255
_NO_PYTHON = 127

State = Literal["asking", "answered", "failed"]
_WAKE_S: Final = 0.2
"""Seconds between two looks at whether the user interrupted."""

Tell = Callable[[str, State, str], None]
"""Called with node, state and a text when something happens on a node."""


def quiet(_node: str, _state: State, _text: str) -> None:
    """Tell nobody."""


def collect(
    hosts: Mapping[str, Host],
    programs: Mapping[str, str],
    *,
    deadline: float = PROBE_DEADLINE,
    tell: Tell = quiet,
) -> dict[str, Answer]:
    """Run each node's program on it and return every node's answer; a failure is an answer too.

    ``deadline`` is in seconds for each node. Interrupting ends all sessions.

    Raises:
        ProgramMissingError: when there is no ssh on this machine.
    """
    if not hosts:
        return {}
    running = Sessions()
    pool = ThreadPoolExecutor(max_workers=len(hosts))
    try:
        futures: dict[str, Future[Answer]] = {
            name: pool.submit(_ask, name, host, programs[name], deadline, tell, running)
            for name, host in hosts.items()
        }
        pending: set[Future[Answer]] = set(futures.values())
        while pending:
            # bounded: an interrupt that came just before a wait without end would never be seen
            _, pending = wait(pending, timeout=_WAKE_S)
        return {name: future.result() for name, future in futures.items()}
    finally:
        running.close()
        pool.shutdown(wait=True, cancel_futures=True)


def _ask(
    name: str, host: Host, program: str, deadline: float, tell: Tell, running: Sessions
) -> Answer:
    tell(name, "asking", host.destination)
    sent = time.time()
    try:
        text = _output(host, program, deadline, running)
    except ProgramMissingError:
        raise
    except process.ProcessError as error:
        message, remedy = _explain(host, error, deadline)
        tell(name, "failed", message)
        return Answer(None, sent, time.time(), message, remedy)
    received = time.time()
    try:
        document = read_document(text, name)
    except BadDocument as error:
        remedy = "log in by hand: does a login script print or ask something?"
        tell(name, "failed", str(error))
        return Answer(None, sent, received, str(error), remedy)
    tell(name, "answered", f"{received - sent:.1f} s")
    return Answer(document, sent, received)


def _output(host: Host, program: str, deadline: float, running: Sessions) -> str:
    argv = host.argv(["sh", "-c", LAUNCHER])
    lines: list[str] = []
    size = 0
    with (
        process.stream(argv, timeout=deadline, input=program) as stream,
        running.holding(stream),
    ):
        for line in stream:
            lines.append(line)
            size += len(line)
            if size > MAX_BYTES:
                stream.stop()
                break
    return "\n".join(lines)


def _explain(host: Host, error: process.ProcessError, deadline: float) -> tuple[str, str]:
    """Return what went wrong and what to do."""
    if isinstance(error, FailedError) and error.completed.returncode == _SSH_FAILED:
        error = UnreachableError(error.completed, host.destination)
    if isinstance(error, UnreachableError):
        message, _, remedy = str(error).partition("\n    remedy: ")
        return message.partition(": no SSH connection: ")[2] or message, remedy
    if isinstance(error, TimedOutError):
        return (
            f"no answer within {deadline:g} s",
            "the node hangs or the way to it is cut: look at its console, or ping it",
        )
    if isinstance(error, FailedError):
        tail = " ".join(error.completed.stderr.split())[-200:] or "no message"
        if error.completed.returncode == _NO_PYTHON:
            return f"no python3 on the node ({tail})", "install python3 on the node"
        return (
            f"the probe ended with status {error.completed.returncode}: {tail}",
            "report it with this message",
        )
    return str(error).splitlines()[0], ""
