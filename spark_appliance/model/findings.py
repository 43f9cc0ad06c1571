"""What a rule has to say about a path in the cluster file, before the path has a line number."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Path = tuple[str | int, ...]
Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing a rule found.

    ``rule`` is a stable identifier (``topology.cage-used-twice``), ``path`` the place in the
    cluster file as keys and indices, ``message`` what is wrong and ``remedy`` what to do.
    """

    rule: str
    path: Path
    message: str
    remedy: str
    severity: Severity = "error"


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Return only the findings that stop a plan."""
    return [finding for finding in findings if finding.severity == "error"]
