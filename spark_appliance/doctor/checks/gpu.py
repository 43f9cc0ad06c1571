"""GPU: driver, other users, throttling."""

from __future__ import annotations

from collections.abc import Iterator

from spark_appliance.doctor.checks.common import all_ok, engine_runs
from spark_appliance.doctor.document import Document
from spark_appliance.doctor.registry import CHECKS, Facts
from spark_appliance.doctor.result import Verdict, fail, ok, skip, warn
from spark_appliance.model.plan import NodePlan

PROVEN_DRIVERS = ("580.",)
"""580.173.02 and 580.178.04 serve in the field; 595.84 is mixed, 610 fails with 64K pages."""

# nvmlClocksEventReasons (nvml.h)
_REASONS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


@CHECKS.node(
    "GPU.DRIVER",
    means="The engine cannot use the GPU, or the driver is not one that is known to serve.",
    do="Install driver 580 (open kernel modules); nvidia-smi must answer.",
)
def driver(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge whether the driver is loaded, answers, and is a known one."""
    del facts, node
    section = document.section("gpu")
    if not section.at("driver").present:
        yield fail(
            section.at("errors", "driver").optional() or section.at("driver", "version").text()
        )
        return
    version = section.at("driver", "version").text()
    if not section.at("gpus").present or not section.at("gpus").items():
        reason = section.at("errors", "gpus").optional() or "nvidia-smi lists no GPU"
        yield fail(f"driver {version} is loaded, but {reason}")
        return
    name = section.at("gpus", 0, "name").optional()
    if version.startswith(PROVEN_DRIVERS):
        yield ok(f"{version}, {name}")
    else:
        yield warn(f"{version}, {name}: not proven with this engine")


@CHECKS.node(
    "GPU.IDLE",
    means="Another program holds memory of the GPU, which is the same memory as the CPU's.",
    do="Stop the named program.",
)
def idle(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge who computes on the GPU besides the engine."""
    del facts, node
    section = document.section("gpu")
    apps = section.at("apps").items()

    def foreign() -> Iterator[Verdict]:
        for entry in apps:
            unit = entry.at("unit").optional() or ""
            if unit.startswith("spark-") or engine_runs(document):
                continue
            who = f"{entry.at('name').optional()} (pid {entry.at('pid').integer()})"
            yield fail(f"{who} {unit}".rstrip(), str(entry.at("pid").integer()))

    yield from all_ok(foreign(), "no other program computes")


@CHECKS.node(
    "GPU.STATE",
    problems=("P71",),
    means="The GPU slows itself down: heat or power. It can switch the node off under load.",
    do="Give it air; cap the clock: nvidia-smi -lgc 0,2200. After a power event: GPU.CLOCK.",
)
def state(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge the driver's reasons for lower clocks."""
    del facts, node
    text = next(iter(document.section("gpu").at("reasons").texts()), "")
    try:
        mask = int(text, 16)
    except ValueError:
        yield skip(f"the driver does not tell ({text or 'nothing'})")
        return
    reasons = [name for bit, name in _REASONS.items() if mask & bit]
    yield warn(", ".join(reasons)) if reasons else ok(f"no slowdown ({text})")


@CHECKS.node(
    "GPU.POLLERS",
    problems=("P75",),
    means="A program polls the GPU: every two seconds cost 0.6 ms a step.",
    do="Stop it, or let it ask every 10 s at most.",
)
def pollers(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge programs that poll the driver."""
    del facts, node
    named = document.section("memory").at("named")

    def found() -> Iterator[Verdict]:
        for name, count in named.entries():
            if count.integer():
                yield warn(f"{name} runs ({count.integer()})", name)

    yield from all_ok(found(), "none")
