"""Judgements of measurements that load the machines."""

from __future__ import annotations

from collections.abc import Iterator

from spark_appliance.doctor.checks.common import gib
from spark_appliance.doctor.document import Document, Missing
from spark_appliance.doctor.registry import CHECKS, Facts
from spark_appliance.doctor.result import Verdict, fail, ok, skip, warn
from spark_appliance.model.plan import NodePlan

RAIL_GBITS = 90.0
"""Gb/s of ib_write_bw over one rail; healthy ones give 95 to 112 (NVIDIA playbooks PR#108,
graham33/nixos-dgx-spark, eugr/spark-vllm-docker)."""

WEDGED_GBITS = 25.0
"""Below it the card is in the state that only a full power drain cures (about 13 Gb/s)."""

CLOCK_FAIL = 1000.0
"""MHz under load; latched nodes show 500 to 900 (christopherowen/spark-ds41f)."""

CLOCK_WARN = 1900.0
"""MHz; healthy nodes run 2400, deliberately capped ones 2000 to 2200."""

MEMORY_FAIL = 120.0
"""GB/s read; the slow state shows 55 to 80, healthy nodes 220 to 239 (tonyd2wild #1)."""

MEMORY_WARN = 190.0
"""GB/s read. Our figure, below the healthy range."""


def _measured(facts: Facts, node: NodePlan) -> Document:
    answer = facts.deep.get(node.name)
    if answer is None:
        raise Missing("was not measured")
    if answer.document is None:
        raise Missing(f"was not measured: {answer.error}")
    return answer.document


@CHECKS.node(
    "NET.DFPING",
    level="deep",
    problems=("P07", "P08"),
    means="Full-size packets do not pass: an MTU on the way is smaller than the plan's.",
    do="Set the same MTU on both ends, and on every switch port.",
)
def dfping(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge pings of the full MTU with the don't-fragment bit, on each rail to each peer."""
    del document
    if not node.rails:
        yield ok("no rails")
        return
    names = {(rail.netdev, peer.address): peer.node for rail in node.rails for peer in rail.peers}
    for entry in _measured(facts, node).section("dfping").at("pings").items():
        netdev, address = entry.at("netdev").text(), entry.at("address").text()
        subject = f"{netdev}>{names.get((netdev, address), address)}"
        size, received = entry.at("bytes").integer(), entry.at("received").integer()
        sent = entry.at("sent").integer()
        if entry.at("error").optional():
            yield skip(str(entry.at("error").optional()), subject)
        elif received == sent:
            yield ok(f"{size} bytes", subject)
        elif received:
            yield warn(f"{received} of {sent} packets of {size} bytes", subject)
        else:
            yield fail(f"no packet of {size} bytes gets to {address}", subject)


@CHECKS.cluster(
    "RDMA.BW",
    level="deep",
    problems=("P12", "P14", "P15"),
    means="The rail is slower than it should be although its link looks healthy.",
    do="About half: PCIe x2, see RDMA.PCIE. Else update firmware and compare both ends.",
)
def bandwidth(facts: Facts) -> Iterator[Verdict]:
    """Judge ib_write_bw over each rail, in both directions."""
    if not facts.bandwidth:
        yield skip("was not measured") if any(n.rails for n in facts.plan.nodes) else ok("no rails")
        return
    for run in facts.bandwidth:
        subject = f"{run.client}>{run.server} {run.netdev}"
        if run.gbits is None:
            yield skip(run.error, subject)
        elif run.gbits >= RAIL_GBITS:
            yield ok(f"{run.gbits:.1f} Gb/s", subject)
        elif run.gbits < WEDGED_GBITS:
            yield fail(
                f"{run.gbits:.1f} Gb/s",
                subject,
                means="The ConnectX came up degraded; ethtool and counters do not show it.",
                do="Shut both nodes down, pull mains and QSFP on both ends for a minute.",
            )
        else:
            yield fail(f"{run.gbits:.1f} Gb/s, {RAIL_GBITS:g} wanted", subject)


@CHECKS.node(
    "GPU.CLOCK",
    level="deep",
    problems=("P69",),
    means="The GPU stays slow under load; a power event latches it at 500 to 900 MHz.",
    do="Shut down, remove mains power for 1 to 5 minutes, start again.",
)
def clock(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge the SM clock at the end of a load of two seconds."""
    del document
    mhz = _measured(facts, node).section("gpu_load").at("clock_mhz").number()
    text = f"{mhz:.0f} MHz under load"
    if mhz < CLOCK_FAIL:
        yield fail(text)
    else:
        yield warn(text) if mhz < CLOCK_WARN else ok(text)


@CHECKS.node(
    "GPU.BANDWIDTH",
    level="deep",
    problems=("P70",),
    means="Memory is slow although the clocks look normal: every step takes two to three times.",
    do="Shut down, remove mains power for a minute, start again.",
)
def memory_bandwidth(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge how fast the GPU reads a large buffer."""
    del document
    rate = _measured(facts, node).section("gpu_load").at("read_gbs").number()
    text = f"{rate:.0f} GB/s read"
    if rate < MEMORY_FAIL:
        yield fail(text)
    else:
        yield warn(text) if rate < MEMORY_WARN else ok(text)


@CHECKS.node(
    "GPU.CEILING",
    level="deep",
    problems=("P61",),
    means="CUDA sees less memory than the plan gives the engine: it never starts.",
    do="Lower max-total-tokens and mem-fraction-static; more memory is not to be had by headless.",
)
def ceiling(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Compare the memory that CUDA sees with what the plan needs of it."""
    del document
    total = _measured(facts, node).section("gpu_load").at("total_bytes").integer()
    host_only = ("system", "Engram cache", "head")
    needed = sum(part.bytes for part in node.memory.parts if part.name not in host_only)
    text = f"CUDA sees {gib(total)}, the engine needs {gib(needed)}"
    yield ok(text) if total >= needed else fail(text)
