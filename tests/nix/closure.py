"""What a system is made of, read from its derivations alone: nothing is built.

A derivation names everything that its build may see. Derivations that only put things together
(unit files, /etc, wrappers, environments) pass on what their texts name, and those are followed;
what they lead to are the packages of the running system. What such a package itself refers to is
known after building only, but it cannot be more than its build saw, so what occurs in no
derivation at all is in no closure either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nixtool import Nix

_PATH = re.compile(r"/nix/store/[0-9a-z]{32}-[0-9A-Za-z+._?=-]+")

_BUILD_ONLY = {
    "PATH",
    "builder",
    "depsBuildBuild",
    "initialPath",
    "nativeBuildInputs",
    "shell",
    "src",
    "srcs",
    "stdenv",
}
"""Variables of a derivation that its output has no reason to name."""


@dataclass(frozen=True, slots=True)
class Output:
    """An output of a derivation, such as ``gcc-15.2.0`` and ``lib``."""

    name: str
    output: str
    derivation: str


class System:
    """All derivations that a system needs, by path."""

    def __init__(self, nix: Nix, toplevel: str) -> None:
        shown = json.loads(nix.run("derivation", "show", "--recursive", toplevel))
        self.derivations: Mapping[str, Any] = shown
        self.toplevel = toplevel
        self._outputs = {
            output["path"]: Output(derivation["name"], name, path)
            for path, derivation in shown.items()
            for name, output in derivation["outputs"].items()
            if "path" in output
        }
        assert toplevel in shown

    @property
    def names(self) -> set[str]:
        """Names of everything that is built or fetched for it, build tools included."""
        return {derivation["name"] for derivation in self.derivations.values()}

    def text(self, name: str) -> str:
        """Return the text of the one file with a name."""
        (path,) = (p for p, d in self.derivations.items() if d["name"] == name)
        return str(self._variables(path)["text"])

    def packages(self, without: str | None = None) -> set[Output]:
        """Return what the system names, ``without`` what only derivations of a name lead to."""
        seen: set[str] = set()
        result: set[Output] = set()
        todo = [self.toplevel]
        while todo:
            path = todo.pop()
            if path in seen:
                continue
            seen.add(path)
            for output in self._named(path):
                if without is not None and output.name.startswith(without):
                    continue
                result.add(output)
                if self._only_assembles(output.derivation):
                    todo.append(output.derivation)
        return result

    def _variables(self, path: str) -> dict[str, str]:
        result = dict(self.derivations[path]["env"])
        structured = result.pop("__json", None)
        if structured is not None:
            values = json.loads(structured)
            result |= {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}
        return result

    def _only_assembles(self, path: str) -> bool:
        variables = self._variables(path)
        local = variables.get("preferLocalBuild") in ("1", "true")
        return local or ("buildCommand" in variables and "src" not in variables)

    def _named(self, path: str) -> Iterator[Output]:
        ignored = _BUILD_ONLY | set(self.derivations[path]["outputs"])
        for name, value in self._variables(path).items():
            if name not in ignored:
                for found in _PATH.findall(value):
                    if found in self._outputs:
                        yield self._outputs[found]
