"""Judge argument lists and environment variables with the engine that will receive them.

Runs as a script inside the throw-away venv that `engine_venv.py` makes, where the real sglang
wheel is installed. It needs the standard library and sglang, nothing of this project.

stdin, JSON::

    {"argvs": {NAME: [ARGUMENT, ...]}, "environments": {NAME: {VARIABLE: VALUE}}}

stdout, JSON::

    {"engine": {"sglang": VERSION, "torch": VERSION, "python": VERSION},
     "flags": [a line for every flag of the parser, see `Judge.flags`; empty without argvs],
     "variables": [every SGLANG_* name that the engine reads; empty without argvs],
     "argvs": {NAME: {"error": null or text,
                      "values": {dest: value that this argv sets},
                      "options": [{"flag": "--tp", "dest": "tp_size", "value": 4}, ...],
                      "abbreviated": [flags that are only a prefix of a real one],
                      "repeated": [flags given more than once]}},
     "environments": {NAME: {VARIABLE: {"status": "declared" | "read" | "deprecated" | "unknown",
                                        "where": "srt/environ.py:1251",
                                        "problem": null or text}}}}

Everything that sglang prints goes to stderr.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

VARIABLE_PREFIX = "SGLANG_"


class RefusedError(Exception):
    """The parser does not accept an argument list; the text is the parser's own."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of printing a usage and ending the process."""

    def error(self, message: str) -> NoReturn:
        """Raise ``RefusedError`` with argparse's message."""
        raise RefusedError(message)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Raise ``RefusedError``: ``--help`` has no place in a launch command."""
        raise RefusedError(message or f"the parser ended the program with status {status}")


AddArguments = Callable[[argparse.ArgumentParser], None]


def _parser(add_arguments: AddArguments, *, allow_abbrev: bool) -> Parser:
    # The prog is the engine's own: messages then read as they will on the node.
    parser = Parser(prog="sglang serve", allow_abbrev=allow_abbrev)
    add_arguments(parser)
    return parser


def split_options(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return ``argv`` as (flag, values): each ``--flag`` owns what follows it.

    >>> split_options(["--tp", "4", "--host=::", "--trust-remote-code"])
    [('--tp', ['4']), ('--host=::', []), ('--trust-remote-code', [])]

    Raises RefusedError when ``argv`` begins with something that is not a flag.
    """
    options: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--"):
            options.append((word, []))
        elif options:
            options[-1][1].append(word)
        else:
            raise RefusedError(f"{word!r} comes before any flag")
    return options


class Judge:
    """The verdicts of one parser.

    ``required`` is what the parser insists on (``--model-path``); it lets every option of an
    argument list be parsed alone, which tells the destination of that option.
    """

    def __init__(self, add_arguments: AddArguments, required: Sequence[str]) -> None:
        self._parser = _parser(add_arguments, allow_abbrev=True)
        self._exact = _parser(add_arguments, allow_abbrev=False)
        self._required = list(required)
        self._dests = list(vars(self._parser.parse_args(self._required)))

    def _given(self, argv: Sequence[str]) -> dict[str, Any]:
        """Return what ``argv`` sets and nothing that is a default."""
        unset = object()
        # argparse fills in a default only where the namespace has no attribute yet.
        namespace = argparse.Namespace(**dict.fromkeys(self._dests, unset))
        parsed = vars(self._parser.parse_args(list(argv), namespace))
        return {dest: value for dest, value in parsed.items() if value is not unset}

    def _option(self, flag: str, values: Sequence[str]) -> dict[str, Any]:
        # The option comes last, so it also wins when it is itself a required one.
        given = self._given([*self._required, flag, *values])
        for dest in self._given(self._required):
            if len(given) > 1:
                given.pop(dest)
        [(dest, value)] = given.items()
        return {"flag": flag.split("=", 1)[0], "dest": dest, "value": value}

    def flags(self) -> list[str]:
        """Return a line for every long flag: its name, what it takes, its choices.

        ``switch`` takes nothing, ``many`` one or more values, the others one.
        """
        lines = []
        for action in self._parser._actions:
            kind = _kind(action)
            choices = "|".join(sorted(map(str, action.choices))) if action.choices else ""
            lines += [
                f"{flag[2:]} {kind} {choices}".rstrip()
                for flag in action.option_strings
                if flag.startswith("--") and not isinstance(action, argparse._HelpAction)
            ]
        return sorted(lines)

    def verdict(self, argv: Sequence[str]) -> dict[str, Any]:
        """Return the verdict on one argument list, as described at the top of this file."""
        verdict: dict[str, Any] = {
            "error": None,
            "values": {},
            "options": [],
            "abbreviated": [],
            "repeated": [],
        }
        try:
            options = split_options(argv)
            verdict["values"] = self._given(argv)
            verdict["options"] = [self._option(flag, values) for flag, values in options]
        except RefusedError as refusal:
            verdict["error"] = str(refusal)
            return verdict
        _, unknown = self._exact.parse_known_args([*self._required, *argv])
        verdict["abbreviated"] = [word for word in unknown if word.startswith("--")]
        count = Counter(option["dest"] for option in verdict["options"])
        verdict["repeated"] = [
            option["flag"] for option in verdict["options"] if count[option["dest"]] > 1
        ]
        return verdict


def _kind(action: argparse.Action) -> str:
    if action.nargs == 0 or action.const is not None:
        return "switch"
    if action.nargs in ("+", "*"):
        return "many"
    name = getattr(action.type, "__name__", "str")
    return {"int": "int", "human_readable_int": "int", "float": "float"}.get(name, "text")


