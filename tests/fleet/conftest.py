from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet_world import World, environment, make_plan, make_world

_MEMORY = Path("/dev/shm")


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: what is flushed to a disk there takes no time."""
    if not _MEMORY.is_dir():
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(prefix="spark-fleet-", dir=_MEMORY))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def world(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(quick_path / "fleet", make_plan())
    (made.base / "run").mkdir(mode=0o700)
    for name, value in environment(made).items():
        monkeypatch.setenv(name, value)
    return made
