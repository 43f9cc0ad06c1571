"""A file of a node as data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

HEADER = "# Written by spark-appliance from the plan; 'spark-appliance install' replaces it.\n"
"""First line of every text file, so that nobody edits it in vain."""


@dataclass(frozen=True, slots=True)
class NodeFile:
    """One file, or one symbolic link whose ``content`` is its target. Owned by root."""

    path: str
    content: bytes
    mode: int = 0o644
    kind: Literal["file", "link"] = "file"
    owner: str = "root"
    group: str = "root"

    @property
    def sha256(self) -> str:
        """Hash of the content as hex."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def text(self) -> str:
        """The content as text."""
        return self.content.decode()


def text_file(path: str, body: str, *, mode: int = 0o644) -> NodeFile:
    """Return a text file with the header line."""
    return NodeFile(path, (HEADER + body).encode(), mode)


def link(path: str, target: str) -> NodeFile:
    """Return a symbolic link."""
    return NodeFile(path, target.encode(), 0o777, "link")


def ini(sections: Iterable[tuple[str, Iterable[tuple[str, str]]]]) -> str:
    """Return the text of systemd-style sections; a key may occur several times."""
    blocks = []
    for name, pairs in sections:
        lines = [f"{key}={value}\n" for key, value in pairs]
        if lines:
            blocks.append(f"[{name}]\n" + "".join(lines))
    return "\n".join(blocks)
