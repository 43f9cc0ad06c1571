from __future__ import annotations

from pathlib import Path

import pytest
from fleet_world import World, environment, make_plan, make_world


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path / "fleet", make_plan())
    (made.base / "run").mkdir(mode=0o700)
    for name, value in environment(made).items():
        monkeypatch.setenv(name, value)
    return made
