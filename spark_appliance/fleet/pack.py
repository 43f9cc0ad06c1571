"""Pack every node's Engram rows, in the plan's order, all of it in one view.

The unit resumes where it was cut off and refuses files of another layout; here it is started
and watched.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Final

from spark_appliance.fleet.crew import Crew
from spark_appliance.fleet.follow import journal_argv, parse_entry
from spark_appliance.fleet.remote import Remote, StepError
from spark_appliance.fleet.report import ask
from spark_appliance.fleet.units import show, systemctl
from spark_appliance.names import ENGINE, PACK

PACK_SECONDS: Final = 24 * 3600.0
"""A bound so that nothing hangs; 130 GB at 1 GB/s take two minutes, over a slow disk hours."""

POLL_SECONDS: Final = 5.0
_LINE: Final = re.compile(
    r"(?P<file>engram-l\d+-r\d+of\d+\.bin) \[[#.]*\] +(?P<percent>[0-9.]+) % (?P<rest>.*)"
)


def pack(
    crew: Crew,
    *,
    poll: float = POLL_SECONDS,
    wait: Callable[[float], object] | None = None,
) -> dict[str, int]:
    """Pack on every node; returns the bytes of each node's files.

    Raises:
        FleetError: naming each node that failed and the packer's own reason. Interrupting leaves
            the packers running: the same command looks at them again.
    """
    packed: dict[str, int] = {}
    for group in crew.groups(crew.plan.pack_order):
        packed |= group.each(lambda remote: _pack(crew, remote, poll, wait))
    return packed


def _pack(crew: Crew, remote: Remote, poll: float, wait: Callable[[float], object] | None) -> int:
    engram = remote.plan.engram
    if engram is None:
        crew.board.done(remote.name, "no Engram rows")
        return 0
    crew.board.work(remote.name, "packing")
    states = show(remote, [PACK, ENGINE])
    ran = PACK in states and states[PACK].active == "active"
    if ran and not _unpacked(remote, len(engram.files)):
        crew.board.done(remote.name, "packed already")
        return engram.bytes
    if ENGINE in states and states[ENGINE].active in ("active", "activating"):
        raise StepError(
            remote.name,
            "pack",
            "the engine runs, and packing would stop it",
            "stop the cluster first: spark-appliance stop",
        )
    # a oneshot that has run stays active: only a restart looks at its files again
    verb = "restart" if ran else "start"
    systemctl(remote, "pack", verb, [PACK], seconds=60, block=False)
    if crew.rehearsal is not None:
        return engram.bytes
    _watch(crew, remote, poll, wait or threading.Event().wait)
    if missing := _unpacked(remote, len(engram.files)):
        raise StepError(
            remote.name,
            "pack",
            f"the packer ended, but {missing} are not complete",
            f"read its log: spark-appliance logs {remote.name} --unit {PACK}",
        )
    crew.board.done(remote.name, f"{engram.bytes / 1e9:.1f} GB in {len(engram.files)} files")
    return engram.bytes


def _unpacked(remote: Remote, count: int) -> str:
    """Return the names of files that are not whole, empty when all are."""
    files = ask(remote).part("status", "engram") or []
    bad = [str(file.get("name")) for file in files if not file.get("good")]
    return ", ".join(bad) or ("" if len(files) == count else "its files")


def _watch(crew: Crew, remote: Remote, poll: float, wait: Callable[[float], object]) -> None:
    deadline = time.monotonic() + PACK_SECONDS
    while True:
        state = show(remote, [PACK]).get(PACK)
        if state is None or state.load == "not-found":
            raise StepError(remote.name, "pack", f"there is no {PACK}", "install the node first")
        last = _last_lines(remote)
        if state.active == "active":
            return
        if state.active == "failed" or (state.active == "inactive" and not state.queued):
            reasons = [line for line in last if "error:" in line] or last[-1:]
            reason = reasons[-1] if reasons else f"{PACK} {state.active} ({state.result})"
            raise StepError(remote.name, "pack", reason, "the same command resumes it")
        for line in reversed(last):
            if found := _LINE.search(line):
                percent = float(found["percent"])
                detail = f"{found['file']} {percent:.0f} % {found['rest']}"
                crew.board.work(remote.name, "packing", detail, percent / 100)
                break
        if time.monotonic() > deadline:
            raise StepError(remote.name, "pack", f"not done after {PACK_SECONDS:g} s")
        wait(poll)


def _last_lines(remote: Remote) -> list[str]:
    """Return what the packer said last; only when it said nothing, what systemd says of it."""
    argv = journal_argv([PACK], lines=20)
    text = remote.run("read the packer's log", argv, seconds=60, root=True, check=False).stdout
    entries = [parse_entry(line) for line in text.splitlines()]
    found = [entry for entry in entries if entry is not None]
    own = [entry for entry in found if not entry.manager] or found
    return [entry.text.split("\r")[-1] for entry in own]
