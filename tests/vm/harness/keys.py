"""SSH keys that live as long as a test."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class KeyPair:
    """An ed25519 key; ``path`` is the private half."""

    path: Path

    @property
    def private(self) -> str:
        """The private half as text."""
        return self.path.read_text()

    @property
    def public(self) -> str:
        """The public half as one line."""
        return self.path.with_name(self.path.name + ".pub").read_text().strip()


def make_key(path: Path) -> KeyPair:
    """Make a key pair."""
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)]
    subprocess.run(argv, check=True)
    return KeyPair(path)
