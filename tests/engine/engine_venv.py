"""The throw-away venv in which the real engine judges what this project renders.

Making it takes about a minute and a gigabyte, so it is kept between runs: in the directory that
``SPARK_ENGINE_VENV`` names, or under the user's cache. It is made again when anything that went
into it changes (the engine version, the requirements, the interpreter).

Environment variables read here:

``SPARK_ENGINE_VENV``
    Directory of the venv. It is emptied when it is stale: give it a place of its own.
``SPARK_ENGINE_PYTHON``
    Interpreter for the venv; default: the one that runs the tests.
``SPARK_ENGINE_TORCH``
    pip requirement for torch; see `torch_requirement`.
``SPARK_ENGINE_REQUIRED``
    ``1`` makes the tests fail where they would skip because the venv cannot be made (for CI).
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENGINE = "sglang==0.5.23"
# The last torch series that the engine's CPU paths were tried with here; the parser uses torch
# for type annotations and capability probes only, so it need not be the 2.14.1 of the engine.
TORCH = "2.13.0"
HERE = Path(__file__).parent
STAMP = "spark-engine.json"
# pip must have finished by then on two loaded cores; a stuck download ends as a skip.
PIP_TIMEOUT_S = 900
JUDGE_TIMEOUT_S = 300

Report = Callable[[str], None]


class EngineUnavailableError(Exception):
    """The venv cannot be made here; the text says what is missing and what would help."""


def torch_requirement(environ: Mapping[str, str], system: str) -> str:
    """Return the pip requirement that brings a CPU build of torch.

    On Linux the plain name brings a CUDA build with several gigabytes of libraries, so the CPU
    build is asked for by its local version label. pip finds that where a package source with CPU
    builds is configured (an extra index or a ``find-links`` directory) and fails at once where
    none is. On macOS every build is a CPU build. ``SPARK_ENGINE_TORCH`` overrules both, for
    example ``torch==2.13.0`` to accept the CUDA build.
    """
    if requirement := environ.get("SPARK_ENGINE_TORCH", "").strip():
        return requirement
    return f"torch=={TORCH}" if system == "darwin" else f"torch=={TORCH}+cpu"


def venv_key(parts: Sequence[str]) -> str:
    """Return a short name that changes with anything that went into the venv."""
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()[:16]


def venv_directory(environ: Mapping[str, str], key: str) -> Path:
    """Return where the venv lives: ``SPARK_ENGINE_VENV``, else under the XDG cache directory."""
    if chosen := environ.get("SPARK_ENGINE_VENV", "").strip():
        return Path(chosen).expanduser().absolute()
    cache = environ.get("XDG_CACHE_HOME", "").strip() or "~/.cache"
    return Path(cache).expanduser() / "spark-appliance" / f"engine-{key}"


def refusal(verdicts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return one line per refused argv, empty when the parser accepts all."""
    return "\n".join(
        f"{name}: {verdict['error']}" for name, verdict in verdicts.items() if verdict["error"]
    )


@dataclass(frozen=True, slots=True)
class Engine:
    """An installed engine. ``python`` is the interpreter of its venv."""

    python: Path

    def judge(
        self,
        argvs: Mapping[str, Sequence[str]] | None = None,
        environments: Mapping[str, Mapping[str, str]] | None = None,
    ) -> dict[str, Any]:
        """Return the engine's verdicts; `judge.py` describes both sides.

        Raises RuntimeError with the engine's stderr when the script itself fails.
        """
        request = {
            "argvs": {name: list(argv) for name, argv in (argvs or {}).items()},
            "environments": {name: dict(env) for name, env in (environments or {}).items()},
        }
        done = subprocess.run(
            # -I: neither this project's path nor PYTHON* variables reach the engine.
            [self.python, "-I", HERE / "judge.py"],
            input=json.dumps(request),
            env={
                "PATH": os.defpath,
                "HOME": str(self.python.parent.parent),
                "LC_ALL": "C.UTF-8",
                "CUDA_VISIBLE_DEVICES": "",
            },
            capture_output=True,
            text=True,
            timeout=JUDGE_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"judge.py ended with {done.returncode}:\n{done.stderr[-4000:]}")
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def dependencies(self) -> set[str]:
        """Return the names of what the engine's wheel requires, extras left out."""
        folders = list(self.python.parent.parent.glob("lib/python*/site-packages"))
        [engine] = importlib.metadata.distributions(name="sglang", path=list(map(str, folders)))
        return {
            re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0].lower()
            for requirement in engine.requires or ()
            if "extra ==" not in requirement
        }


