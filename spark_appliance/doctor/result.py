"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail", "skip"]
"""``fail`` stops a boot; ``skip`` means that it could not be judged, and says why."""

Level = Literal["config", "probe", "deep"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found about one thing.

    ``seen`` is what was found; ``means`` and ``do`` take the place of the check's own words.
    ``subject`` names the thing (a netdev, a file) where a check judges several.
    """

    status: Status
    seen: str
    subject: str | None = None
    means: str | None = None
    do: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A verdict with the check and the node it belongs to; ``node`` is None for the cluster."""

    check: str
    level: Level
    status: Status
    node: str | None
    subject: str | None
    seen: str
    means: str
    do: str


def ok(seen: str, subject: str | None = None) -> Verdict:
    """Say that something is as it should be."""
    return Verdict("ok", seen, subject)


def warn(
    seen: str, subject: str | None = None, *, means: str | None = None, do: str | None = None
) -> Verdict:
    """Say that something is not as it should be, but does not stop a boot."""
    return Verdict("warn", seen, subject, means, do)


def fail(
    seen: str, subject: str | None = None, *, means: str | None = None, do: str | None = None
) -> Verdict:
    """Say that something stops a boot."""
    return Verdict("fail", seen, subject, means, do)


def skip(seen: str, subject: str | None = None) -> Verdict:
    """Say that something could not be judged, and why."""
    return Verdict("skip", seen, subject)
