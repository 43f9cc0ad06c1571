"""The engine fixture: one venv and one engine for the whole session."""

from __future__ import annotations

import os

import pytest
from engine_venv import Engine, EngineUnavailableError, ensure_engine


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> Engine:
    """Return the installed engine; skip, or fail where SPARK_ENGINE_REQUIRED=1, without it."""
    terminal = request.config.pluginmanager.get_plugin("terminalreporter")

    def report(text: str) -> None:
        if terminal is not None:
            terminal.ensure_newline()
            terminal.write_line(text)

    try:
        return ensure_engine(os.environ, report)
    except EngineUnavailableError as error:
        if os.environ.get("SPARK_ENGINE_REQUIRED") == "1":
            pytest.fail(f"the engine is required here but {error}", pytrace=False)
        pytest.skip(f"no engine to judge with: {error}")
