"""Did the nodes answer, are they the ones that are meant, and could they look everywhere."""

from __future__ import annotations

from collections.abc import Iterator

from spark_appliance.doctor.checks.common import all_ok
from spark_appliance.doctor.document import Document, Missing
from spark_appliance.doctor.registry import CHECKS, Facts
from spark_appliance.doctor.result import Verdict, fail, ok, skip, warn
from spark_appliance.model.plan import NodePlan

CLOCK_WARN = 2.0
"""Seconds; logs of several nodes can no longer be read side by side. Our figure."""

CLOCK_FAIL = 30.0
"""Seconds; signed messages and certificates may be refused. Our figure."""


@CHECKS.cluster(
    "ACCESS.SSH",
    means="Nothing can be done on a node that cannot be reached.",
    do="Make 'ssh DESTINATION true' work without a question.",
)
def ssh(facts: Facts) -> Iterator[Verdict]:
    """Judge whether every node answered."""
    for node in facts.plan.nodes:
        answer = facts.answers.get(node.name)
        if answer is None:
            yield skip("was not asked", node.name)
        elif answer.document is None:
            yield fail(f"{node.ssh}: {answer.error}", node.name, do=answer.remedy or None)
        else:
            seconds = answer.received - answer.sent
            yield ok(f"{node.ssh} answered in {seconds:.1f} s", node.name)


@CHECKS.node(
    "ACCESS.PROBE",
    means="Something on the node hangs (often a dead NFS server): what depends on it is unknown.",
    do="Look on the node at what is named; for a hung mount: umount -f -l PATH.",
)
def probe(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge whether every section of the probe came to its end."""
    del facts, node
    sections = document.top.at("sections")

    def late() -> Iterator[Verdict]:
        for name, _ in sections.entries():
            section = document.section(name)
            if not section.at("errors").present:
                yield fail("the section is not in the answer", name)
                continue
            for key, text in section.at("errors").entries():
                reason = text.optional() or ""
                if reason.startswith(("no answer within", "not started within")):
                    what = name if key == "*" else f"{name}.{key}"
                    yield fail(f"{what}: {reason}", name)
                elif key == "*":
                    yield warn(f"{name}: {reason}", name, means="A mistake in the probe.")

    yield from all_ok(late(), f"{sum(1 for _ in sections.entries())} sections")


@CHECKS.node(
    "ACCESS.ROOT",
    means="Without root some facts stay unknown (kernel log, firewall, owners of ports, files "
    "of other users), and nothing can be installed.",
    do="Use a login that is root, or allow it sudo without a password.",
)
def root(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge whether the probe ran as root."""
    del facts
    uid = document.top.at("uid").integer()
    yield ok("root") if uid == 0 else warn(f"{node.ssh} has user id {uid}, no sudo")


@CHECKS.cluster(
    "ACCESS.DISTINCT",
    means="Two names of the plan lead to the same machine.",
    do="Correct nodes.address or nodes.ssh, or the ssh_config alias.",
)
def distinct(facts: Facts) -> Iterator[Verdict]:
    """Judge whether all nodes are different machines."""
    seen: dict[str, str] = {}
    clashes = []
    for name, document in facts.documents().items():
        try:
            boot = document.section("system").at("boot_id").text()
        except Missing as missing:
            yield skip(str(missing), name)
            continue
        if boot in seen:
            clashes.append((seen[boot], name))
        seen.setdefault(boot, name)
    for first, second in clashes:
        yield fail(f"{first} and {second} have booted as one: same boot id", second)
    if not clashes and seen:
        yield ok(f"{len(seen)} different machines")


@CHECKS.node(
    "ACCESS.NAME",
    means="The machine calls itself something else than the plan; two nodes may be exchanged.",
    do="Compare with the cabling, then rename the host or correct the cluster file.",
)
def name(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Compare the host name with the plan's."""
    others = {other.name for other in facts.plan.nodes} - {node.name}
    host = document.section("system").at("hostname").text().split(".")[0]
    if host == node.name:
        yield ok(host)
    elif host in others:
        yield fail(f"the host name is {host}, which is another node of the plan")
    else:
        yield warn(f"the host name is {host}")


@CHECKS.node(
    "ACCESS.CLOCK",
    means="Clocks that differ make logs unreadable and signed requests fail.",
    do="Start a time service: timedatectl set-ntp true.",
)
def clock(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Compare the node's clock with the control machine's.

    The probe ran between two instants of the control machine, so the offset lies between
    ``ended - received`` and ``started - sent``.
    """
    answer = facts.answers[node.name]
    low = document.top.at("ended").number() - answer.received
    high = document.top.at("started").number() - answer.sent
    least = low if low > 0 else -high if high < 0 else 0.0
    direction = "ahead" if low > 0 else "behind"
    if least > CLOCK_FAIL:
        yield fail(f"{least:.0f} s {direction} of this machine")
    elif least > CLOCK_WARN:
        yield warn(f"{least:.1f} s {direction} of this machine")
    else:
        yield ok(f"within {max(abs(low), abs(high)):.1f} s of this machine")
    synchronised = document.section("clock").at("timedatectl", "NTPSynchronized").optional()
    if synchronised == "no":
        yield warn("not synchronised with a time server", "ntp")
