"""The whole cluster at a glance: one answer a node, put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from spark_appliance import lockfile
from spark_appliance.errors import OperationError
from spark_appliance.fleet.crew import Crew
from spark_appliance.fleet.report import Report, ask
from spark_appliance.model.plan import NodePlan
from spark_appliance.names import ENGINE, PACK

STATUS_VERSION: Final = 1
WATCH_SECONDS: Final = 10.0
"""Asking nvidia-smi every 2 s cost 0.6 ms a step (field notes 6.3)."""

_EDITED: Final = {"create": "is missing", "chmod": "has another mode"}
"""Words for what installing would do to a file of ours (``Change`` of the node's generations)."""

_PUT_BACK: Final = "spark-appliance install --adopt puts it back"

_TOKENS: Final = ("tokens_per_second", "running", "waiting", "kv_use", "accept_length")


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node: its report, or why there is none; ``drift`` from the plan; ``troubles``."""

    node: NodePlan
    report: Report | None
    error: str | None
    drift: tuple[str, ...]
    troubles: tuple[str, ...]

    @property
    def state(self) -> str:
        """One word: gone, failed, serving, starting, stopped."""
        if self.report is None:
            return "gone"
        if self.report.failed_units:
            return "failed"
        if self.report.ready or (
            self.node.rank != 0
            and self.report.unit(ENGINE) == "active"
            and self.report.part("engine", "health") == 200
        ):
            return "serving"
        if self.report.unit(ENGINE) in ("active", "activating"):
            return "starting"
        return "stopped"


@dataclass(frozen=True, slots=True)
class Overview:
    """The cluster."""

    name: str
    url: str
    nodes: tuple[NodeStatus, ...]

    @property
    def ready(self) -> bool:
        """Whether the endpoint serves."""
        return bool(self.nodes) and self.nodes[0].report is not None and self.nodes[0].report.ready

    @property
    def good(self) -> bool:
        """Whether it serves and nothing is wrong on any node."""
        return self.ready and all(
            node.report is not None and not node.drift and not node.report.failed_units
            for node in self.nodes
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain data, version 1: docs/operate.md describes it."""
        head = self.nodes[0].report if self.nodes else None
        return {
            "version": STATUS_VERSION,
            "cluster": self.name,
            "url": self.url,
            "ready": self.ready,
            "good": self.good,
            "engine": {name: head.metric(name) if head else None for name in _TOKENS},
            "nodes": [
                {
                    "name": item.node.name,
                    "rank": item.node.rank,
                    "state": item.state,
                    "error": item.error,
                    "drift": list(item.drift),
                    "troubles": list(item.troubles),
                    "report": item.report.data if item.report else None,
                }
                for item in self.nodes
            ],
        }


def look(crew: Crew, *, gpu: bool = True) -> Overview:
    """Ask every node once; a node that does not answer is part of the result."""
    reports, failures = crew.gather(lambda remote: ask(remote, gpu=gpu))
    nodes = tuple(
        _status(
            remote.plan,
            reports.get(remote.name),
            failures.get(remote.name),
            lockfile.own_sha256(crew.plan, remote.name),
        )
        for remote in crew
    )
    return Overview(crew.plan.name, crew.plan.api.url, nodes)


def _status(
    node: NodePlan, report: Report | None, error: OperationError | None, wanted: str
) -> NodeStatus:
    if report is None:
        text = str(error).removeprefix(f"{node.name}: ") if error else ""
        return NodeStatus(node, None, text, (), ())
    return NodeStatus(node, report, None, tuple(_drift(node, report, wanted)), _troubles(report))


def _drift(node: NodePlan, report: Report, wanted: str) -> list[str]:
    found = []
    if report.plan != wanted:
        found.append("the node has another plan")
    if report.running_plan not in (None, report.plan):
        found.append("runs an older plan: spark-appliance restart")
    for file in report.part("edited") or []:
        change = _EDITED.get(str(file.get("change")), "was edited")
        found.append(f"{file.get('path')} {change}: {_PUT_BACK}")
    version, confirmed = (
        report.part("versions", "generation"),
        report.part("versions", "confirmed"),
    )
    if version is not None and version != confirmed:
        found.append(f"generation {version} is on trial, {confirmed} is confirmed")
    for rail in report.part("status", "rails") or []:
        missing = rail.get("missing") or []
        if missing:
            found.append(f"{rail.get('netdev')}: {', '.join(map(str, missing))}")
    files = report.part("status", "engram") or []
    bad = [str(file.get("name")) for file in files if not file.get("good")]
    if bad and report.unit(PACK) not in ("activating",):
        found.append(f"not packed: {', '.join(bad)}")
    if node.engram is not None and not files:
        found.append("not packed")
    return found


def _troubles(report: Report) -> tuple[str, ...]:
    failed = [f"{unit} failed" for unit in report.failed_units]
    problems = [str(problem) for problem in report.part("status", "problems") or []]
    return (*failed, *problems)
