"""Where tests find the real files of the sglang wheel.

``SPARK_ENGRAM_SGLANG`` may name the folder that holds ``sglang/`` (an unpacked wheel or
site-packages); else an installed sglang is used, else the wheel is downloaded with pip.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

WHEEL = "sglang==0.5.23"
ENGRAM = Path("sglang/srt/layers/engram.py")


def engine_root(cache: Path) -> Path:
    """The folder that holds ``sglang/``; skips the test with a reason when it cannot be had."""
    named = os.environ.get("SPARK_ENGRAM_SGLANG")
    if named:
        root = Path(named)
        assert (root / ENGRAM).exists(), f"SPARK_ENGRAM_SGLANG={named} holds no {ENGRAM}"
        return root
    spec = importlib.util.find_spec("sglang")
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0]).parent
    argv = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
        "--python-version", "3.11", "--platform", "manylinux_2_34_x86_64",
        "--dest", str(cache), WHEEL,
    ]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"needs the sglang wheel: pip download {WHEEL} failed: {done.stderr[-200:]}")
    (wheel,) = cache.glob("sglang-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".py")]
        archive.extractall(cache, members)
    return cache