def _run(command: Sequence[str | Path], *, doing: str, log: Path) -> None:
    """Run one step of the installation; its output is appended to ``log``."""
    with log.open("a", encoding="utf-8") as output:
        output.write(f"$ {' '.join(map(str, command))}\n")
        output.flush()
        try:
            done = subprocess.run(
                command, stdout=output, stderr=output, timeout=PIP_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise EngineUnavailableError(
                f"{doing} did not end within {PIP_TIMEOUT_S} s; see {log}"
            ) from None
        except OSError as error:
            raise EngineUnavailableError(f"{doing} cannot start: {error}") from None
    if done.returncode != 0:
        raise EngineUnavailableError(f"{doing} failed: {_reason(log)} (all of it: {log})")


def _reason(log: Path) -> str:
    """Return what the last command of a log gave as its reason, shortened."""
    text = log.read_text(encoding="utf-8", errors="replace").rpartition("\n$ ")[2]
    lines = [line for line in text.splitlines()[1:] if line.strip()]
    first = next((line for line in lines if line.startswith("ERROR")), "")
    return (first or (lines[-1] if lines else "it said nothing"))[:300]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file: two test runs must not build the same venv at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def ensure_engine(environ: Mapping[str, str], report: Report) -> Engine:
    """Return the installed engine, made now if it is not there yet.

    Raises EngineUnavailableError when it cannot be made on this machine.
    """
    interpreter = environ.get("SPARK_ENGINE_PYTHON", "").strip() or sys.executable
    requirements = HERE / "requirements.txt"
    torch = torch_requirement(environ, sys.platform)
    parts = [ENGINE, torch, interpreter, sys.version, requirements.read_text(encoding="utf-8")]
    directory = venv_directory(environ, venv_key(parts))
    stamp = directory / STAMP
    python = directory / "bin" / "python"
    wanted = json.dumps(parts)
    with _locked(directory.with_name(f"{directory.name}.lock")):
        if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
            return Engine(python)
        if directory.exists():
            if not (directory / "pyvenv.cfg").is_file() and any(directory.iterdir()):
                raise EngineUnavailableError(
                    f"{directory} is not a venv and not empty; set SPARK_ENGINE_VENV to another"
                )
            shutil.rmtree(directory)
        log = directory.with_name(f"{directory.name}.log")
        log.unlink(missing_ok=True)
        report(f"installing {ENGINE} into {directory} (about a minute; log: {log})")
        pip: list[str | Path] = [python, "-m", "pip", "install", "--no-input", "--quiet"]
        # Compiling every module of torch and the engine takes longer than the few that run.
        pip += ["--no-compile", "--only-binary", ":all:"]
        _run([interpreter, "-m", "venv", directory], doing="making a venv", log=log)
        try:
            _run([*pip, torch], doing=f"installing {torch}", log=log)
        except EngineUnavailableError as error:
            raise EngineUnavailableError(
                f"{error}. The parser imports torch; configure a pip source that has its CPU "
                f"build, or set SPARK_ENGINE_TORCH=torch=={TORCH} to accept the build with CUDA "
                "(several GB)"
            ) from None
        _run([*pip, "-r", requirements], doing="installing the parser's modules", log=log)
        _run([*pip, "--no-deps", ENGINE], doing=f"installing {ENGINE}", log=log)
        stamp.write_text(wanted, encoding="utf-8")
    return Engine(python)
