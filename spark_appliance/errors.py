"""Typed errors and the exit status each one ends the program with.

Library code raises these; only ``spark_appliance.cli`` turns them into lines on stderr.
Exit status: 0 fine, 1 a failed operation, 2 a bad file or bad command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a text file; ``line`` and ``column`` count from 1."""

    file: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        parts = [self.file]
        if self.line is not None:
            parts.append(str(self.line))
            if self.column is not None:
                parts.append(str(self.column))
        return ":".join(parts)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: what, where, and what to do about it.

    ``rule`` is a stable identifier such as ``topology.cage-used-twice``: tests and scripts
    match on it, never on the wording.
    """

    rule: str
    message: str
    remedy: str = ""
    where: Location | None = None
    severity: str = "error"

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        tail = f"\n    remedy: {self.remedy}" if self.remedy else ""
        return f"{place}{self.severity}: {self.message} [{self.rule}]{tail}"


class SparkError(Exception):
    """Base of every error that a user may see; the text is shown as it is."""

    exit_status = 1


class OperationError(SparkError):
    """Something that was tried failed (a node, a command, a write): exit status 1."""


class InputError(SparkError):
    """A file or an argument is wrong: exit status 2. Carries every problem found."""

    exit_status = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    @classmethod
    def one(
        cls, rule: str, message: str, remedy: str = "", where: Location | None = None
    ) -> InputError:
        """Build the error for a single problem."""
        return cls([Problem(rule, message, remedy, where)])


def read_failure(path: Path, error: OSError) -> InputError:
    """Describe a file that could not be read, in one line."""
    reason = error.strerror or str(error)
    return InputError.one(
        "file.unreadable",
        f"cannot read {path}: {reason}",
        "give the path of an existing, readable file",
        Location(str(path)),
    )
