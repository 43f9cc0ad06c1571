"""The table of checks. A check is a small function over the plan and the documents."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from spark_appliance.doctor.document import Document
from spark_appliance.doctor.result import Level, Verdict
from spark_appliance.errors import Problem
from spark_appliance.model.plan import NodePlan, Plan


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back from a node: a document, or the reason why there is none.

    ``sent`` and ``received`` are the control machine's clock around the session, Unix seconds.
    """

    document: Document | None
    sent: float = 0.0
    received: float = 0.0
    error: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """One run of ib_write_bw over one rail: ``gbits`` is the average in Gb/s, None: it failed."""

    client: str
    server: str
    netdev: str
    gbits: float | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that checks may look at.

    ``lock_state`` is that of the plan file beside the cluster file: absent, same or stale.
    ``plan_sha256`` is, by node, that of the node's own plan. ``deep`` and ``bandwidth`` are
    measurements.
    """

    plan: Plan
    answers: Mapping[str, Answer] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    lock_state: str = "absent"
    plan_sha256: Mapping[str, str] = field(default_factory=dict)
    deep: Mapping[str, Answer] = field(default_factory=dict)
    bandwidth: tuple[Bandwidth, ...] = ()

    def documents(self) -> dict[str, Document]:
        """Return the documents there are, in rank order."""
        found = {}
        for node in self.plan.nodes:
            answer = self.answers.get(node.name)
            if answer is not None and answer.document is not None:
                found[node.name] = answer.document
        return found


NodeCheck = Callable[[Facts, NodePlan, Document], Iterable[Verdict]]
ClusterCheck = Callable[[Facts], Iterable[Verdict]]


@dataclass(frozen=True, slots=True)
class Check:
    """A registered check.

    ``problems`` are rows of the catalogue (``P08``) that it catches; ``means`` and ``do`` are its
    words for a result that is not ok. Exactly one of ``node`` and ``cluster`` is set.
    """

    id: str
    level: Level
    problems: tuple[str, ...]
    means: str
    do: str
    node: NodeCheck | None = None
    cluster: ClusterCheck | None = None


_ID: Final = re.compile(r"[A-Z]+\.[A-Z][A-Z_]*")


class Registry:
    """Checks by id, in the order of registration."""

    def __init__(self) -> None:
        self._checks: dict[str, Check] = {}

    def _add(self, check: Check) -> None:
        if not _ID.fullmatch(check.id) or check.id in self._checks:
            raise ValueError(f"bad or repeated check id {check.id}")
        self._checks[check.id] = check

    def node(
        self,
        check_id: str,
        *,
        means: str,
        do: str,
        level: Level = "probe",
        problems: Iterable[str] = (),
    ) -> Callable[[NodeCheck], NodeCheck]:
        """Register a check that judges one node by its document."""

        def register(function: NodeCheck) -> NodeCheck:
            self._add(Check(check_id, level, tuple(problems), means, do, node=function))
            return function

        return register

    def cluster(
        self,
        check_id: str,
        *,
        means: str,
        do: str,
        level: Level = "probe",
        problems: Iterable[str] = (),
    ) -> Callable[[ClusterCheck], ClusterCheck]:
        """Register a check that judges the plan or several nodes at once."""

        def register(function: ClusterCheck) -> ClusterCheck:
            self._add(Check(check_id, level, tuple(problems), means, do, cluster=function))
            return function

        return register

    def __iter__(self) -> Iterator[Check]:
        return iter(self._checks.values())

    def get(self, id: str) -> Check | None:  # noqa: A002
        """Return a check by id, None for an unknown one."""
        return self._checks.get(id)


CHECKS: Final = Registry()
"""Filled by importing ``spark_appliance.doctor.checks``."""
