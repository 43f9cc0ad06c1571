"""Run Poetry in a temporary copy of the project. The only module here that starts a program."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomlkit

from relock.errors import RelockError
from relock.lockfile import read

if TYPE_CHECKING:
    from collections.abc import Mapping

    from relock.target import Target

SOURCE_NAME = "relock-index"
"""Name that the temporary copy gives to the index; it never reaches the committed lock."""


def version() -> str:
    """Return the version of the Poetry installed beside this interpreter.

    Raises:
        RelockError: there is none.
    """
    words = _run(["--version", "--no-ansi"], Path.cwd()).split()
    return words[-1].strip("()")


def resolve(
    pyproject: Mapping[str, Any],
    target: Target,
    index: str | None,
    keep: Mapping[str, str],
) -> dict[str, Any]:
    """Let Poetry lock a temporary copy of the project and return its lock, parsed.

    Args:
        pyproject: the parsed, committed pyproject.toml.
        target: its marker is put on every dependency.
        index: address of a simple index to use in place of Poetry's own default.
        keep: version by package name, to hold on to. Poetry gets them as constraints, not as a
            lock: it would fetch every package anew whose list of files is shorter than the index's.

    Raises:
        RelockError: Poetry fails; its last lines are in the text.
    """
    with tempfile.TemporaryDirectory(prefix="relock-") as name:
        work = Path(name)
        project = temporary_project(pyproject, target, index, keep)
        (work / "pyproject.toml").write_text(tomlkit.dumps(project), encoding="utf-8")
        for excluded, why in _exclusions(pyproject).items():
            stub = work / "stubs" / excluded
            stub.mkdir(parents=True)
            (stub / "pyproject.toml").write_text(_stub(excluded, why["version"]), encoding="utf-8")
        _run(["lock", "--no-interaction", "--no-ansi"], work, show=True)
        return read(work / "poetry.lock")


def verify(pyproject: Path, lock: str) -> None:
    """Let Poetry check that `lock` belongs to `pyproject`.

    Raises:
        RelockError: Poetry does not accept the pair.
    """
    with tempfile.TemporaryDirectory(prefix="relock-") as name:
        work = Path(name)
        (work / "pyproject.toml").write_bytes(pyproject.read_bytes())
        (work / "poetry.lock").write_text(lock, encoding="utf-8")
        _run(["check", "--lock", "--no-interaction", "--no-ansi"], work)


def temporary_project(
    pyproject: Mapping[str, Any], target: Target, index: str | None, keep: Mapping[str, str]
) -> dict[str, Any]:
    """Return the project that Poetry sees.

    Every dependency carries the target's marker, an exclusion is an empty local package, a kept
    package is a dependency on exactly its version (pruning drops it if nobody needs it).
    """
    poetry = dict(pyproject["tool"]["poetry"])
    dependencies: dict[str, Any] = {}
    for name, spec in poetry["dependencies"].items():
        if name == "python":
            dependencies[name] = spec
            continue
        table = dict(spec) if isinstance(spec, dict) else {"version": spec}
        if name in keep:
            table["version"] = f"{table['version']},=={keep[name]}"
        dependencies[name] = table | {"markers": target.marker}
    for name, version in keep.items():
        if name not in dependencies:
            dependencies[name] = {"version": f"=={version}", "markers": target.marker}
    for name in _exclusions(pyproject):
        dependencies[name] = {"path": f"stubs/{name}", "markers": target.marker}
    poetry["dependencies"] = dependencies
    if index is not None:
        poetry["source"] = [{"name": SOURCE_NAME, "url": index, "priority": "primary"}]
    return {"tool": {"poetry": poetry}}


def _exclusions(pyproject: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    return dict(pyproject["tool"].get("relock", {}).get("exclude", {}))


def _stub(name: str, wanted: str) -> str:
    return tomlkit.dumps(
        {
            "tool": {
                "poetry": {
                    "name": name,
                    "version": wanted,
                    "description": "left out by relock",
                    "authors": [],
                    "packages": [],
                }
            }
        }
    )


def _run(arguments: list[str], directory: Path, *, show: bool = False) -> str:
    """Run Poetry; with `show` its progress goes to stderr as it comes."""
    command = [sys.executable, "-m", "poetry", *arguments]
    lines: list[str] = []
    # Poetry makes a virtual environment even to lock: let it vanish with the temporary folder.
    # With a fixed hash seed it walks its sets in the same order each time.
    environment = os.environ | {"POETRY_VIRTUALENVS_IN_PROJECT": "true", "PYTHONHASHSEED": "0"}
    with subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            for line in process.stdout or ():
                lines.append(line.rstrip())
                if show:
                    print(line, end="", file=sys.stderr, flush=True)
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        tail = " | ".join(line for line in lines[-12:] if line)
        raise RelockError(f"poetry {arguments[0]} failed ({process.returncode}): {tail}")
    return "\n".join(lines)
