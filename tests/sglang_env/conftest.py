"""Make the programs of pkgs/sglang-env importable and give the committed files."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ENV = Path(__file__).resolve().parents[2] / "pkgs" / "sglang-env"
sys.path.insert(0, str(ENV))


@pytest.fixture(scope="session")
def env_dir() -> Path:
    return ENV


@pytest.fixture(scope="session")
def lock() -> dict[str, Any]:
    return tomllib.loads((ENV / "poetry.lock").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ENV / "pyproject.toml").read_text(encoding="utf-8"))
