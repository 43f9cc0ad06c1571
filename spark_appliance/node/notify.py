"""Tell systemd about this service: sd_notify(3) without libsystemd."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping


class Notifier:
    """Sends states to ``$NOTIFY_SOCKET``; does nothing outside of systemd."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            timeout = int(environment.get("WATCHDOG_USEC", "0"))
        except ValueError:
            timeout = 0
        self.watchdog_seconds = timeout / 2e6
        """How often to call ``alive``: half of the timeout; 0 when nobody watches."""

    def ready(self, status: str) -> None:
        """Say that the service is up."""
        self._send(f"READY=1\nSTATUS={status}", wait=True)

    def status(self, text: str) -> None:
        """Say what the service is doing, for ``systemctl status``."""
        self._send(f"STATUS={text}")

    def alive(self) -> None:
        """Feed the watchdog."""
        self._send("WATCHDOG=1")

    def stopping(self, status: str) -> None:
        """Say that the service goes down."""
        self._send(f"STOPPING=1\nSTATUS={status}")

    def _send(self, text: str, *, wait: bool = False) -> None:
        """Send; only ``wait`` lets a systemd that does not read keep this program from working."""
        if self._socket is None:
            return
        flags = 0 if wait else socket.MSG_DONTWAIT
        # neither its queue being full nor its restart in between is a reason to stop
        with contextlib.suppress(OSError):
            self._socket.sendto(text.encode(), flags, self._address)
