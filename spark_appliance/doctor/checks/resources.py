"""Memory, swap, disks: what has to be free before a start."""

from __future__ import annotations

from collections.abc import Iterator

from spark_appliance.doctor.checks.common import GIB, all_ok, engine_runs, gib
from spark_appliance.doctor.document import Document
from spark_appliance.doctor.registry import CHECKS, Facts
from spark_appliance.doctor.result import Verdict, fail, ok, skip, warn
from spark_appliance.model.plan import NodePlan

HIGH_ORDER = 9
"""Order of the blocks that the driver needs: 2 MiB of 4 KiB pages."""

HIGH_BLOCKS_BYTES = 1 << 30
"""At least this much in such blocks. With none the driver fails while MemAvailable looks fine
(FujitsuPolycom/sparkring #173); the figure is ours."""

CACHE_BYTES = 20 << 30
"""Free for compiled kernels, logs and crash dumps of the engine. Our figure."""

SWAP_BYTES = 2 << 30
"""A larger swap let a node thrash for hours (graphistry/pygraphistry PR#1671). Our figure."""


@CHECKS.node(
    "HOST.MEM_AVAILABLE",
    problems=("P54", "P59", "P60", "P65", "P106"),
    means="The load would run out of memory part of the way, or the driver would hang the node.",
    do="Stop what takes the memory; sync; echo 3 > /proc/sys/vm/drop_caches; else reboot.",
)
def mem_available(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Compare MemAvailable with the plan's budget; CUDA's own figure counts the page cache."""
    del facts
    meminfo = document.section("memory").at("meminfo")
    total, available = meminfo.at("MemTotal").integer(), meminfo.at("MemAvailable").integer()
    if engine_runs(document):
        floor = node.guard.steady_bytes
        yield (
            ok(f"{gib(available)} while the engine runs")
            if available >= floor
            else fail(f"{gib(available)} while the engine runs, the guard's limit is {gib(floor)}")
        )
        return
    system = sum(part.bytes for part in node.memory.parts if part.name == "system")
    needed = node.memory.used - system + node.memory.reserve
    if total + system // 4 < node.memory.total:
        yield fail(
            f"the node has {gib(total)}, the plan reckons with {gib(node.memory.total)}", "total"
        )
    if available < needed:
        users = (
            ", ".join(
                f"{entry.at('name').optional()} {gib(entry.at('resident').integer())}"
                for entry in document.section("memory").at("large").items()[:3]
            )
            if document.section("memory").at("large").present
            else ""
        )
        yield fail(
            f"{gib(available)} available, {gib(needed)} needed"
            + (f"; largest: {users}" if users else "")
        )
    else:
        yield ok(f"{gib(available)} available, {gib(needed)} needed")


@CHECKS.node(
    "HOST.BUDDY",
    problems=("P58",),
    means="Memory is free but in small pieces: the driver fails with NV_ERR_NO_MEMORY.",
    do="echo 1 > /proc/sys/vm/compact_memory; if that does not help, reboot before serving.",
)
def buddy(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge the free blocks of high order."""
    del facts, node
    if engine_runs(document):
        yield skip("the engine holds the memory")
        return
    page = document.section("system").at("page_size").integer()
    # the same 2 MiB with pages of 64 KiB
    order = HIGH_ORDER if page == 4096 else max(0, HIGH_ORDER - (page // 4096).bit_length() + 1)
    size = 0
    for zone in document.section("memory").at("buddyinfo").items():
        for index, count in enumerate(zone.at("free").items()):
            if index >= order:
                size += count.integer() * page << index
    yield (
        ok(f"{gib(size)} in blocks of 2 MiB or more")
        if size >= HIGH_BLOCKS_BYTES
        else fail(f"{gib(size)} in blocks of 2 MiB or more")
    )


@CHECKS.node(
    "HOST.SWAP",
    problems=("P59",),
    means="With swap an over-full node thrashes for hours instead of failing at once.",
    do="swapoff -a and take it out of /etc/fstab.",
)
def swap(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge the swap space."""
    del facts, node
    areas = document.section("memory").at("swaps").items()
    size = sum(area.at("size").integer() for area in areas)
    used = sum(area.at("used").integer() for area in areas)
    if size > SWAP_BYTES:
        yield warn(f"{gib(size)} of swap, {gib(used)} used")
    else:
        yield ok(f"{gib(size)} of swap" if size else "no swap")


@CHECKS.node(
    "HOST.THP",
    means="Huge pages on demand split and merge memory while the driver wants large blocks.",
    do="echo madvise > /sys/kernel/mm/transparent_hugepage/enabled.",
)
def thp(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge transparent huge pages (christopherowen/spark-ds41f keeps them off)."""
    del facts, node
    chosen = document.section("memory").at("thp").text()
    yield warn("set to always") if chosen == "always" else ok(chosen)


@CHECKS.node(
    "HOST.DISK",
    problems=("P68",),
    means="Compiled kernels and logs have no room; every start compiles again.",
    do="Free space on the named file system.",
)
def disk(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge the space for the engine's cache directory and for the system."""
    del facts
    free = document.section("disks").at("free")

    def short() -> Iterator[Verdict]:
        space = free.at(node.cache_directory, "free").integer()
        if space < CACHE_BYTES:
            yield fail(f"{gib(space)} for {node.cache_directory}, {gib(CACHE_BYTES)} needed")
        root = free.at("/", "free").integer()
        if root < GIB:
            yield fail(f"{gib(root)} on /", "/")

    yield from all_ok(short(), f"{gib(free.at(node.cache_directory, 'free').integer())} for caches")