class Environ:
    """What the engine knows about environment variables.

    ``source`` is the package's ``srt`` directory. ``srt/environ.py`` is the registry: importing
    it alone (it needs only the standard library) gives names, parsers and retired names without
    importing the engine. A few variables bypass the registry; they are found by reading every
    other file for ``os.environ``, ``os.getenv`` and the ``get_*_env_var`` helpers.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        path = source / "environ.py"
        registry = _load_alone("_engine_environ", path)
        self._declared = {
            name: field
            for name, field in vars(registry.Envs).items()
            if isinstance(field, registry.EnvField)
        }
        self._deprecated = {
            **{name: entry.note or "" for name, entry in registry._DEPRECATED_ENVS.items()},
            **{
                field.deprecated_name: f"use {name}"
                for name, field in self._declared.items()
                if hasattr(field, "deprecated_name")
            },
        }
        self._lines = {
            target.id: node.lineno
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    @functools.cached_property
    def _sources(self) -> dict[str, str]:
        """File -> text of each module of the engine that mentions a variable of its own."""
        texts = {
            f"{self._source.name}/{path.relative_to(self._source)}": path.read_text(
                encoding="utf-8", errors="replace"
            )
            for path in sorted(self._source.rglob("*.py"))
        }
        return {file: text for file, text in texts.items() if VARIABLE_PREFIX in text}

    def names(self) -> list[str]:
        """Return every variable of the engine's that is alive, declared or read elsewhere."""
        read = {name for text in self._sources.values() for name, _ in variables_read(text)}
        return sorted({*self._declared, *read} - {*self._deprecated})

    def _read_at(self, name: str) -> str | None:
        """Return the first "file:line" where the engine reads ``name`` without the registry."""
        for file, text in self._sources.items():
            if name in text:
                for found, line in variables_read(text):
                    if found == name:
                        return f"{file}:{line}"
        return None

    def verdict(self, name: str, value: str) -> dict[str, Any]:
        """Return whether the engine knows ``name`` and takes ``value`` for it."""
        if name in self._declared:
            declared_at = f"{self._source.name}/environ.py:{self._lines.get(name, 0)}"
            try:
                self._declared[name].parse(value)
            except (ValueError, OSError) as error:
                return {"status": "declared", "where": declared_at, "problem": f"{name}: {error}"}
            return {"status": "declared", "where": declared_at, "problem": None}
        if name in self._deprecated:
            note = self._deprecated[name]
            return {"status": "deprecated", "where": None, "problem": f"{name} is retired. {note}"}
        if where := self._read_at(name):
            return {"status": "read", "where": where, "problem": None}
        return {"status": "unknown", "where": None, "problem": f"nothing reads {name}"}


def variables_read(text: str) -> Iterator[tuple[str, int]]:
    """Yield (name, line) of each ``SGLANG_*`` variable that the Python source reads by itself."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=called, args=[ast.Constant(value=str(name), lineno=line), *_]) if (
                ast.unparse(called).endswith(("environ.get", "getenv", "_env_var"))
            ):
                pass
            case ast.Subscript(
                value=mapping, slice=ast.Constant(value=str(name), lineno=line), ctx=ast.Load()
            ) if ast.unparse(mapping).endswith("environ"):
                pass
            case _:
                continue
        if name.startswith(VARIABLE_PREFIX):
            yield name, line


def _load_alone(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _package() -> Path:
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("sglang is not installed here")
    return Path(next(iter(spec.submodule_search_locations)))


def _stand_in_for_triton(package: Path) -> None:
    """Put the wheel's own triton stand-in in place where triton is not installed.

    The engine imports triton at its top but its parser never runs a kernel. The wheel ships a
    stand-in for machines that have no triton (``sglang/_platform_stubs.py``, meant for Apple
    silicon), which saves a download of 290 MB and 1 GB of disk.
    """
    if importlib.util.find_spec("triton") is not None:
        return
    stubs = _load_alone("_engine_platform_stubs", package / "_platform_stubs.py")
    sys.meta_path.insert(0, stubs._TritonFinder())
    stubs._make_mock("triton")


def _engine_judge(package: Path) -> Judge:
    # Only here, not at the top: the import takes seconds and questions about variables do
    # without it.
    _stand_in_for_triton(package)
    from sglang.srt.server_args import (  # type: ignore[import-not-found,unused-ignore]
        ServerArgs,
    )

    return Judge(ServerArgs.add_cli_args, required=["--model-path", "/model"])


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    package = _package()
    environ = Environ(package / "srt")
    argvs: Mapping[str, Sequence[str]] = request.get("argvs", {})
    environments: Mapping[str, Mapping[str, str]] = request.get("environments", {})
    judge = _engine_judge(package) if argvs else None
    return {
        "engine": {
            "sglang": importlib.metadata.version("sglang"),
            "torch": importlib.metadata.version("torch"),
            "python": platform.python_version(),
        },
        "flags": judge.flags() if judge else [],
        "variables": environ.names() if judge else [],
        "argvs": {name: judge.verdict(argv) for name, argv in argvs.items()} if judge else {},
        "environments": {
            name: {variable: environ.verdict(variable, value) for variable, value in env.items()}
            for name, env in environments.items()
        },
    }


def main() -> None:
    """Answer the request on stdin."""
    # Imports of the engine may print; the answer must be alone on stdout.
    answer_to = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    answer = _answer(json.load(sys.stdin))
    with answer_to:
        json.dump(answer, answer_to, default=repr, sort_keys=True)


if __name__ == "__main__":
    main()
