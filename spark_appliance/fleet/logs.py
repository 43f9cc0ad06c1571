"""The ranks' journals, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from spark_appliance.fleet.crew import Crew
from spark_appliance.fleet.follow import journal_argv, own_units
from spark_appliance.fleet.redact import redact
from spark_appliance.fleet.remote import Remote

SECONDS: Final = 120.0
FOLLOW_SECONDS: Final = 7 * 24 * 3600.0

Show = Callable[[str, str], None]
"""Called with node and line, from several threads while following."""


def logs(crew: Crew, show: Show, *, lines: int, follow: bool, units: Sequence[str] = ()) -> None:
    """Show the last lines of every node's units; with ``follow`` until it is interrupted.

    Raises:
        FleetError: naming each node that cannot be read.
    """

    def read(remote: Remote) -> list[str]:
        argv = journal_argv(
            units or own_units(remote.plan), lines=lines, follow=follow, output="short-iso"
        )
        if follow:
            with remote.lines("read the log", argv, seconds=FOLLOW_SECONDS, root=True) as found:
                for line in found:
                    show(remote.name, line)
            return []
        text = remote.run("read the log", argv, seconds=SECONDS, root=True).stdout
        return redact(text).splitlines()

    for name, text in crew.each(read).items():
        for line in text:
            show(name, line)
