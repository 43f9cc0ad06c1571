"""Run the console script in this process, errors and exit status included."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from spark_appliance.cli import main

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Result:
    status: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Return a function that runs ``spark-appliance ARGUMENTS`` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def _run(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["spark-appliance", *arguments])
        status = 0
        try:
            main()
        except SystemExit as exit_:
            status = exit_.code if isinstance(exit_.code, int) else 0 if exit_.code is None else 1
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return Result(status, captured.out, captured.err)

    return _run


@pytest.fixture
def example(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies an example's cluster file into the folder."""

    def _copy(name: str) -> Path:
        target = tmp_path / "cluster.yaml"
        shutil.copy(ROOT / "examples" / name / "cluster.yaml", target)
        return target

    return _copy
