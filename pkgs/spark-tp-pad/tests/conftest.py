"""Shared fixtures. One thread: the machine that runs these is small and the tensors are smaller."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch (pip install torch==2.13.0 takes a CPU build)")

import torch
from engine_harness import load_plugin, require_engine

# Keeps the engine from asking a hub for anything.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The real engine with the plugin loaded and active; a folder for a model."""
    require_engine()
    load_plugin(monkeypatch, active=True)
    yield tmp_path / "model"
    from sglang.srt.runtime_context import reset_context

    reset_context()
