"""Run every check of the repository and say at the end, by name, what could not run.

    python tests/run.py [PYTEST ARGUMENT ...]

Formatting, lints, types, then the test suites: the command line's own and one for each
distribution below ``pkgs/``, each in a pytest of its own because they are separate packages. Exit
status 0 only when everything that ran passed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Step:
    """A check: what it is called, its command, where it runs."""

    name: str
    argv: tuple[str, ...]
    folder: Path = ROOT


def steps(arguments: list[str]) -> list[Step]:
    """Return the checks in order; quick ones come first."""
    python = sys.executable
    pytest = (python, "-m", "pytest", "-q", *arguments)
    result = [
        Step("ruff format", (python, "-m", "ruff", "format", "--check", ".")),
        Step("ruff check", (python, "-m", "ruff", "check", ".")),
        Step("mypy --strict", (python, "-m", "mypy")),
        Step("tests", pytest),
    ]
    for package in sorted((ROOT / "pkgs").glob("*/tests")):
        result.append(Step(f"tests of {package.parent.name}", pytest, package.parent))
    return result


def main() -> int:
    """Run all checks; return the exit status."""
    environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1")
    failed: list[str] = []
    skipped: list[str] = []
    for step in steps(sys.argv[1:]):
        print(f"\n=== {step.name}", flush=True)
        begin = time.monotonic()
        status, output = _stream(step, environment)
        seconds = time.monotonic() - begin
        print(f"=== {step.name}: exit {status}, {seconds:.0f} s", flush=True)
        # 5: pytest selected nothing, which is fine when arguments narrow the choice
        if status and not (status == 5 and sys.argv[1:]):
            failed.append(step.name)
        skipped += [f"{step.name}: {line}" for line in re.findall(r"^SKIPPED (.*)$", output, re.M)]
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
