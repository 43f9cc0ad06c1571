"""Shared by all tests: a hypothesis profile, and signals as a person's shell has them."""

from __future__ import annotations

import signal

from hypothesis import settings

# CI machines are slow and loaded, so no deadlines.
settings.register_profile("default", deadline=None)
settings.load_profile("default")

# A job that a script starts in the background ignores SIGINT, and so would everything it starts;
# tests that interrupt a command need the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
