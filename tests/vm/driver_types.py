"""What a test script may use, for type checks: the part of the NixOS test driver's interface that
the scripts need and that a harness for other guests has to offer as well.

A test puts this in front of each script, followed by one line for each machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Machine:
    """A guest. Commands run as root in a shell; time-outs are seconds."""

    name: str

    def start(self) -> None: ...

    def crash(self) -> None: ...

    def wait_for_unit(self, unit: str) -> None: ...

    def succeed(self, *commands: str, timeout: int | None = None) -> str: ...  # type: ignore[empty-body]

    def fail(self, *commands: str, timeout: int | None = None) -> str: ...  # type: ignore[empty-body]

    def execute(self, command: str) -> tuple[int, str]: ...  # type: ignore[empty-body]

    def wait_until_succeeds(self, command: str, timeout: int = 900) -> str: ...  # type: ignore[empty-body]

    def wait_until_fails(self, command: str, timeout: int = 900) -> str: ...  # type: ignore[empty-body]

    def send_monitor_command(self, command: str) -> str: ...  # type: ignore[empty-body]


machines: list[Machine] = []


def start_all() -> None: ...


@contextmanager
def subtest(name: str) -> Iterator[None]:  # noqa: ARG001 - only a type
    yield


# What differs between the guests' systems: nixos_helpers.py, and harness/scripts.py for Debian.


def engine_process(machine: Machine) -> str: ...  # type: ignore[empty-body]


def cut(machine: Machine, netdev: str) -> None: ...


def join(machine: Machine, netdev: str) -> None: ...
