"""The flags that the pinned engine knows, so that a typo is found before a node starts.

argparse takes any unambiguous prefix of a flag, so a misspelt or shortened flag can pass the engine
and override another; here only whole names count. The list is the parser's own: the test marked
``engine`` compares it with sglang 0.5.23.
"""

from __future__ import annotations

import difflib
import functools
from importlib import resources


@functools.cache
def known_flags() -> frozenset[str]:
    """Return all flags of sglang 0.5.23, without dashes."""
    text = (resources.files(__package__) / "flags.txt").read_text(encoding="utf-8")
    return frozenset(text.split())


def closest_flag(name: str) -> str | None:
    """Return the known flag that ``name`` probably means."""
    longer = sorted(flag for flag in known_flags() if flag.startswith(name))
    if longer:
        return longer[0]
    close = difflib.get_close_matches(name, sorted(known_flags()), n=1)
    return close[0] if close else None
