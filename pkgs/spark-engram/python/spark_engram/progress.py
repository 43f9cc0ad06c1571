"""What packing tells its caller while it runs: as JSON lines, as a bar, or not at all."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Protocol, TextIO

#: A progress record at most this often, in seconds.
INTERVAL_S = 1.0
#: Without a terminal, a text line this often.
PLAIN_INTERVAL_S = 10.0


class Reporter(Protocol):
    """Receives events; FORMAT and fields are listed in README.md under "Progress"."""

    def emit(self, event: str, **fields: object) -> None:
        """Take one event."""


class SilentReporter:
    """Ignores all events."""

    def emit(self, event: str, **fields: object) -> None:
        """Do nothing."""


class JsonReporter:
    """One JSON object a line, flushed at once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def emit(self, event: str, **fields: object) -> None:
        """Write the event as one line."""
        self._stream.write(json.dumps({"event": event, **fields}) + "\n")
        self._stream.flush()


class TextReporter:
    """A bar on a terminal; a line every ten seconds elsewhere (a journal, a log)."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._tty = stream.isatty()
        self._last = -PLAIN_INTERVAL_S
        self._open_line = False

    def emit(self, event: str, **fields: object) -> None:
        """Write the event for a person."""
        if event == "progress":
            self._progress(fields)
            return
        text = _TEXTS[event](fields) if event in _TEXTS else ""
        if text:
            self._stream.write(("\n" if self._open_line else "") + text + "\n")
            self._open_line = False
            self._stream.flush()

    def _progress(self, fields: dict[str, object]) -> None:
        now = self._clock()
        if not self._tty and now - self._last < PLAIN_INTERVAL_S:
            return
        self._last = now
        text = progress_text(fields)
        if self._tty:
            self._stream.write("\r\033[K" + text)
            self._open_line = True
        else:
            self._stream.write(text + "\n")
        self._stream.flush()


def progress_text(fields: dict[str, object]) -> str:
    """One line: a bar, percent, bytes, rate and time left."""
    done, total = _number(fields, "done_bytes"), _number(fields, "bytes")
    share = done / total if total else 1.0
    bar = ("#" * int(30 * share)).ljust(30, ".")
    eta = fields.get("eta_seconds")
    left = f"{int(_number(fields, 'eta_seconds'))} s left" if eta is not None else "..."
    rate = _number(fields, "bytes_per_second")
    return (
        f"{fields.get('file')} [{bar}] {100 * share:5.1f} % "
        f"{size_text(done)} of {size_text(total)}, {size_text(rate)}/s, {left}"
    )


def size_text(size: float) -> str:
    """Bytes for a person: ``23.6 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _number(fields: dict[str, object], key: str) -> float:
    value = fields.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


_TEXTS: dict[str, Callable[[dict[str, object]], str]] = {
    "plan": lambda f: (
        f"needs {size_text(_number(f, 'needed_bytes'))}, "
        f"{size_text(_number(f, 'free_bytes'))} are free"
    ),
    "file": lambda f: f"{f['file']}: {f['state']}",
    "warning": lambda f: f"warning: {f['message']}",
    "stalled": lambda f: (
        f"still waiting for {f['what']} after {_number(f, 'seconds'):.0f} s "
        "(is the NFS server up?); stop and run again at any time, nothing is lost"
    ),
    "verify": lambda f: (
        f"{f['file']}: {f['pages']} pages verified, {f['rows_compared']} rows equal the source"
    ),
    "done": lambda f: f"done: {f['files']} files in {_number(f, 'seconds'):.1f} s",
}


class Meter:
    """Turns a count of finished bytes into at most one progress event a second."""

    def __init__(
        self,
        reporter: Reporter,
        file: str,
        total: int,
        done: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reporter = reporter
        self._file = file
        self._total = total
        self._first = done
        self._clock = clock
        self._start = clock()
        self._last = float("-inf")

    def update(self, done: int) -> None:
        """Report that ``done`` bytes of the file are finished."""
        now = self._clock()
        if now - self._last < INTERVAL_S and done < self._total:
            return
        self._last = now
        elapsed = now - self._start
        rate = (done - self._first) / elapsed if elapsed > 0 else 0.0
        self._reporter.emit(
            "progress",
            file=self._file,
            done_bytes=done,
            bytes=self._total,
            bytes_per_second=round(rate),
            eta_seconds=round((self._total - done) / rate, 1) if rate > 0 else None,
        )
