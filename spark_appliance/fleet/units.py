"""systemd on a node, over SSH: start, stop, look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from spark_appliance.fleet.remote import Remote
from spark_appliance.model.plan import NodePlan
from spark_appliance.names import TARGET

SHOW_SECONDS: Final = 30.0
RESET_SECONDS: Final = 60.0
_PROPERTIES: Final = "Id,LoadState,ActiveState,SubState,Result,StatusText,Job"


@dataclass(frozen=True, slots=True)
class UnitState:
    """A unit as systemd sees it."""

    name: str
    load: str
    active: str
    sub: str
    result: str
    text: str
    queued: bool = False
    """Whether a job waits for its turn: until then a started unit is still inactive."""

    @property
    def failed(self) -> bool:
        """Whether it ended badly."""
        return self.active == "failed"


def show(remote: Remote, names: Sequence[str]) -> dict[str, UnitState]:
    """Return the state of units by name; raises StepError."""
    argv = ["systemctl", "show", f"--property={_PROPERTIES}", "--", *names]
    return parse_show(remote.run("look at the units", argv, seconds=SHOW_SECONDS).stdout)


def parse_show(text: str) -> dict[str, UnitState]:
    """Read ``systemctl show``: one block a unit."""
    states = {}
    for block in text.split("\n\n"):
        values = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if values.get("Id"):
            states[values["Id"]] = UnitState(
                values["Id"],
                values.get("LoadState", ""),
                values.get("ActiveState", "unknown"),
                values.get("SubState", ""),
                values.get("Result", ""),
                values.get("StatusText", ""),
                values.get("Job", "0") not in ("", "0"),
            )
    return states


def systemctl(
    remote: Remote,
    step: str,
    verb: str,
    names: Sequence[str],
    *,
    seconds: float,
    block: bool = True,
) -> None:
    """Run ``systemctl VERB`` as root; raises StepError with systemd's reason."""
    options = [] if block else ["--no-block"]
    argv = ["systemctl", verb, *options, "--", *names]
    remote.run(step, argv, seconds=seconds, root=True)


def started_by_target(node: NodePlan) -> list[str]:
    """Return what ``serve`` starts: the target and what it wants.

    Starting an active target starts nothing again, so a unit of it that failed before is named.
    """
    return [*(unit.name for unit in node.units if unit.started_by == "target"), TARGET]


def forget_failures(remote: Remote, names: Sequence[str]) -> None:
    """Let units that failed before count as stopped; what is not loaded is left out."""
    reset = ["sh", "-c", 'systemctl reset-failed -- "$@" 2>/dev/null || true', "sh", *names]
    remote.run("forget old failures", reset, seconds=RESET_SECONDS, root=True)
