"""Checks that need no node: what the cluster file's own rules found, by subject.

The rules are those of ``spark-appliance check``; nothing is decided again here.
"""

from __future__ import annotations

from collections.abc import Iterator

from spark_appliance.doctor.registry import CHECKS, Facts
from spark_appliance.doctor.result import Status, Verdict, fail, ok, warn
from spark_appliance.errors import Problem

_STATUS: dict[str, Status] = {"error": "fail", "warning": "warn", "note": "ok"}

_GROUPS = {
    "topology": "TOPOLOGY",
    "parallel": "PARALLEL",
    "memory": "MEMORY",
    "engine": "ENV",
    "ports": "PORT",
    "weights": "STORAGE",
    "engram": "STORAGE",
    "api": "API",
}


def group_of(rule: str) -> str:
    """Return the check, without its prefix, that tells of a rule; FILE for all others."""
    return _GROUPS.get(rule.partition(".")[0], "FILE")


def _told(facts: Facts, group: str, fine: str) -> Iterator[Verdict]:
    mine = [problem for problem in facts.problems if group_of(problem.rule) == group]
    for problem in mine:
        yield _verdict(problem)
    if not mine:
        yield ok(fine)


def _verdict(problem: Problem) -> Verdict:
    where = f"{problem.where}: " if problem.where else ""
    return Verdict(
        _STATUS.get(problem.severity, "fail"),
        f"{where}{problem.message}",
        subject=problem.rule,
        do=problem.remedy or None,
    )


@CHECKS.cluster(
    "CFG.FILE",
    level="config",
    means="The cluster file or its profile contradicts itself.",
    do="Change the named line of the cluster file; spark-appliance check shows all of them.",
)
def file(facts: Facts) -> Iterator[Verdict]:
    """Tell of nodes, model and profile."""
    yield from _told(facts, "FILE", f"{len(facts.plan.nodes)} nodes, {facts.plan.source.profile}")


@CHECKS.cluster(
    "CFG.TOPOLOGY",
    level="config",
    problems=("P10", "P17"),
    means="Cabling or addresses cannot carry the collectives of this topology.",
    do="Correct topology or addresses; spark-appliance topology draws which cable goes where.",
)
def topology(facts: Facts) -> Iterator[Verdict]:
    """Tell of cables, subnets, twins, ring order and the ring's NCCL."""
    yield from _told(facts, "TOPOLOGY", f"{facts.plan.topology.kind}, cables and subnets agree")


@CHECKS.cluster(
    "CFG.PARALLEL",
    level="config",
    problems=("P90", "P91"),
    means="The model does not split over this many ranks as asked.",
    do="Use the sizes that the message names.",
)
def parallel(facts: Facts) -> Iterator[Verdict]:
    """Tell of TP, EP, head counts and expert widths."""
    plan = facts.plan.parallel
    yield from _told(facts, "PARALLEL", f"TP {plan.tp}, EP {plan.ep}")


@CHECKS.cluster(
    "CFG.MEMORY",
    level="config",
    problems=("P62", "P63", "P76"),
    means="At its worst moment a node has not the memory; the driver then hangs the whole node.",
    do="Turn the knob that the message names.",
)
def memory(facts: Facts) -> Iterator[Verdict]:
    """Tell of weights, KV pool, prefill transient, graphs and the reserve."""
    fullest = max(facts.plan.nodes, key=lambda node: node.memory.used).memory
    used, total = fullest.used / (1 << 30), fullest.total / (1 << 30)
    yield from _told(facts, "MEMORY", f"{used:.1f} of {total:.1f} GiB at the worst moment")


@CHECKS.cluster(
    "CFG.ENV",
    level="config",
    problems=(
        *("P03", "P04", "P05", "P11", "P25", "P35", "P44", "P62", "P64"),
        *("P67", "P68", "P85", "P86", "P88", "P93", "P95", "P97", "P99", "P102"),
    ),
    means="A flag or variable of the engine is known to fail on this hardware.",
    do="Change engine.args or engine.env as the message says.",
)
def engine(facts: Facts) -> Iterator[Verdict]:
    """Tell of engine.args and engine.env."""
    yield from _told(facts, "ENV", "no flag or variable with a known failure")


@CHECKS.cluster(
    "CFG.PORT",
    level="config",
    means="Two services want the same TCP port.",
    do="Give every service its own port.",
)
def port(facts: Facts) -> Iterator[Verdict]:
    """Tell of API, rendezvous, supervisor and NFS ports."""
    ports = facts.plan.ports
    yield from _told(facts, "PORT", f"api {ports.api}, rendezvous {ports.rendezvous}")


@CHECKS.cluster(
    "CFG.STORAGE",
    level="config",
    problems=("P36",),
    means="A node cannot get at the checkpoint or has no place for its Engram rows.",
    do="Correct weights or the node's engram entry.",
)
def storage(facts: Facts) -> Iterator[Verdict]:
    """Tell of the checkpoint's way to the workers and of Engram places."""
    mode = facts.plan.nodes[0].weights.mode
    yield from _told(facts, "STORAGE", f"weights: {mode}, Engram places given")


@CHECKS.cluster(
    "CFG.API",
    level="config",
    means="Others can use the endpoint.",
    do="Give api.key_file, or bind to 127.0.0.1.",
)
def api(facts: Facts) -> Iterator[Verdict]:
    """Tell of the endpoint's address and key."""
    yield from _told(facts, "API", f"{facts.plan.api.bind}:{facts.plan.api.port} with a key file")


@CHECKS.cluster(
    "CFG.PLANES",
    level="config",
    problems=("P20",),
    means="On a ring NCCL advertises two RDMA devices unless it is told more: the second PCIe "
    "plane carries nothing.",
    do="Remove the override of these variables in engine.env.",
)
def planes(facts: Facts) -> Iterator[Verdict]:
    """Judge the variables that make NCCL use more than two devices on a ring."""
    needed = (
        "NCCL_IB_EXTENDED_IPV4_GIDS",
        "NCCL_IB_PRESERVE_PCI_DOMAIN",
        "NCCL_IB_QPS_PER_CONNECTION",
    )
    if facts.plan.topology.kind != "ring":
        yield ok(f"not needed on a {facts.plan.topology.kind}")
        return
    for node in facts.plan.nodes:
        missing = [name for name in needed if node.env.get(name) != "1"]
        if missing and len(node.rails) > 2:
            yield warn(f"{len(node.rails)} rails but not 1: {', '.join(missing)}", node.name)
            return
    yield ok("all rails are advertised")


@CHECKS.cluster(
    "CFG.LOCK",
    level="config",
    means="The nodes would be set up from a plan that does not follow from the cluster file.",
    do="Run spark-appliance render and look at the difference.",
)
def lock(facts: Facts) -> Iterator[Verdict]:
    """Compare the plan file beside the cluster file with the plan rendered now."""
    if facts.lock_state == "stale":
        yield fail("cluster.lock.json does not follow from the cluster file")
    elif facts.lock_state == "absent":
        yield warn("there is no cluster.lock.json beside the cluster file")
    else:
        yield ok("cluster.lock.json is up to date")
