"""Find Nix and the trees it evaluates against, and run it, for the tests of all folders.

What is used is named by variables, from the environment or from
``~/.config/spark-appliance/nix-test.env`` (lines ``NAME=value``), which ``setup-nix.sh`` writes:

``SPARK_NIX``          command in front of a Nix sub-command (default ``nix``), for example
                       ``chroot /srv/nixroot nix``
``SPARK_NIX_ROOT``     folder that this Nix sees as ``/`` (default ``/``)
``SPARK_NIXPKGS``, ``SPARK_POETRY2NIX``, ``SPARK_DGX_SPARK``
                       trees of the flake's inputs, as Nix sees them
``SPARK_NIX_HOST_NIXPKGS``
                       nixpkgs tree made by ``hosttools/make-tree``, for tests that build
``SPARK_NIX_ONLINE``   ``1``: fetch the inputs of flake.lock instead of using trees
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = Path("~/.config/spark-appliance/nix-test.env").expanduser()
MINIMUM = (2, 18)
"""nixpkgs' lib/minfeatures.nix."""

HOST_TREE = "SPARK_NIX_HOST_NIXPKGS"

INPUTS: Mapping[str, str] = {
    "nixpkgs": "SPARK_NIXPKGS",
    "poetry2nix": "SPARK_POETRY2NIX",
    "nixos-dgx-spark": "SPARK_DGX_SPARK",
}


class NixMissingError(Exception):
    """Nix or a tree is not there; says which."""


class NixFailedError(Exception):
    """Nix ended with an error."""


def settings() -> dict[str, str]:
    """Return the variables; the environment wins over the file."""
    result: dict[str, str] = {}
    if CONFIG.is_file():
        for line in CONFIG.read_text(encoding="utf-8").splitlines():
            name, equals, value = line.partition("=")
            if equals and not line.lstrip().startswith("#"):
                result[name.strip()] = value.strip().strip("\"'")
    names = ["SPARK_NIX", "SPARK_NIX_ROOT", "SPARK_NIX_ONLINE", HOST_TREE, *INPUTS.values()]
    return result | {name: os.environ[name] for name in names if name in os.environ}


def copy_sources(target: Path) -> None:
    """Copy what git tracks or would track, so that Nix sees the work tree and nothing else."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
    ).stdout
    for name in listed.decode().split("\0"):
        source = REPOSITORY / name
        if name and source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target / name)


@dataclass(frozen=True, slots=True)
class Nix:
    """A Nix that can evaluate this flake."""

    command: tuple[str, ...]
    root: Path
    trees: Mapping[str, str]
    source: Path
    """Copy of the work tree, below ``root``."""
    host_tree: str | None
    """nixpkgs tree for builds with the machine's tools."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """What runs a program where Nix runs, before the program's path."""
        return self.command[: self.command.index("--extra-experimental-features") - 1]

    def inside(self, path: Path) -> str:
        """Return a path as Nix sees it."""
        return "/" + str(path.relative_to(self.root))

    def run(self, *arguments: str, timeout: int = 1800) -> str:
        """Run a sub-command and return what it prints.

        Raises:
            NixFailedError: with Nix's message.
        """
        return self._run(arguments, timeout).stdout

    def _run(
        self, arguments: Sequence[str], timeout: int = 1800
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*self.command, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode:
            raise NixFailedError(done.stderr[-6000:])
        return done

    @property
    def overrides(self) -> list[str]:
        """Arguments that replace the flake's inputs by the trees."""
        words = ["--no-write-lock-file"]
        for name, path in self.trees.items():
            words += ["--override-input", name, f"path:{path}"]
        return words

    @property
    def flake(self) -> str:
        """The flake as an argument."""
        return f"path:{self.inside(self.source)}"

    def evaluate(
        self, file: str, arguments: Mapping[str, str] | None = None, *, refuse: str | None = None
    ) -> Any:
        """Evaluate ``tests/nix/FILE``, a function of the flake's outputs and ``arguments``.

        Outputs are made from the inputs' trees directly, which spares Nix the copying.

        Raises:
            NixFailedError: with Nix's message, or when Nix said ``refuse``.
        """
        strings = "".join(f" {k} = {json.dumps(v)};" for k, v in (arguments or {}).items())
        source = self.inside(self.source)
        flake = self.outputs(self.trees["nixpkgs"] if self.trees else None)
        expression = f"import {source}/tests/nix/{file} {{ flake = {flake};{strings} }}"
        done = self._run(
            ("eval", "--impure", "--json", "--no-write-lock-file", "--expr", expression)
        )
        if refuse is not None and refuse in done.stderr:
            raise NixFailedError(done.stderr[-6000:])
        return json.loads(done.stdout)

    def outputs(self, nixpkgs: str | None) -> str:
        """Return the expression of the flake's outputs, made with a nixpkgs tree."""
        source = self.inside(self.source)
        if nixpkgs is None:
            return f'builtins.getFlake "{self.flake}"'
        return (
            f"(import {source}/flake.nix).outputs {{ self = {source};"
            f' nixpkgs = builtins.getFlake "path:{nixpkgs}";'
            f' poetry2nix.outPath = "{self.trees["poetry2nix"]}";'
            f' nixos-dgx-spark.outPath = "{self.trees["nixos-dgx-spark"]}"; }}'
        )

    def build(self, file: str, attribute: str, *more: str) -> Path:
        """Build an attribute of a file with the machine's tools; returns the path outside.

        ``more`` are further arguments of ``nix build``.

        Raises:
            NixFailedError: with the end of the log.
        """
        expression = f"import {self.inside(self.source)}/tests/nix/{file}"
        expression += f" {{ flake = {self.outputs(self.host_tree)}; }}"
        words = ["build", "--impure", "--no-link", "--print-out-paths", "--print-build-logs"]
        output = self.run(*words, *more, "--expr", expression, attribute)
        return self.root / output.split()[0].lstrip("/")


def find(scratch: str) -> Nix:
    """Return a usable Nix with the work tree copied to ``scratch`` below its root's /tmp.

    Raises:
        NixMissingError: saying what is missing.
    """
    values = settings()
    command = tuple(shlex.split(values.get("SPARK_NIX", "nix")))
    root = Path(values.get("SPARK_NIX_ROOT", "/"))
    if not command or shutil.which(command[0]) is None:
        raise NixMissingError(f"no Nix: {values.get('SPARK_NIX', 'nix')!r} is not there")
    flags = ("--extra-experimental-features", "nix-command flakes")
    try:
        version = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise NixMissingError(f"no Nix: {shlex.join(command)} does not run ({error})") from None
    found = re.search(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < MINIMUM:
        raise NixMissingError(f"Nix is too old: {version.strip()}, wanted >= 2.18")
    trees: dict[str, str] = {}
    if values.get("SPARK_NIX_ONLINE") != "1":
        for name, variable in INPUTS.items():
            path = values.get(variable)
            if not path:
                raise NixMissingError(f"{variable} (a tree of {name}) is not set")
            if not (root / path.lstrip("/")).is_dir():
                raise NixMissingError(f"{variable}: {path} is no folder in {root}")
            trees[name] = path
    source = root / "tmp" / scratch / "source"
    if source.exists():
        shutil.rmtree(source)
    source.mkdir(parents=True)
    copy_sources(source)
    return Nix((*command, *flags), root, trees, source, values.get(HOST_TREE))
