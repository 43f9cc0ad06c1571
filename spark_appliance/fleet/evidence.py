"""The run folder: every remote command with its output, status and time; no secrets.

``commands.jsonl`` has one line a command, in the order in which they ended. What went to a
command's standard input is named by length and hash only: programs and keys travel there.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from spark_appliance import lockfile
from spark_appliance.errors import OperationError
from spark_appliance.fleet.redact import redact
from spark_appliance.model.plan import Plan


@dataclass(frozen=True, slots=True)
class Record:
    """One remote command that ended; ``status`` is None when it was cut off."""

    node: str
    step: str
    argv: tuple[str, ...]
    started: float
    seconds: float
    status: int | None
    stdout: str
    stderr: str
    input: str | None = None
    error: str | None = None


class RunFolder:
    """Evidence of one command of ours."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._count = 0

    @classmethod
    def create(
        cls, runs: Path, command: str, plan: Plan, argv: Sequence[str], now: float | None = None
    ) -> RunFolder:
        """Make ``runs/<UTC>-<command>`` with the plan and the command line.

        Raises:
            OperationError: when it cannot be made.
        """
        moment = datetime.fromtimestamp(time.time() if now is None else now, UTC)
        name = f"{moment:%Y%m%dT%H%M%SZ}-{command}"
        try:
            runs.mkdir(parents=True, exist_ok=True)
            for number in range(1, 1000):
                path = runs / (name if number == 1 else f"{name}-{number}")
                try:
                    path.mkdir()
                except FileExistsError:
                    continue
                break
            else:
                raise OSError(f"too many folders named {name}")
            lockfile.write(path / "plan.json", lockfile.dump(plan))
            about = {"argv": list(argv), "started": moment.isoformat(), "command": command}
            lockfile.write(path / "run.json", _json(about))
        except OSError as error:
            raise OperationError(
                f"{runs}: cannot keep the evidence: {error.strerror or error}\n"
                "    remedy: give a folder with --runs"
            ) from None
        return cls(path)

    def add(self, record: Record) -> None:
        """Write down one command."""
        with self._lock:
            self._count += 1
            stem = f"{self._count:03d}-{record.node}-{_word(record.step)}"
            line: dict[str, Any] = {
                "node": record.node,
                "step": record.step,
                "argv": [redact(word) for word in record.argv],
                "started": datetime.fromtimestamp(record.started, UTC).isoformat(),
                "seconds": round(record.seconds, 3),
                "status": record.status,
                "error": record.error,
            }
            if record.input is not None:
                raw = record.input.encode()
                line["input"] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
            for kind, text in (("stdout", record.stdout), ("stderr", record.stderr)):
                if text:
                    name = f"{stem}.{kind}"
                    (self.path / name).write_text(redact(text), encoding="utf-8")
                    line[kind] = name
            with (self.path / "commands.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, sort_keys=True) + "\n")

    def keep(self, name: str, text: str) -> Path:
        """Write a file of the run's own, such as a rank's log."""
        path = self.path / name
        lockfile.write(path, redact(text))
        return path

    def finish(self, outcome: str, failures: dict[str, str], **more: Any) -> None:
        """Write how it ended: ``done``, ``failed`` or ``interrupted``."""
        ended = datetime.now(UTC).isoformat()
        data = {"outcome": outcome, "ended": ended, "failures": failures, **more}
        lockfile.write(self.path / "result.json", redact(_json(data)))


def _word(step: str) -> str:
    text = "".join(c if c.isascii() and c.isalnum() else "-" for c in step.lower())
    return "-".join(part for part in text.split("-") if part)[:40]


def _json(data: Any) -> str:
    return json.dumps(data, indent=1, sort_keys=True) + "\n"
