"""Ask the nodes for ``spark-node report`` and read the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from spark_appliance.fleet.remote import Remote, StepError
from spark_appliance.names import SUPERVISOR

REPORT_SECONDS: Final = 45.0
"""More than nvidia-smi, systemctl and the engine's routes together may take on the node."""


@dataclass(frozen=True, slots=True)
class Report:
    """A node's answer; every reader copes with parts that are missing."""

    data: dict[str, Any]

    def part(self, *names: str) -> Any:
        """Return a part by its path, None when it is not there."""
        value: Any = self.data
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def unit(self, name: str) -> str:
        """Return the ActiveState of a unit, 'unknown' when it is not known."""
        return str(self.part("status", "units", name, "active") or "unknown")

    @property
    def failed_units(self) -> list[str]:
        """Units of the plan that failed."""
        units = self.part("status", "units") or {}
        return [name for name, state in units.items() if state.get("active") == "failed"]

    @property
    def plan(self) -> str | None:
        """Hash of the plan on the node: its own (``lockfile.own_sha256``)."""
        value = self.part("status", "plan", "sha256")
        return str(value) if value else None

    @property
    def running_plan(self) -> str | None:
        """Hash of the plan with which the supervisor runs, None when it does not run.

        The file on the node may be newer: whoever installs it does not restart what runs.
        """
        value = self.part("status", "supervisor", "plan")
        return str(value) if value and self.unit(SUPERVISOR) == "active" else None

    @property
    def ready(self) -> bool:
        """Whether the head's endpoint gave a right answer and is watched."""
        return bool(self.part("status", "ready")) and self.unit("spark-ready.service") == "active"

    @property
    def phase(self) -> str:
        """The supervisor's phase, empty without one."""
        return str(self.part("status", "supervisor", "phase") or "")

    def metric(self, name: str) -> float | None:
        """Return one of the engine's gauges."""
        value = self.part("engine", "metrics", name)
        return float(value) if isinstance(value, int | float) else None

    @property
    def requests(self) -> int | None:
        """Requests that run or wait, None when the engine does not say."""
        running, waiting = self.metric("running"), self.metric("waiting")
        return None if running is None else round(running + (waiting or 0))


def report_argv(remote: Remote, *, gpu: bool = False) -> list[str]:
    """Return the command on the node."""
    return ["spark-node", "--node", remote.name, "report", *(["--gpu"] if gpu else [])]


def ask(remote: Remote, *, gpu: bool = False) -> Report:
    """Return a node's report.

    Raises:
        StepError: when the node cannot be asked.
    """
    argv = report_argv(remote, gpu=gpu)
    data = remote.json("read the state", argv, seconds=REPORT_SECONDS, root=True, rehearsed={})
    if not isinstance(data, dict):
        raise StepError(remote.name, "read the state", "the answer is no JSON object")
    return Report(data)
