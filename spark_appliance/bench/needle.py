"""A sentence to find in a long text."""

from __future__ import annotations

import secrets

from spark_appliance.bench.metrics import Prompt

_QUESTION = (
    "\n\nOne line of the text above states the access code of the harbour office. "
    "Answer with that code and nothing else."
)


def hide(text: str, depth: float) -> Prompt:
    """Put a random code into ``text`` at ``depth`` (0 start .. 1 end) and ask for it.

    The code is eight random digits, so it cannot be guessed or remembered from another run.
    """
    code = f"{secrets.randbelow(90_000_000) + 10_000_000}"
    at = text.rfind("\n", 0, round(len(text) * depth) + 1) + 1
    line = f"The access code of the harbour office is {code}.\n"
    return Prompt(text[:at] + line + text[at:] + _QUESTION, needle=(depth, code))
