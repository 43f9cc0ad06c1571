"""Ethernet without privileges: socket pairs between QEMU processes, which any of them may leave.

Two members of a network share one pair and nothing runs between them; more are joined by a thread
that hands every frame to all others.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading

_FRAME = 65536
_BUFFER = 4 << 20


class Cable:
    """A network segment; ``ends`` are the sockets that the members get, in order."""

    def __init__(self, members: int) -> None:
        self.ends: list[socket.socket] = []
        self._own: list[socket.socket] = []
        for _ in range(1 if members == 2 else members):
            near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            for end in (near, far):
                end.setblocking(False)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            self.ends.append(near)
            (self.ends if members == 2 else self._own).append(far)
        if self._own:
            threading.Thread(target=self._repeat, daemon=True).start()

    def close(self) -> None:
        """Give the sockets back."""
        for end in (*self.ends, *self._own):
            end.close()

    def _repeat(self) -> None:
        while True:
            try:
                readable = select.select(self._own, [], [])[0]
            except (OSError, ValueError):  # closed
                return
            for source in readable:
                try:
                    frame = source.recv(_FRAME)
                except BlockingIOError:
                    continue
                except OSError:
                    return
                for target in self._own:
                    if target is not source:
                        # a member that is down or slow: Ethernet drops
                        with contextlib.suppress(OSError):
                            target.send(frame)
