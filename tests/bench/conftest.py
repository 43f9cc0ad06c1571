"""Fixtures: the streaming test server, and ``spark-appliance bench`` as a command."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="the extra `bench` (aiohttp) is not installed")

from bench_helpers import Ran, start_server

from spark_appliance.cli import main


@pytest.fixture
def server(tmp_path: Path):
    """A function that starts servers; all are ended with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(start_server(tmp_path, **options))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch, capsys):
    """Run the console script's function in ``tmp_path``, as this process (it starts faster)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPARK_API_KEY", raising=False)

    def run(*arguments: str, env: dict[str, str] | None = None) -> Ran:
        status = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["spark-appliance", "bench", *arguments])
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            try:
                main()
            except SystemExit as ended:
                status = int(ended.code or 0)
        captured = capsys.readouterr()
        return Ran(status, captured.out, captured.err)

    return run
