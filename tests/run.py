"""Run every check of the repository and say at the end, by name, what could not run.

    python tests/run.py [PYTEST ARGUMENT ...]

Formatting, lints, types, then the test suites: the command line's own and one for each
distribution below ``pkgs/``, each in a pytest of its own because they are separate packages that
want the engine's environment. Exit status 0 only when everything that ran passed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import environments

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Step:
    """A check: what it is called, its command, where it runs."""

    name: str
    argv: tuple[str, ...]
    folder: Path = ROOT


def steps(arguments: list[str]) -> list[Step]:
    """Return the checks of the repository itself in order; quick ones come first."""
    python = sys.executable
    return [
        Step("ruff format", (python, "-m", "ruff", "format", "--check", ".")),
        Step("ruff check", (python, "-m", "ruff", "check", ".")),
        Step("mypy --strict", (python, "-m", "mypy")),
        Step("tests", (python, "-m", "pytest", "-q", *arguments)),
    ]


def package_steps(arguments: list[str], notes: list[str]) -> list[Step]:
    """Return the checks of the distributions below ``pkgs/``; what cannot run goes to ``notes``."""
    try:
        python = environments.engine_environment(dict(os.environ))
    except environments.EnvironmentFailedError as error:
        notes.append(f"tests of pkgs/ with the engine: {error}")
        try:
            python = environments.plain_environment()
        except environments.EnvironmentFailedError as plain:
            notes.append(f"tests of pkgs/: {plain}")
            return []
    result = []
    for folder in environments.distributions():
        mypy = (sys.executable, "-m", "mypy", "--python-executable", str(python))
        result.append(Step(f"mypy --strict of {folder.name}", mypy, folder))
        pytest = (str(python), "-m", "pytest", "-q", *arguments)
        result.append(Step(f"tests of {folder.name}", pytest, folder))
    return result


def main() -> int:
    """Run all checks; return the exit status."""
    # a background job ignores SIGINT, and so would every test that interrupts a program
    signal.signal(signal.SIGINT, signal.default_int_handler)
    environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1")
    failed: list[str] = []
    skipped: list[str] = []
    arguments = sys.argv[1:]
    todo = steps(arguments)
    # arguments that name files of tests/ are not for the distributions
    if not any(Path(argument.split("::")[0]).exists() for argument in arguments):
        todo += package_steps(arguments, skipped)
    for step in todo:
        print(f"\n=== {step.name}", flush=True)
        begin = time.monotonic()
        status, output = _stream(step, environment)
        seconds = time.monotonic() - begin
        print(f"=== {step.name}: exit {status}, {seconds:.0f} s", flush=True)
        # 5: pytest selected nothing, which is fine when arguments narrow the choice
        if status and not (status == 5 and sys.argv[1:]):
            failed.append(step.name)
        skipped += [f"{step.name}: {line}" for line in re.findall(r"^SKIPPED (.*)$", output, re.M)]
    required = os.environ.get("SPARK_ENGINE_REQUIRED") == "1"
    if required and any(line.startswith("tests of pkgs/") for line in skipped):
        failed.append("tests of pkgs/ (SPARK_ENGINE_REQUIRED=1)")
    if skipped:
        print(f"\n=== NOT RUN ({len(skipped)} groups of tests), by name and reason:")
        for line in skipped:
            print(f"  {line}")
    print(f"\n=== {'FAILED: ' + ', '.join(failed) if failed else 'all that ran has passed'}")
    return 1 if failed else 0


def _stream(step: Step, environment: dict[str, str]) -> tuple[int, str]:
    """Run a step, passing its output on as it comes; return its status and its output."""
    lines = []
    with subprocess.Popen(
        step.argv,
        cwd=step.folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return process.returncode, "".join(lines)


if __name__ == "__main__":
    sys.exit(main())
