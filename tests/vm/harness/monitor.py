"""QEMU's machine protocol: one command after the other."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any


class MonitorError(Exception):
    """QEMU refused a command."""


class Monitor:
    """A connection to a running QEMU."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._file = self._socket.makefile("rwb", buffering=0)
        self._file.readline()
        self.command("qmp_capabilities")

    def command(self, name: str, /, **arguments: Any) -> Any:
        """Run a command and return its answer.

        Raises:
            MonitorError: when QEMU refuses it or is gone.
        """
        text = json.dumps({"execute": name, "arguments": arguments})
        self._file.write(text.encode() + b"\n")
        while line := self._file.readline():
            answer = json.loads(line)
            if "error" in answer:
                raise MonitorError(f"{name}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]
        raise MonitorError(f"{name}: QEMU is gone")

    def close(self) -> None:
        """Hang up."""
        self._file.close()
        self._socket.close()
