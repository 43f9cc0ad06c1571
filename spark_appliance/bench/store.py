"""Result files: written whole or not at all, and read with their mistakes explained."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from pydantic import ValidationError

from spark_appliance import lockfile
from spark_appliance.bench.result import Result
from spark_appliance.errors import InputError, Location, OperationError, Problem, read_failure

_NUMBER_LISTS = re.compile(r"\[\s+(-?[\d.eE+-]+(?:,\s+-?[\d.eE+-]+)*)\s+\]")
_MAX_PROBLEMS = 10


def dumps(result: Result) -> str:
    """Return the file's text: indented, with lists of numbers on one line."""
    text = json.dumps(result.model_dump(mode="json"), indent=1, ensure_ascii=False)
    return _NUMBER_LISTS.sub(lambda m: "[" + " ".join(m[1].split()) + "]", text) + "\n"


def save(result: Result, path: Path) -> None:
    """Write the file in one step, so that a crash leaves the last whole version."""
    write_text(path, dumps(result))


def write_text(path: Path, text: str) -> None:
    """Replace a file's content in one step. Raises OperationError."""
    try:
        lockfile.write(path, text)
    except OSError as error:
        raise OperationError(f"cannot write {path}: {error.strerror or error}") from None


def check_writable(path: Path) -> None:
    """Fail before the measurement rather than after it. Raises InputError."""
    folder = path.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or path.is_dir():
        raise InputError.one(
            "bench.out",
            f"cannot write {path}",
            "name a file in an existing folder of yours",
            Location(str(path)),
        )


def load(path: Path) -> Result:
    """Read a result file. Raises InputError naming every field that is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise read_failure(path, error) from None
    except UnicodeDecodeError:
        raise InputError.one(
            "bench.result", "not text", "give a result of `bench`", Location(str(path))
        ) from None
    try:
        return Result.model_validate_json(text)
    except ValidationError as error:
        problems = [
            Problem(
                "bench.result",
                f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}",
                where=Location(str(path)),
            )
            for e in error.errors()[:_MAX_PROBLEMS]
        ]
        last = problems[-1]
        problems[-1] = Problem(
            last.rule,
            last.message,
            "give a result file of `spark-appliance bench` (see `bench schema`)",
            last.where,
        )
        raise InputError(problems) from None
