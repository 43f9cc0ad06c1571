"""The run folder: the plan, every node's answer and the results, and reading it back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from spark_appliance import lockfile
from spark_appliance.doctor.document import Document
from spark_appliance.doctor.examine import base
from spark_appliance.doctor.registry import Answer, Bandwidth, Facts
from spark_appliance.doctor.report import Report, utc
from spark_appliance.errors import InputError, Location, OperationError, read_failure

PLAN = "plan.json"
RESULTS = "results.json"
BANDWIDTH = "bandwidth.json"


def keep(runs: Path, facts: Facts, report: Report, started: float) -> Path:
    """Write a run folder below ``runs`` and return it.

    Raises:
        OperationError: when it cannot be written.
    """
    stamp = utc(started).replace("-", "").replace(":", "")
    try:
        folder = _new(runs, f"{stamp}-doctor")
        lockfile.write(folder / PLAN, lockfile.dump(facts.plan))
        for kind, answers in (("probe", facts.answers), ("deep", facts.deep)):
            for name, answer in answers.items():
                lockfile.write(folder / f"{kind}-{name}.json", _text(_answer(answer)))
        if facts.bandwidth:
            runs_data = [dataclasses.asdict(run) for run in facts.bandwidth]
            lockfile.write(folder / BANDWIDTH, _text(runs_data))
        lockfile.write(folder / RESULTS, _text(report.model_dump(mode="json")))
    except OSError as error:
        raise OperationError(
            f"{runs}: cannot keep the evidence: {error.strerror or error}\n"
            "    remedy: give a folder with --runs, or --no-evidence"
        ) from None
    return folder


def _new(runs: Path, name: str) -> Path:
    runs.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1000):
        folder = runs / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise OSError(f"too many folders named {name}")


def _text(data: Any) -> str:
    return json.dumps(data, indent=1, sort_keys=True) + "\n"


def _answer(answer: Answer) -> dict[str, Any]:
    document = answer.document
    return {
        "sent": answer.sent,
        "received": answer.received,
        "error": answer.error,
        "remedy": answer.remedy,
        "document": None if document is None else document.data,
    }


def recall(folder: Path) -> Facts:
    """Read a run folder back, to judge it again.

    Raises:
        InputError: when it is no run folder of doctor.
    """
    facts = base(lockfile.load(folder / PLAN))
    answers: dict[str, Answer] = {}
    deep: dict[str, Answer] = {}
    for node in facts.plan.nodes:
        for kind, found in (("probe", answers), ("deep", deep)):
            path = folder / f"{kind}-{node.name}.json"
            if path.exists():
                found[node.name] = _recalled(path)
    runs: tuple[Bandwidth, ...] = ()
    if (folder / BANDWIDTH).exists():
        try:
            runs = tuple(Bandwidth(**entry) for entry in _json(folder / BANDWIDTH))
        except TypeError:
            raise _bad(folder / BANDWIDTH) from None
    return dataclasses.replace(facts, answers=answers, deep=deep, bandwidth=runs)


def _recalled(path: Path) -> Answer:
    data = _json(path)
    if not isinstance(data, dict):
        raise _bad(path)
    document = data.get("document")
    times = [data.get("sent"), data.get("received")]
    if not all(isinstance(value, int | float) for value in times):
        raise _bad(path)
    if document is not None and not isinstance(document, dict):
        raise _bad(path)
    return Answer(
        None if document is None else Document(document),
        float(data["sent"]),
        float(data["received"]),
        str(data.get("error", "")),
        str(data.get("remedy", "")),
    )


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise read_failure(path, error) from None
    except (ValueError, RecursionError):
        raise _bad(path) from None


def _bad(path: Path) -> InputError:
    return InputError.one(
        "doctor.bad-evidence",
        "this is no file of a doctor run",
        "give a folder that doctor wrote",
        Location(str(path)),
    )
