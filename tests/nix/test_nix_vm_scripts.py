"""The scripts of the VM tests are valid for the driver: names, arguments, types."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from nixtool import REPOSITORY

VM = REPOSITORY / "tests" / "vm"
SPARKS = ("spark1", "spark2", "spark3")
MACHINES = {
    "fabric": SPARKS,
    "weights": (*SPARKS, "stranger"),
    "engram": ("machine",),
    "engine": SPARKS,
    "rollout": SPARKS,
}


def check(
    script: str, machines: tuple[str, ...], tmp_path: Path
) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("mypy", reason="mypy is not installed")
    typed = (VM / "driver_types.py").read_text(encoding="utf-8")
    typed += "".join(f"{name} = Machine()\n" for name in machines) + script
    file = tmp_path / "script.py"
    file.write_text(typed, encoding="utf-8")
    return subprocess.run(
        [
            *[sys.executable, "-m", "mypy", "--config-file=", "--check-untyped-defs"],
            *["--follow-imports=silent", str(file)],
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        # scripts may take commands from the command line
        env={**os.environ, "MYPYPATH": str(REPOSITORY)},
    )


def test_every_script_is_checked() -> None:
    assert {path.stem for path in (VM / "scripts").glob("*.py")} == set(MACHINES)


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_script_type_checks(name: str, tmp_path: Path) -> None:
    script = (VM / "scripts" / f"{name}.py").read_text(encoding="utf-8")
    done = check(script, MACHINES[name], tmp_path)
    assert done.returncode == 0, done.stdout


def test_helpers_for_nixos_type_check(tmp_path: Path) -> None:
    typed = (VM / "driver_types.py").read_text(encoding="utf-8").split("# What differs")[0]
    helpers = (VM / "nixos_helpers.py").read_text(encoding="utf-8")
    file = tmp_path / "helpers.py"
    file.write_text(typed + helpers, encoding="utf-8")
    argv = [sys.executable, "-m", "mypy", "--config-file=", "--check-untyped-defs", str(file)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "wrong",
    ["spark1.succed('true')", "spark1.succeed(5)", "spark4.start()", "x: int = spark1.execute('')"],
)
def test_the_check_finds_mistakes(wrong: str, tmp_path: Path) -> None:
    assert check(wrong + "\n", SPARKS, tmp_path).returncode == 1
