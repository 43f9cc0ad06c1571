"""The systemd of the machine that runs the tests may be older than that of the nodes (255)."""

from __future__ import annotations

import re
import subprocess

_SINCE = {"LogFilterPatterns": 253}
"""Release of systemd that learned a setting (systemd.exec(5))."""


def known_here(text: str) -> str:
    """Return a unit's text without the settings that this machine's systemd cannot judge yet."""
    said = subprocess.run(
        ["systemd-analyze", "--version"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    found = re.search(r"\d+", said)
    assert found is not None, said
    version = int(found[0])
    return "".join(
        line
        for line in text.splitlines(keepends=True)
        if _SINCE.get(line.partition("=")[0], 0) <= version
    )
