"""Shared hypothesis profile: CI machines are slow and loaded, so no deadlines."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("default", deadline=None)
settings.load_profile("default")
