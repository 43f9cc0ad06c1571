"""Shared by all tests: a hypothesis profile, signals as a person's shell has them, and Nix."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# one place knows where Nix and the flake's inputs are, for the tests of every folder
sys.path.append(str(Path(__file__).parent / "nix"))

from nixtool import Nix, NixMissingError, find

# CI machines are slow and loaded, so no deadlines.
settings.register_profile("default", deadline=None)
settings.load_profile("default")

# A job that a script starts in the background ignores SIGINT, and so would everything it starts;
# tests that interrupt a command need the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def nix() -> Iterator[Nix]:
    """Nix with what it needs for this flake; without it, tests skip and say what is missing."""
    try:
        found = find(f"spark-nix-test-{os.getpid()}")
    except NixMissingError as error:
        pytest.skip(f"{error}; see tests/nix/README.md")
    yield found
    shutil.rmtree(found.source.parent)
