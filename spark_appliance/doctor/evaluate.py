"""Run the checks of some levels over what is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from spark_appliance.doctor import checks as _filled  # noqa: F401 - fills the registry
from spark_appliance.doctor.document import Missing
from spark_appliance.doctor.registry import CHECKS, Check, Facts
from spark_appliance.doctor.result import Level, Result, Verdict, skip

_SILENT = "nothing to judge in this plan"


def evaluate(
    facts: Facts,
    levels: Sequence[Level],
    *,
    nodes: Sequence[str] | None = None,
    strict: bool = False,
) -> list[Result]:
    """Return the results of every check of the levels, in the order of the registry.

    A check of a node that gave no document fails and says so. ``nodes`` limits the checks of
    single nodes. ``strict`` lets an error inside a check through (for tests); else it becomes a
    failed result of that check.
    """
    results: list[Result] = []
    for check in CHECKS:
        if check.level not in levels:
            continue
        if check.cluster is not None:
            function = check.cluster
            verdicts = _verdicts(lambda f=function: f(facts), strict=strict)  # type: ignore[misc]
            results += [_of_cluster(facts, check, verdict) for verdict in verdicts]
        for node in facts.plan.nodes:
            judge = check.node
            if judge is None or (nodes is not None and node.name not in nodes):
                continue
            answer = facts.answers.get(node.name)
            if answer is None or answer.document is None:
                verdicts = [_unseen(node.name)]
            else:
                verdicts = _verdicts(
                    lambda j=judge, n=node, d=answer.document: j(facts, n, d),  # type: ignore[misc]
                    strict=strict,
                )
            results += [_result(check, node.name, verdict) for verdict in verdicts]
    return results


def _unseen(name: str) -> Verdict:
    return Verdict(
        "fail",
        f"{name} gave no answer",
        means="nothing is known about the node",
        do="see ACCESS.SSH of this node",
    )


def _verdicts(call: Callable[[], Iterable[Verdict]], *, strict: bool) -> list[Verdict]:
    verdicts: list[Verdict] = []
    try:
        for verdict in call():
            verdicts.append(verdict)
    except Missing as missing:
        verdicts.append(skip(str(missing)))
    except Exception as error:
        if strict:
            raise
        verdicts.append(
            Verdict(
                "fail",
                f"the check itself failed: {type(error).__name__}: {error}",
                means="a mistake in spark-appliance; the other checks are not touched by it",
                do="report it with the probe document of the run folder",
            )
        )
    return verdicts or [skip(_SILENT)]


def _of_cluster(facts: Facts, check: Check, verdict: Verdict) -> Result:
    # a subject that is a node's name is the node
    if verdict.subject is not None and facts.plan.node(verdict.subject) is not None:
        return _result(check, verdict.subject, dataclasses.replace(verdict, subject=None))
    return _result(check, None, verdict)


def _result(check: Check, node: str | None, verdict: Verdict) -> Result:
    good = verdict.status in ("ok", "skip")
    return Result(
        check=check.id,
        level=check.level,
        status=verdict.status,
        node=node,
        subject=verdict.subject,
        seen=verdict.seen,
        means="" if good else verdict.means or check.means,
        do="" if good else verdict.do or check.do,
    )
