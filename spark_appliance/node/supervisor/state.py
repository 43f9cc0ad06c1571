"""What the supervisor is doing, for ``systemctl status``, the journal and ``spark-node status``."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from spark_appliance.node.errors import NodeError
from spark_appliance.node.files import read_json, write_json
from spark_appliance.node.journal import Journal
from spark_appliance.node.notify import Notifier
from spark_appliance.node.plan import NodeContext

STATE_FILE: Final = "/run/spark/supervisor.json"


class Phase(Enum):
    """Phases of the group (head) or of this rank (worker)."""

    WAITING = "waiting"
    STARTING = "starting"
    LOADING = "loading"
    SERVING = "serving"
    STOPPING = "stopping"
    BACKOFF = "backoff"
    GAVE_UP = "gave-up"
    STOPPED = "stopped"
    RUNNING = "running"


@dataclass(slots=True)
class State:
    """Publishes each change of phase once."""

    context: NodeContext
    journal: Journal
    notifier: Notifier
    phase: Phase | None = None
    text: str = ""
    since: float = 0.0
    last_failure: dict[str, Any] | None = None
    restarts: list[float] = field(default_factory=list)
    connected: list[str] = field(default_factory=list)

    @property
    def line(self) -> str:
        """Phase and text in one line."""
        return f"{self.phase.value}: {self.text}" if self.phase else ""

    def enter(self, phase: Phase, text: str) -> None:
        """Change phase or its text."""
        if (phase, text) == (self.phase, self.text):
            return
        self.phase, self.text, self.since = phase, text, time.time()
        line = self.line
        if phase is Phase.GAVE_UP:
            self.journal.error(line)
        else:
            self.journal.notice(line)
        self.notifier.status(line)
        self.save()

    def failed(self, text: str) -> None:
        """Record a failure."""
        self.last_failure = {"time": time.time(), "text": text}
        self.journal.error(text)
        self.save()

    def save(self) -> None:
        """Write the state file; a full /run is no reason to stop."""
        try:
            write_json(
                self.context.path(STATE_FILE),
                {
                    "node": self.context.name,
                    "phase": self.phase.value if self.phase else None,
                    "text": self.text,
                    "since": self.since,
                    "plan": self.context.sha256,
                    "last_failure": self.last_failure,
                    "restarts": self.restarts,
                    "connected": self.connected,
                },
            )
        except NodeError as error:
            self.journal.warning(str(error))


def unfinished_restarts(context: NodeContext) -> list[float]:
    """Return the restarts that a supervisor which crashed had counted in this boot."""
    data = read_json(context.path(STATE_FILE))
    if data is None or data.get("phase") in (Phase.GAVE_UP.value, Phase.STOPPED.value):
        return []
    times = data.get("restarts")
    return [float(time) for time in times if isinstance(time, int | float)] if times else []
