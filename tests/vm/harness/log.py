"""What happens in a test, with the time since its start, on standard error."""

from __future__ import annotations

import sys
import time

_START = time.monotonic()


def say(who: str, what: str) -> None:
    """Print one line."""
    print(f"[{time.monotonic() - _START:7.1f}] {who}: {what}", file=sys.stderr, flush=True)
