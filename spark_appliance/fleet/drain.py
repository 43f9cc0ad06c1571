"""Let running requests finish before the engine stops, and let no new ones in.

sglang 0.5.23 has no switch for that: after SIGTERM it waits for the requests that it has, but
takes new ones as well (srt/managers/tokenizer_manager.py:3508), and its stop has a deadline. So a
packet filter table of its own on the head refuses new connections to the API's port, and new
requests on connections that are open: clients and routers keep theirs for the next request. What
the engine sends passes, so that running requests finish. Connections from the head itself are
refused as well, for the router there reaches the engine by one; only root's pass, which are the
ready probe and ``spark-node report``. A reboot forgets the table; ``serve`` removes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from spark_appliance.fleet.board import Board
from spark_appliance.fleet.remote import NodeGoneError, Remote, StepError
from spark_appliance.fleet.report import ask

TABLE: Final = "spark_drain"
SECONDS: Final = 30.0
POLL_SECONDS: Final = 2.0
QUIET_ANSWERS: Final = 2
"""Answers without requests in a row: one may fall between two requests of a connection."""

_REMOVE: Final = (
    'command -v nft >/dev/null || exit 0; nft list table inet "$1" >/dev/null 2>&1 || exit 0; '
    'nft delete table inet "$1"'
)


@dataclass(frozen=True, slots=True)
class Drained:
    """How a drain ended: ``left`` requests were still there, None when nobody could say."""

    left: int | None
    closed: bool


def rules(port: int) -> str:
    """Return the table that lets nothing new reach the API's port.

    A client says something new in a segment with PSH: its stack sets it at the end of what the
    client writes (RFC 9293 3.9.1), and acknowledgements of a running response have none. ``ct
    state`` would not do: a connection that was not tracked before is new to it when it is not.
    The senders of packets on ``lo`` are known in the output hook only.
    """
    refused = (
        f"tcp dport {port} tcp flags & (syn | ack) == syn reject with tcp reset",
        f"tcp dport {port} tcp flags & psh == psh reject with tcp reset",
    )
    outside = "".join(f'    iifname != "lo" {rule}\n' for rule in refused)
    inside = "".join(f'    oifname "lo" meta skuid != 0 {rule}\n' for rule in refused)
    return (
        f"table inet {TABLE}\n"
        f"delete table inet {TABLE}\n"
        f"table inet {TABLE} {{\n"
        "  chain input {\n"
        "    type filter hook input priority filter - 10; policy accept;\n"
        f"{outside}"
        "  }\n"
        "  chain output {\n"
        "    type filter hook output priority filter - 10; policy accept;\n"
        f"{inside}"
        "  }\n"
        "}\n"
    )


def close(head: Remote, port: int) -> bool:
    """Refuse new connections and requests; returns False where the head has no nft."""
    answer = head.run(
        "refuse new connections",
        ["nft", "-f", "-"],
        seconds=SECONDS,
        root=True,
        check=False,
        text=rules(port),
    )
    return answer.status == 0


def reopen(head: Remote) -> None:
    """Accept connections again; harmless when they were never refused."""
    head.run(
        "accept connections",
        ["sh", "-c", _REMOVE, "sh", TABLE],
        seconds=SECONDS,
        root=True,
    )


def wait_idle(
    head: Remote,
    board: Board,
    *,
    limit: float,
    wait: Callable[[float], object] | None = None,
) -> int | None:
    """Wait until no request runs or waits; returns how many were left after ``limit`` seconds.

    None when the engine does not say (it is down, or publishes no gauges): nothing to wait for.
    """
    pause = wait or threading.Event().wait
    quiet = 0
    passed = 0.0
    left: int | None = None
    while True:
        try:
            left = ask(head).requests
        except StepError as error:
            if isinstance(error, NodeGoneError):
                raise
            left = None
        if left is None:
            return None
        quiet = quiet + 1 if left == 0 else 0
        if quiet >= QUIET_ANSWERS:
            return 0
        board.work(head.name, "finishing requests", f"{left} left")
        if passed >= limit:
            return left
        pause(POLL_SECONDS)
        passed += POLL_SECONDS


def drain(
    head: Remote,
    board: Board,
    *,
    port: int,
    limit: float,
    wait: Callable[[float], object] | None = None,
) -> Drained:
    """Close the door and wait; the door stays closed until ``reopen``.

    Raises:
        StepError: when the head cannot be reached.
    """
    closed = close(head, port)
    left = 0 if head.rehearsal is not None else wait_idle(head, board, limit=limit, wait=wait)
    return Drained(left, closed)
