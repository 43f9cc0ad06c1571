"""Virtual environments for the distributions below ``pkgs/``, whose tests want the real engine.

The engine's CPU parts need torch, the sglang wheel without its dependencies, and some fifty small
packages: about 3 GB and three minutes, kept below ``.cache/`` and made anew when anything that went
into it changes. Where no CPU build of torch can be had (see ``tests/engine/engine_venv.py``) the
distributions are tested without the engine, and those tests skip by name.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "engine"))

from engine_venv import torch_requirement  # noqa: E402 - the one place that knows about torch

PACKAGES = ROOT / "pkgs"
ENGINE_REQUIREMENTS = PACKAGES / "spark-tp-pad" / "tests" / "requirements-engine.txt"
ENGINE_WHEELS = ("sglang==0.5.23", "torchvision==0.28.0", "compressed-tensors==0.18.0")
TOOLS = ("pytest>=8.3", "hypothesis>=6.112", "numpy>=1.26")


class EnvironmentFailedError(Exception):
    """An environment could not be made; the text says which step failed and pip's last words."""


def distributions() -> list[Path]:
    """Return the distributions below ``pkgs/`` that pip can build and that have tests."""
    return sorted(
        tests.parent
        for tests in PACKAGES.glob("*/tests")
        if "build-system" in (tests.parent / "pyproject.toml").read_text(encoding="utf-8")
    )


def engine_environment(environ: dict[str, str]) -> Path:
    """Return the interpreter of an environment with the engine and all distributions.

    Raises:
        EnvironmentFailedError: when a step fails.
    """
    return _environment(
        "engine",
        [
            [torch_requirement(environ, sys.platform)],
            ["--no-deps", *ENGINE_WHEELS],
            ["-r", str(ENGINE_REQUIREMENTS), *TOOLS],
        ],
    )


def plain_environment() -> Path:
    """Return the interpreter of an environment with the distributions alone.

    Raises:
        EnvironmentFailedError: when a step fails, such as a missing C++ compiler.
    """
    return _environment("packages", [list(TOOLS)])


def _environment(name: str, steps: list[list[str]]) -> Path:
    folder = ROOT / ".cache" / name
    python = folder / "bin" / "python"
    stamp = folder / "made-of"
    text = "\n".join([sys.version, *(" ".join(step) for step in steps)])
    text += ENGINE_REQUIREMENTS.read_text(encoding="utf-8")
    wanted = hashlib.sha256(text.encode()).hexdigest()
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        for step in steps:
            _pip(python, step)
        stamp.write_text(wanted, encoding="utf-8")
    for distribution in distributions():
        _pip(python, ["--no-deps", "--force-reinstall", str(distribution)])
    return python


def _pip(python: Path, arguments: list[str]) -> None:
    command = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        last = said[-1] if said else "nothing"
        raise EnvironmentFailedError(f"pip install {' '.join(arguments)}: {last}")
