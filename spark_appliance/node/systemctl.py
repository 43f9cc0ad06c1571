"""systemd's units through ``systemctl``: what to call and how to read its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from spark_appliance.node.errors import NodeError
from spark_appliance.node.process import Completed, Runner, run_async

PROPERTIES: Final = (
    "Id,LoadState,ActiveState,SubState,Result,ExecMainStatus,StatusText,ControlGroup,"
    "InvocationID,NRestarts"
)

SHOW_SECONDS: Final = 20.0

_KILLED: Final = frozenset({("signal", "9"), ("exit-code", "137")})


@dataclass(frozen=True, slots=True)
class UnitState:
    """Properties of a unit, as systemd names them."""

    name: str
    active: str
    sub: str = ""
    result: str = ""
    status: str = ""
    text: str = ""
    cgroup: str = ""
    loaded: str = "loaded"
    restarts: str = ""
    invocation: str = ""

    @property
    def running(self) -> bool:
        """Whether its process is there."""
        return self.active in ("active", "reloading")

    @property
    def killed(self) -> bool:
        """Whether SIGKILL ended it (the guard, the kernel, a person), so that it is no follower.

        A container engine answers with an exit status of 128 + 9 (podman-run(1), docker run).
        """
        return self.result == "oom-kill" or (self.result, self.status) in _KILLED

    def describe(self) -> str:
        """Return how it ended, for messages."""
        how = f"{self.result}, status {self.status}" if self.status else self.result
        if self.active == "failed":
            return f"{self.name} failed ({how})" + (f": {self.text}" if self.text else "")
        ended = self.result not in ("", "success")  # its clean-up may still run
        return f"{self.name} is {self.active}" + (f" ({how})" if ended else "")


def show_argv(units: Sequence[str]) -> list[str]:
    """Return the command that shows units."""
    return ["systemctl", "show", f"--property={PROPERTIES}", "--", *units]


def kill_argv(unit: str) -> list[str]:
    """Return the command that kills every process of a unit."""
    return ["systemctl", "kill", "--signal=SIGKILL", "--", unit]


def parse_show(text: str) -> dict[str, UnitState]:
    """Read the answer of ``systemctl show``: one block a unit, blank lines between."""
    states = {}
    for block in text.split("\n\n"):
        values = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        name = values.get("Id", "")
        if name:
            states[name] = UnitState(
                name=name,
                active=values.get("ActiveState", "unknown"),
                sub=values.get("SubState", ""),
                result=values.get("Result", ""),
                status=values.get("ExecMainStatus", ""),
                text=values.get("StatusText", ""),
                cgroup=values.get("ControlGroup", ""),
                loaded=values.get("LoadState", ""),
                restarts=values.get("NRestarts", ""),
                invocation=values.get("InvocationID", ""),
            )
    return states


def show(runner: Runner, units: Sequence[str]) -> dict[str, UnitState]:
    """Return the state of units.

    Raises:
        NodeError: when systemctl fails.
    """
    return _states(runner(show_argv(units), seconds=SHOW_SECONDS))


class Units(Protocol):
    """What the supervisor needs of systemd."""

    async def start(self, unit: str, *, seconds: float, wait: bool = True) -> None:
        """Start a unit; raises NodeError with systemd's reason when it does not come up."""

    async def stop(self, unit: str, *, seconds: float) -> None:
        """Stop a unit and wait until it is gone; raises NodeError when it stays."""

    async def kill(self, unit: str) -> None:
        """Kill every process of a unit that runs; none is no error."""

    async def show(self, units: Sequence[str]) -> dict[str, UnitState]:
        """Return the state of units; raises NodeError when systemd does not answer."""


class Systemctl:
    """The real one."""

    async def start(self, unit: str, *, seconds: float, wait: bool = True) -> None:
        """Start a unit; a unit that failed before may start again.

        Raises:
            NodeError: with systemd's reason when it does not come up.
        """
        await run_async(["systemctl", "reset-failed", "--", unit], seconds=SHOW_SECONDS)
        options = [] if wait else ["--no-block"]
        done = await run_async(["systemctl", "start", *options, "--", unit], seconds=seconds)
        if done.status:
            said = await last_error(unit)
            raise NodeError(f"{unit} did not start: {said or done.reason} (journalctl -u {unit})")

    async def stop(self, unit: str, *, seconds: float) -> None:
        """Stop a unit.

        Raises:
            NodeError: when it stays.
        """
        done = await run_async(["systemctl", "stop", "--", unit], seconds=seconds)
        if done.status:
            raise NodeError(f"{unit} did not stop: {done.reason}")

    async def kill(self, unit: str) -> None:
        """Kill every process of a unit; systemd calls it an error when there is none."""
        await run_async(kill_argv(unit), seconds=SHOW_SECONDS)

    async def show(self, units: Sequence[str]) -> dict[str, UnitState]:
        """Return the state of units.

        Raises:
            NodeError: when systemctl fails.
        """
        return _states(await run_async(show_argv(units), seconds=SHOW_SECONDS))


async def last_error(unit: str) -> str | None:
    """Return the last error that a unit's latest run wrote to the journal, None without one."""
    try:
        shown = await run_async(
            ["systemctl", "show", "--property=InvocationID", "--value", "--", unit],
            seconds=SHOW_SECONDS,
        )
        invocation = shown.stdout.strip()
        if not invocation.isalnum():
            return None
        match = f"_SYSTEMD_INVOCATION_ID={invocation}"
        options = ["--priority=err", "--lines=1", "--output=cat", "--no-pager", "--quiet"]
        done = await run_async(["journalctl", *options, match], seconds=SHOW_SECONDS)
    except NodeError:
        return None
    return done.stdout.strip()[:1000] or None


def _states(done: Completed) -> dict[str, UnitState]:
    if done.status:
        raise NodeError(f"'{' '.join(done.argv)}' failed: {done.reason}")
    return parse_show(done.stdout)
