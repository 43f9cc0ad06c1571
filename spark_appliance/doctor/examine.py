"""From a plan to facts: ask the nodes, and, when wanted, measure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from spark_appliance import lockfile
from spark_appliance.doctor import bandwidth
from spark_appliance.doctor.checks.common import engine_runs
from spark_appliance.doctor.collect import DEEP_DEADLINE, PROBE_DEADLINE, Tell, collect, quiet
from spark_appliance.doctor.program import DEEP_MODULES, PROBE_MODULES, program
from spark_appliance.doctor.registry import Facts
from spark_appliance.doctor.request import request
from spark_appliance.errors import InputError, Problem
from spark_appliance.model.plan import NodePlan, Plan
from spark_appliance.ssh import Host

GPU_BYTES: Final = 2 << 30
"""Buffer that the bandwidth probe reads: many times the caches of GB10."""

GPU_SECONDS: Final = 2.0
"""Length of the load before the clock is read (christopherowen/spark-ds41f)."""


def base(plan: Plan, problems: Sequence[Problem] = (), lock: Path | None = None) -> Facts:
    """Return what is known without any node. ``lock`` is the plan file beside the cluster file."""
    text = lockfile.dump(plan)
    state = "same"
    if lock is not None:
        try:
            state = "same" if lock.read_text(encoding="utf-8") == text else "stale"
        except FileNotFoundError:
            state = "absent"
        except (OSError, UnicodeDecodeError):
            state = "stale"
    return Facts(
        plan=plan,
        problems=tuple(problems),
        lock_state=state,
        plan_sha256={node.name: lockfile.own_sha256(plan, node.name) for node in plan.nodes},
    )


def hosts(plan: Plan, nodes: Sequence[str] | None = None) -> dict[str, Host]:
    """Return the SSH hosts of the named nodes, of all by default.

    Raises:
        InputError: for a name that is not in the plan.
    """
    for name in nodes or ():
        if plan.node(name) is None:
            raise InputError.one(
                "doctor.unknown-node",
                f"there is no node {name} in the plan",
                f"use one of {', '.join(node.name for node in plan.nodes)}",
            )
    return {
        node.name: Host(node.ssh)
        for node in plan.nodes
        if nodes is None or not nodes or node.name in nodes
    }


def examine(
    facts: Facts,
    where: Mapping[str, Host],
    *,
    deadline: float = PROBE_DEADLINE,
    tell: Tell = quiet,
) -> Facts:
    """Ask the nodes and return the facts with their answers."""
    programs = {
        node.name: program(PROBE_MODULES, request(facts.plan, node))
        for node in facts.plan.nodes
        if node.name in where
    }
    answers = collect(where, programs, deadline=deadline, tell=tell)
    return dataclasses.replace(facts, answers={**facts.answers, **answers})


def obstacle(facts: Facts) -> str | None:
    """Return why nothing may be measured now, None when it may."""
    running = [name for name, document in facts.documents().items() if engine_runs(document)]
    if running:
        return f"the engine runs on {', '.join(running)}: measuring would disturb it"
    if not facts.documents():
        return "no node gave an answer"
    return None


def measure(
    facts: Facts,
    where: Mapping[str, Host],
    *,
    tell: Tell = quiet,
    step: Callable[[str], None] = bandwidth.quiet,
) -> Facts:
    """Load the machines: pings of full size, GPU clock and memory, then every rail.

    Only nodes that gave an answer are measured.
    """
    reached = {name: host for name, host in where.items() if name in facts.documents()}
    programs = {
        node.name: program(DEEP_MODULES, deep_request(node))
        for node in facts.plan.nodes
        if node.name in reached
    }
    step("full-size pings and GPU load on all nodes")
    deep = collect(reached, programs, deadline=DEEP_DEADLINE, tell=tell)
    facts = dataclasses.replace(facts, deep=deep)
    return dataclasses.replace(facts, bandwidth=bandwidth.measure(facts, reached, step))


def deep_request(node: NodePlan) -> dict[str, object]:
    """Return the request of the measuring program for one node."""
    return {
        "node": node.name,
        "dfping": [
            {"netdev": rail.netdev, "address": peer.address, "mtu": rail.mtu}
            for rail in node.rails
            for peer in rail.peers
        ],
        "gpu_bytes": GPU_BYTES,
        "gpu_seconds": GPU_SECONDS,
    }
