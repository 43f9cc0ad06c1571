"""Programs on the control machine (nix), written down like remote ones."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from spark_appliance import process
from spark_appliance.fleet.crew import Crew
from spark_appliance.fleet.evidence import Record, RunFolder
from spark_appliance.fleet.remote import StepError
from spark_appliance.process import FailedError, ProcessError

HERE = "control"


def run_local(
    crew: Crew,
    evidence: RunFolder | None,
    step: str,
    argv: Sequence[str],
    *,
    seconds: float,
    rehearsed: str = "",
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a program here and return its output; ``env`` is added to the environment.

    Raises:
        StepError: when it fails or does not end in time.
    """
    shown = ["env", *(f"{name}={value}" for name, value in env.items()), *argv] if env else argv
    if crew.rehearsal is not None:
        crew.rehearsal.add(HERE, step, shown, None)
        return rehearsed
    started, clock = time.time(), time.monotonic()
    error: ProcessError | None = None
    status: int | None = None
    stdout = stderr = ""
    try:
        done = process.run(argv, timeout=seconds, env=env)
        status, stdout, stderr = done.returncode, done.stdout, done.stderr
    except FailedError as failed:
        error = failed
        status = failed.completed.returncode
        stdout, stderr = failed.completed.stdout, failed.completed.stderr
    except ProcessError as failed:
        error = failed
    if evidence is not None:
        seconds_taken = time.monotonic() - clock
        evidence.add(
            Record(HERE, step, tuple(shown), started, seconds_taken, status, stdout, stderr)
        )
    if error is not None:
        lines = [line for line in stderr.splitlines() if line.strip()] or [str(error)]
        raise StepError(HERE, step, lines[-1]) from None
    return stdout
