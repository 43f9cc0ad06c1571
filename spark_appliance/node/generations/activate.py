"""What has to run after files changed, and the timer that takes a change back."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from spark_appliance.names import TARGET
from spark_appliance.node.errors import NodeError
from spark_appliance.node.generations.bundle import Action
from spark_appliance.node.process import Runner

RETURN_UNIT: Final = "spark-return"
"""Transient timer and service that return to the confirmed generation."""

PROGRAM: Final = "/var/lib/spark/generations/program.pyz"
"""The copy of this program that applied the last generation: it is known to run here."""

_STOP_SECONDS: Final = 240.0
"""More than the longest stop of a unit (engine 60, worker 30, supervisor 120 s)."""


def command(*words: str) -> list[str]:
    """Return the command line of the generation program on a node."""
    return ["/usr/bin/env", f"PYTHONPATH={PROGRAM}", "/usr/bin/python3", "-m", _MODULE, *words]


_MODULE: Final = "spark_appliance.node.generations"


def due(actions: Iterable[Action], changed: Sequence[str]) -> list[Action]:
    """Return the actions whose paths changed, each once, in order."""
    result: list[Action] = []
    for action in actions:
        if action in result:
            continue
        if any(path.startswith(prefix) for prefix in action.paths for path in changed):
            result.append(action)
    return result


def run_all(runner: Runner, actions: Sequence[Action]) -> list[str]:
    """Run actions to the end, whatever fails; returns the failures, one line each."""
    failures = []
    for action in actions:
        if action.needs is not None and not _there(action.needs):
            continue
        try:
            done = runner(action.argv, seconds=action.seconds)
        except NodeError as error:
            failures.append(str(error))
            continue
        if done.status:
            failures.append(f"'{' '.join(action.argv)}' failed: {done.reason}")
    return failures


def arm(runner: Runner, seconds: int) -> None:
    """Start the timer that returns to the confirmed generation; an older one is replaced.

    Raises:
        NodeError: when it cannot be armed: then nothing may be changed.
    """
    disarm(runner)
    argv = ["systemd-run", f"--unit={RETURN_UNIT}", f"--on-active={seconds}s"]
    argv += ["--timer-property=AccuracySec=1s", "--collect", "--", *command("return")]
    done = runner(argv, seconds=30)
    if done.status:
        raise NodeError(f"cannot arm the timer that returns: {done.reason}; nothing was changed")


def disarm(runner: Runner) -> None:
    """Stop the timer; none is no error."""
    runner(["systemctl", "stop", f"{RETURN_UNIT}.timer"], seconds=30)
    runner(["systemctl", "reset-failed", f"{RETURN_UNIT}.service"], seconds=30)


def stop_serving(runner: Runner) -> None:
    """Stop the engine and everything around it; the return happens even if that fails."""
    runner(["systemctl", "stop", TARGET], seconds=_STOP_SECONDS)


def start_serving(runner: Runner) -> None:
    """Start what boots: the supervisors find each other on their own."""
    runner(["systemctl", "start", "--no-block", TARGET], seconds=30)


def _there(name: str) -> bool:
    return Path(name).exists() if name.startswith("/") else shutil.which(name) is not None
