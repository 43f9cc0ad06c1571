"""Open a cluster file from disk and take it as far as it goes: parse, validate, render."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from spark_appliance.errors import InputError, Location, Problem
from spark_appliance.files import read_bounded
from spark_appliance.memory import Budget
from spark_appliance.model.cluster import Cluster, System, read_cluster
from spark_appliance.model.findings import Finding
from spark_appliance.model.plan import Plan
from spark_appliance.model.yamlfile import MAX_BYTES, Document, lines_sha256, parse
from spark_appliance.profiles import LoadedProfile, load_profile
from spark_appliance.render import render
from spark_appliance.topology.drawing import Drawing


@dataclass(frozen=True, slots=True)
class Opened:
    """A cluster file and everything that could be found out about it."""

    path: Path
    cluster: Cluster
    plan: Plan | None
    budgets: tuple[Budget, ...]
    problems: tuple[Problem, ...]
    drawing: Drawing | None

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems that stop a plan."""
        return tuple(problem for problem in self.problems if problem.severity == "error")

    def require_plan(self) -> Plan:
        """Return the plan.

        Raises:
            InputError: with every error, when there is none.
        """
        if self.plan is None:
            raise InputError(self.errors)
        return self.plan

    def require_drawing(self) -> Drawing:
        """Return what can be drawn, which does not need memory to suffice.

        Raises:
            InputError: with every error, when the cabling is wrong.
        """
        if self.drawing is None:
            raise InputError(self.errors)
        return self.drawing


def open_cluster(path: Path, system: System | None = None) -> Opened:
    """Read and render one cluster file, as if all its nodes ran ``system`` where that is given.

    Raises:
        InputError: when the file cannot be read, is no valid YAML or breaks the schema; then
            nothing further can be said. Later findings are returned in ``problems``.
    """
    try:
        raw = read_bounded(path, MAX_BYTES)
    except InputError as error:
        if path.exists() or path.is_symlink():
            raise
        raise InputError.one(
            "file.unreadable",
            f"there is no cluster file {path}",
            "give its path, or write one: spark-appliance init > cluster.yaml",
            Location(str(path)),
        ) from error
    document = parse(str(path), raw)
    cluster, findings = read_cluster(document.data)
    if cluster is None:
        raise InputError([document.problem(finding) for finding in findings])
    if system is not None:
        nodes = [node.model_copy(update={"system": system}) for node in cluster.nodes]
        cluster = cluster.model_copy(update={"nodes": nodes})
    try:
        loaded = load_profile(cluster.profile, path.parent)
    except InputError as error:
        where = document.locate(("profile",))
        raise InputError(
            [
                Problem(problem.rule, problem.message, problem.remedy, where)
                if problem.where is None or problem.rule.startswith("file.")
                else problem
                for problem in error.problems
            ]
        ) from None
    rendering = render(cluster, loaded)
    problems = sorted(
        (_placed(finding, document, loaded) for finding in rendering.findings),
        key=lambda problem: (
            ("error", "warning", "note").index(problem.severity),
            (problem.where.line or 0) if problem.where else 0,
        ),
    )
    plan = rendering.plan
    if plan is not None:
        source = plan.source.model_copy(update={"cluster_lines_sha256": lines_sha256(raw)})
        plan = plan.model_copy(update={"source": source})
    return Opened(path, cluster, plan, rendering.budgets, tuple(problems), rendering.drawing)


def _placed(finding: Finding, document: Document, loaded: LoadedProfile) -> Problem:
    """Give a finding its line: in the cluster file, or in the user's profile if that says it."""
    profile, path = loaded.document, finding.path[1:]
    if (
        profile is not None
        and finding.path[:1] in (("profile",), ("engine",))
        and finding.path not in document.places
        and path in profile.places
        and path
    ):
        return profile.problem(replace(finding, path=path))
    return document.problem(finding, absent=("profile",))
