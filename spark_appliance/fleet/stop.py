"""Stop all ranks in order: requests first, then the head, then the workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from spark_appliance.errors import OperationError
from spark_appliance.fleet import drain
from spark_appliance.fleet.crew import Crew, FleetError
from spark_appliance.fleet.remote import NodeGoneError, Remote, StepError
from spark_appliance.names import HEAD_STOP_TIMEOUT, TARGET, WORKER_STOP_TIMEOUT

STOP_SECONDS: Final = float(2 * (HEAD_STOP_TIMEOUT + WORKER_STOP_TIMEOUT) + 60)
"""The supervisor's own bound (both timeouts and 30 s), once more, and room to connect."""

DRAIN_LIMIT: Final = 120.0


_STOP: Final = (
    # a node without the target (nothing installed yet) has nothing to stop
    'systemctl cat -- "$1" >/dev/null 2>&1 || exit 0; exec systemctl stop -- "$1"'
)


@dataclass(frozen=True, slots=True)
class StopResult:
    """How a stop went; ``left`` requests were cut off (None: not known)."""

    left: int | None
    closed: bool


def stop(
    crew: Crew,
    *,
    drain_limit: float = DRAIN_LIMIT,
    wait: Callable[[float], object] | None = None,
) -> StopResult:
    """Stop the engine on every node of the crew. The export and the mounts stay up.

    The head goes first: a worker ignores SIGTERM until rank 0 says goodbye. A node that is gone
    is named, and the others are stopped nevertheless.

    Raises:
        FleetError: naming every node that could not be stopped.
    """
    failures: dict[str, OperationError] = {}
    result = StopResult(None, closed=False)
    head = crew.head
    if head is not None:
        try:
            result = _stop_head(crew, head, drain_limit, wait)
        except StepError as error:
            failures[head.name] = error
            crew.board.fail(head.name, error.reason)
    workers = crew.only(remote.name for remote in crew if remote.plan.rank != 0)
    failures |= workers.gather(lambda remote: _stop(crew, remote))[1]
    if failures:
        raise FleetError(failures)
    return result


def _stop_head(
    crew: Crew, head: Remote, limit: float, wait: Callable[[float], object] | None
) -> StopResult:
    if limit <= 0:
        _stop(crew, head)
        return StopResult(None, closed=False)
    try:
        done = drain.drain(head, crew.board, port=crew.plan.api.port, limit=limit, wait=wait)
        _stop(crew, head)
    except NodeGoneError:
        raise
    except BaseException:
        # an engine that still runs must not stay behind a closed door
        drain.reopen(head)
        raise
    drain.reopen(head)
    return StopResult(done.left, done.closed)


def _stop(crew: Crew, remote: Remote) -> None:
    crew.board.work(remote.name, "stopping")
    argv = ["sh", "-c", _STOP, "sh", TARGET]
    remote.run("stop", argv, seconds=STOP_SECONDS, root=True)
    crew.board.done(remote.name, "stopped")
