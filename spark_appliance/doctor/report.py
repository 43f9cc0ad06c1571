"""The report as data: what ``--json`` prints and the run folder keeps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from spark_appliance import __version__
from spark_appliance.doctor.registry import CHECKS, Facts
from spark_appliance.doctor.result import Level, Result, Status

REPORT_VERSION: Literal[1] = 1


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NodeReport(_Model):
    """How a node was reached."""

    name: str
    destination: str = Field(description="What was given to ssh.")
    answered: bool
    seconds: float | None = Field(description="Length of the session; null when not asked.")
    error: str | None = Field(description="Why there is no answer.")


class ResultReport(_Model):
    """One result of one check."""

    check: str = Field(description="Stable id; never renamed or used again.")
    level: Level
    status: Status = Field(
        description="fail stops a boot; skip: it could not be judged, 'seen' says why."
    )
    node: str | None = Field(description="null: the result is about the cluster.")
    subject: str | None = Field(description="What the result is about, where a check has several.")
    seen: str = Field(description="What was found.")
    means: str = Field(description="What that means; empty for ok and skip.")
    do: str = Field(description="What to do; empty for ok and skip.")
    problems: list[str] = Field(description="Rows of docs/problems.md that the check catches.")


class Report(_Model):
    """What ``spark-appliance doctor --json`` prints."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, title="spark-appliance doctor report, version 1"
    )

    version: Literal[1] = REPORT_VERSION
    program: str = Field(description="Version of spark-appliance.")
    cluster: str = Field(description="Name of the cluster.")
    file: str = Field(description="The file that was given.")
    started: str = Field(description="UTC, ISO 8601.")
    levels: list[Level]
    verdict: Literal["ok", "warn", "fail"] = Field(description="The worst status; skip is ok.")
    counts: dict[Status, int]
    nodes: list[NodeReport]
    results: list[ResultReport]


def utc(seconds: float) -> str:
    """Return Unix seconds as UTC, ISO 8601."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def make_report(
    facts: Facts, results: Sequence[Result], *, file: str, started: float, levels: Sequence[Level]
) -> Report:
    """Build the report of a run."""
    counts: dict[Status, int] = {"ok": 0, "warn": 0, "fail": 0, "skip": 0}
    for result in results:
        counts[result.status] += 1
    nodes = []
    for node in facts.plan.nodes:
        answer = facts.answers.get(node.name)
        nodes.append(
            NodeReport(
                name=node.name,
                destination=node.ssh,
                answered=answer is not None and answer.document is not None,
                seconds=None if answer is None else round(answer.received - answer.sent, 3),
                error=(answer.error or None) if answer is not None else None,
            )
        )
    return Report(
        program=__version__,
        cluster=facts.plan.name,
        file=file,
        started=utc(started),
        levels=list(levels),
        verdict="fail" if counts["fail"] else "warn" if counts["warn"] else "ok",
        counts=counts,
        nodes=nodes,
        results=[_result(result) for result in results],
    )


def _result(result: Result) -> ResultReport:
    check = CHECKS.get(result.check)
    return ResultReport(
        check=result.check,
        level=result.level,
        status=result.status,
        node=result.node,
        subject=result.subject,
        seen=result.seen,
        means=result.means,
        do=result.do,
        problems=list(check.problems) if check is not None else [],
    )


def report_schema() -> str:
    """Return the JSON Schema of the report as text (docs/doctor.schema.json)."""
    document = Report.model_json_schema(mode="serialization")
    document["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(document, indent=2, sort_keys=True) + "\n"
