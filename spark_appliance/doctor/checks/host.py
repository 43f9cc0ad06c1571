"""Kernel, firmware, limits, services, watchdog: the operating system under the engine."""

from __future__ import annotations

import re
from collections.abc import Iterator

from spark_appliance.doctor.checks.common import (
    CONTAINER,
    all_ok,
    engine_runs,
    installed,
    listed,
    values,
)
from spark_appliance.doctor.document import Document, Missing
from spark_appliance.doctor.registry import CHECKS, Facts
from spark_appliance.doctor.request import DISPLAY_UNITS, PLAN_FILE, UNWANTED_UNITS
from spark_appliance.doctor.result import Verdict, fail, ok, skip, warn
from spark_appliance.model.plan import NodePlan
from spark_appliance.names import ENGINE, TARGET

_UNLIMITED = re.compile(r"--ulimit[= ]memlock=(-1|unlimited)")


@CHECKS.node(
    "HOST.ARCH",
    means="The engine and its kernels are built for aarch64.",
    do="Check nodes.address: this is no DGX Spark.",
)
def arch(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge the machine's architecture."""
    del facts, node
    machine = document.section("system").at("machine").text()
    product = document.section("system").at("dmi", "product_name").optional() or "unnamed product"
    yield ok(f"{machine}, {product}") if machine == "aarch64" else fail(f"{machine}, {product}")


@CHECKS.node(
    "HOST.KERNEL_KHO",
    problems=("P01",),
    means="Kernels 7.0.0-10xx-nvidia keep about 9 GiB as CMA for kexec handover; RDMA cannot pin "
    "it, and NCCL dies with ENOMEM although memory is free.",
    do="Boot with kho=off, or use a 6.17 kernel.",
)
def kernel_kho(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge kernel, command line and CMA: a huge area, or more free than there is."""
    del facts, node
    system = document.section("system")
    kernel, cmdline = system.at("kernel").text(), system.at("cmdline").texts()
    off = "kho=off" in cmdline
    meminfo = document.section("memory").at("meminfo")
    total = meminfo.at("CmaTotal").integer() if meminfo.at("CmaTotal").present else 0
    free = meminfo.at("CmaFree").integer() if meminfo.at("CmaFree").present else 0
    if re.match(r"7\.0\.0-\d+.*nvidia", kernel) and not off:
        yield fail(f"kernel {kernel} without kho=off")
    elif free > total or total > 4 << 30:
        yield fail(f"CMA: {free >> 20} MiB free of {total >> 20} MiB (kernel {kernel})")
    else:
        yield ok(f"kernel {kernel}, CMA {total >> 20} MiB")


@CHECKS.cluster(
    "HOST.SAME",
    means="Mixed nodes fail in ways that look like something else.",
    do="Bring all nodes to the same kernel, driver and firmware.",
)
def same(facts: Facts) -> Iterator[Verdict]:
    """Compare kernel, page size, driver, distribution and firmware over the nodes."""
    things = {
        "kernel": ("system", "kernel"),
        "driver": ("gpu", "driver", "version"),
        "firmware (BIOS)": ("system", "dmi", "bios_version"),
        "distribution": ("system", "os_release", "VERSION_ID"),
    }
    for thing, keys in things.items():
        found = values(facts, *keys)
        if len(set(found.values())) > 1:
            yield warn(listed(found), thing)
        elif found:
            yield ok(next(iter(found.values())), thing)
    pages = {}
    for name, document in facts.documents().items():
        try:
            pages[name] = str(document.section("system").at("page_size").integer())
        except Missing:
            continue
    if len(set(pages.values())) > 1:
        yield fail(f"{listed(pages)} bytes", "page size")


@CHECKS.node(
    "HOST.FIRMWARE",
    problems=("P15",),
    means="Firmware before April 2026 can train the second ConnectX controller at PCIe x2.",
    do="Update with fwupdmgr update, then remove mains power once.",
)
def firmware(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge the firmware's date (tonyd2wild PR#35)."""
    del facts, node
    text = document.section("system").at("dmi", "bios_date").text()
    match = re.fullmatch(r"(\d\d)/(\d\d)/(\d{4})", text)
    if match is None:
        yield skip(f"date {text!r} not understood")
        return
    month, _, year = match.groups()
    old = (int(year), int(month)) < (2026, 4)
    yield warn(f"firmware of {text}") if old else ok(f"firmware of {text}")


@CHECKS.node(
    "HOST.MEMLOCK",
    problems=("P02",),
    means="RDMA cannot pin its buffers: ibv_reg_mr fails with ENOMEM on this node, and the "
    "others blame the network.",
    do="Unit: LimitMEMLOCK=infinity; container: --ulimit memlock=-1; logins: limits.d.",
)
def memlock(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge the engine unit's limit; PAM limits do not reach services. Before, the login's."""
    del facts, node
    unit = document.section("engine").at("unit")
    if unit.at("LoadState").optional() == "loaded":
        limit = unit.at("LimitMEMLOCK").text()
        start = unit.at("ExecStart").text()
        if CONTAINER.search(start):
            # a container does not inherit the limit of the unit that starts it
            if _UNLIMITED.search(start):
                yield ok("container: unlimited")
            else:
                yield fail("the container is started without --ulimit memlock=-1", "container")
        elif limit == "infinity":
            yield ok("unit: infinity")
        else:
            yield fail(f"unit: {limit} bytes", "unit")
        return
    hard = document.section("system").at("limits", "memlock", "hard")
    if hard.optional() == "unlimited":
        yield ok("login: unlimited (the unit is not installed)")
    else:
        yield warn(f"login: {hard.integer() >> 10} KiB (the unit is not installed)", "login")


@CHECKS.node(
    "HOST.MODULES",
    means="Without these kernel modules there is no RDMA, or no NFS over RDMA.",
    do="Install the node (it writes modules-load.d), or modprobe them.",
)
def modules(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge the plan's kernel modules."""
    del facts
    loaded = set(document.section("system").at("modules").texts())
    missing = [name for name in node.kernel_modules if name not in loaded]
    if missing:
        yield fail(f"not loaded: {', '.join(missing)}")
    else:
        yield ok(", ".join(node.kernel_modules) or "none needed")


@CHECKS.node(
    "HOST.SYSCTL",
    problems=("P10",),
    means="Kernel settings of the plan are not in force: twins answer ARP for each other, or "
    "memory is held back.",
    do="Install the node, then sysctl --system.",
)
def sysctl(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Compare the plan's sysctl values."""
    del facts
    seen = document.section("memory").at("sysctl")
    if not seen.present:
        seen.at("any").text()

    def wrong() -> Iterator[Verdict]:
        for name, value in node.sysctl.items():
            actual = seen.at(name).optional()
            if actual != value:
                arp = name.endswith((".arp_ignore", ".arp_announce"))
                text = f"{name} is {actual}, the plan wants {value}"
                yield fail(text, name) if arp else warn(text, name)

    yield from all_ok(wrong(), f"{len(node.sysctl)} values as planned")


@CHECKS.node(
    "HOST.HEADLESS",
    problems=("P73", "P77"),
    means="A desktop takes 1 to 2 GiB of the memory that holds the model.",
    do="systemctl set-default multi-user.target, then reboot.",
)
def headless(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge default target and display manager."""
    del facts, node
    services = document.section("services")
    target = services.at("default_target").text()
    running = [
        name
        for name in DISPLAY_UNITS
        if services.at("units", name, "active").optional() == "active"
    ]
    if running:
        yield fail(f"{', '.join(running)} runs")
    elif target == "graphical.target":
        yield warn("boots to graphical.target; no display manager runs now")
    else:
        yield ok(target)


@CHECKS.node(
    "HOST.SERVICES",
    problems=("P73",),
    means="Services that the engine does not need take memory, or change the node under it.",
    do="systemctl disable --now NAME.",
)
def services(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge services that do not belong on a serving node."""
    del facts, node
    units = document.section("services").at("units")
    active = [
        (name, what)
        for name, what in UNWANTED_UNITS.items()
        if units.at(name, "active").optional() == "active"
    ]
    dict(units.entries())
    yield from all_ok(
        (warn(f"{name} runs ({what})", name) for name, what in active), "none of the known ones"
    )


@CHECKS.node(
    "HOST.DISPLAY",
    problems=("P77",),
    means="The console holds the display memory of the GPU.",
    do="Boot with nvidia_drm.modeset=1 nvidia_drm.fbdev=0.",
)
def display(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge the parameters of nvidia_drm."""
    del facts, node
    fbdev = document.section("services").at("display", "fbdev").text()
    yield warn("nvidia_drm fbdev is on") if fbdev == "Y" else ok(f"fbdev {fbdev}")


@CHECKS.node(
    "HOST.WATCHDOG",
    problems=("P72",),
    means="A node that hangs stays so until someone pulls the plug.",
    do="Set RuntimeWatchdogSec=30s in /etc/systemd/system.conf.d, and MemoryMin= for sshd.",
)
def watchdog(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge the hardware watchdog and the protection of sshd."""
    del facts, node
    services = document.section("services")
    dogs = services.at("watchdogs").items()
    period = services.at("manager", "RuntimeWatchdogUSec").text()
    if not dogs:
        yield warn("the kernel offers no watchdog device", "device")
    elif period in ("0", "infinity", "off", ""):
        yield warn("systemd does not feed the watchdog", "systemd")
    else:
        yield ok(f"fed by systemd, period {period}")
    shells = services.at("sshd").items()
    kept = [shell.at("MemoryMin").optional() for shell in shells]
    if kept and all(value in (None, "0", "") for value in kept):
        yield warn("sshd has no MemoryMin: it starves when memory runs out", "sshd")


@CHECKS.node(
    "HOST.CPUFREQ",
    means="Without autonomous frequency selection single-thread memory bandwidth is about a third.",
    do="Boot with cppc_cpufreq.auto_sel_mode=1.",
)
def cpufreq(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge the CPU driver on 6.17 kernels of NixOS (graham33/nixos-dgx-spark)."""
    del facts
    system = document.section("system")
    kernel = system.at("kernel").text()
    if node.system != "nixos" or not kernel.startswith("6.17."):
        yield ok(f"not needed with {node.system}, kernel {kernel}")
        return
    mode = system.at("cpu_boost").optional()
    set_up = mode == "1" or "cppc_cpufreq.auto_sel_mode=1" in system.at("cmdline").texts()
    yield ok("auto_sel_mode 1") if set_up else warn(f"auto_sel_mode is {mode}")


@CHECKS.node(
    "HOST.KERNEL_LOG",
    problems=("P57", "P32"),
    means="The kernel has met an error since boot that often comes back under load.",
    do="Read dmesg; reboot before serving. ConnectX or GPU errors: remove mains power once.",
)
def kernel_log(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge lines of the kernel's log."""
    del facts, node

    def bad() -> Iterator[Verdict]:
        for name, count in document.section("kernel_log").at("matches").entries():
            if count.integer():
                yield warn(f"{count.integer()} lines: {name}", name)

    yield from all_ok(bad(), "no known error since boot")


@CHECKS.node(
    "HOST.UNITS",
    problems=("P42",),
    means="A unit of the plan is missing, failed, or would not come back after a reboot.",
    do="Install the node; for a failed unit: journalctl -u NAME, then systemctl reset-failed.",
)
def units(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge the plan's units once the node is installed."""
    del facts
    services = document.section("services")
    if not installed(document):
        yield skip("the node is not installed yet")
        return

    def bad() -> Iterator[Verdict]:
        for unit in node.units:
            state = services.at("units", unit.name)
            load = state.at("load").optional()
            if load != "loaded":
                yield fail(f"{unit.name}: {load}", unit.name)
            elif state.at("active").optional() == "failed":
                yield fail(f"{unit.name}: failed ({state.at('result').optional()})", unit.name)
            elif unit.started_by == "boot" and state.at("file").optional() in (
                "disabled",
                "masked",
            ):
                yield fail(f"{unit.name} is {state.at('file').optional()}", unit.name)
        if services.at("units", TARGET, "load").optional() not in ("loaded", None):
            yield fail(f"{TARGET} is not there", TARGET)

    yield from all_ok(bad(), f"{len(node.units)} units as planned")


@CHECKS.node(
    "HOST.PLAN",
    means="The node was set up from another plan than the one you look at.",
    do="Render, then install or roll out.",
)
def plan(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Compare the plan on the node with what the one in hand says for it."""
    files = document.section("files")
    if not files.at(PLAN_FILE).present:
        reason = files.at("errors", PLAN_FILE).optional()
        yield skip(reason or "the node is not installed yet")
        return
    digest = files.at(PLAN_FILE, "canonical_sha256").text()
    same_plan = digest == facts.plan_sha256.get(node.name)
    yield ok("the same plan") if same_plan else warn(f"{PLAN_FILE} is another plan")


@CHECKS.node(
    "HOST.PORTS",
    means="Another program listens on a port of the plan: the engine cannot start.",
    do="Stop that program, or change the port in the cluster file.",
)
def ports(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge who listens on the plan's ports."""
    plan = facts.plan.ports
    wanted = {plan.api: "api"}
    if node.role == "head":
        wanted |= {plan.rendezvous: "rendezvous", plan.supervisor: "supervisor"}

    def foreign() -> Iterator[Verdict]:
        for entry in document.section("ports").at("listening").items():
            number = entry.at("port").integer()
            if number not in wanted:
                continue
            unit = entry.at("process", "unit").optional() or ""
            # a container's process is in a scope of its own while the engine's unit is up
            if unit.startswith("spark-") or engine_runs(document):
                continue
            who = entry.at("process", "name").optional() or "an unknown process"
            yield fail(f"{wanted[number]} port {number}: {who} {unit}".rstrip(), str(number))

    yield from all_ok(foreign(), "free, or held by our units")


@CHECKS.cluster(
    "HOST.STATE",
    means="Ranks live and die together; a part of them running is a leftover.",
    do="Stop all ranks, then serve again.",
)
def state(facts: Facts) -> Iterator[Verdict]:
    """Judge whether the engine runs on all nodes or on none."""
    running = {}
    for name, document in facts.documents().items():
        view = document.section("services").at("units", ENGINE, "active")
        if view.optional() is not None:
            running[name] = engine_runs(document)
    up = [name for name, runs in running.items() if runs]
    if up and len(up) < len(running):
        yield fail(f"the engine runs only on {', '.join(up)}")
    elif running:
        yield ok("runs on all nodes" if up else "runs nowhere")
