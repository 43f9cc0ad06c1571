"""Log lines for the journal: the priority as a ``<N>`` prefix (sd-daemon(3)), one line each."""

from __future__ import annotations

import sys
from typing import IO

ERROR, WARNING, NOTICE, INFO = 3, 4, 5, 6


class Journal:
    """Writes lines to a stream, stderr unless given.

    The prefix is only written when nobody reads it as text: systemd takes it off, a person at a
    terminal sees none.
    """

    def __init__(self, stream: IO[str] | None = None, *, prefix: bool | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._prefix = not self._stream.isatty() if prefix is None else prefix

    def write(self, priority: int, message: str) -> None:
        """Write one line; line breaks in the message become spaces."""
        text = " ".join(message.splitlines())
        try:
            self._stream.write(f"<{priority}>{text}\n" if self._prefix else f"{text}\n")
            self._stream.flush()
        except OSError:
            # journald is gone: keep working, there is nobody to tell
            return

    def error(self, message: str) -> None:
        """Write what makes a unit fail."""
        self.write(ERROR, message)

    def warning(self, message: str) -> None:
        """Write what works but is not right."""
        self.write(WARNING, message)

    def notice(self, message: str) -> None:
        """Write a change of state."""
        self.write(NOTICE, message)

    def info(self, message: str) -> None:
        """Write progress."""
        self.write(INFO, message)


def gib(size: int) -> str:
    """Return bytes as GiB with two decimals."""
    return f"{size / 2**30:.2f} GiB"
