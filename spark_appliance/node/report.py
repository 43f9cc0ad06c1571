"""``report``: ``status`` with what the fleet's commands show besides, in one answer.

One SSH session a node and a refresh: units and plan, the engine's gauges, the GPU's clock and
heat, counters of the rails, versions.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any, Final

from spark_appliance import __version__
from spark_appliance.names import CONTAINER_SLICE, ENGINE
from spark_appliance.node.engine_facts import engine_facts, loading, router_facts
from spark_appliance.node.errors import NodeError
from spark_appliance.node.files import read_json, read_line
from spark_appliance.node.generations.store import Store
from spark_appliance.node.generations.switch import drift
from spark_appliance.node.plan import NodeContext
from spark_appliance.node.process import Runner
from spark_appliance.node.status import status

GPU_FIELDS: Final = (
    "temperature.gpu",
    "power.draw",
    "clocks.sm",
    "clocks.mem",
    "utilization.gpu",
    "driver_version",
)

COUNTERS: Final = (
    "counters/port_xmit_data",
    "counters/port_rcv_data",
    "counters/port_xmit_discards",
    "counters/link_downed",
    "hw_counters/out_of_sequence",
    "hw_counters/packet_seq_err",
    "hw_counters/local_ack_timeout_err",
    "hw_counters/rnr_nak_retry_err",
    "hw_counters/roce_adp_retrans",
)
"""Of a mlx5 port: bytes (in units of 4), drops, retransmissions (field notes 5)."""

GENERATIONS: Final = "/var/lib/spark/generations/state.json"
ENGRAM_METRICS: Final = "SPARK_ENGRAM_METRICS_FILE"


def report(context: NodeContext, runner: Runner, *, gpu: bool) -> dict[str, Any]:
    """Return everything; what cannot be read is null.

    ``gpu``: also ask nvidia-smi, which itself slows generation (field notes 6.3): rarely.
    """
    generation = read_json(context.path(GENERATIONS))
    # a hand-written plan may be of a node without an engine
    serves = context.plan.optional_view("model") is not None
    return {
        "status": status(context, runner),
        "engine": engine_facts(context) if serves else None,
        "router": router_facts(context),
        "loading": loading(context, _cgroups()) if serves else None,
        "gpu": _gpu(runner) if gpu else None,
        "counters": {
            rail.text("rdma"): _counters(context, rail.text("rdma"))
            for rail in context.node.views("rails")
        },
        "engram_metrics": _engram_metrics(context),
        "versions": {
            "spark_appliance": __version__,
            "kernel": platform.release(),
            "system": _readlink(context.path("/run/current-system")),
            "generation": None if generation is None else generation.get("current"),
            "confirmed": None if generation is None else generation.get("confirmed"),
        },
        "edited": None if generation is None else _edited(context),
    }


def _edited(context: NodeContext) -> list[dict[str, Any]] | None:
    """Return the files of ours that are no longer as installed; None in the midst of a switch."""
    store = Store(context.root)
    try:
        state = store.state()
        return drift(store, state) if state.switching is None else None
    except NodeError:
        return None


def _cgroups() -> tuple[str, ...]:
    base = "/sys/fs/cgroup"
    return f"{base}/system.slice/{ENGINE}", f"{base}/{CONTAINER_SLICE}"


def _gpu(runner: Runner) -> dict[str, str] | None:
    query = f"--query-gpu={','.join(GPU_FIELDS)}"
    try:
        done = runner(["nvidia-smi", query, "--format=csv,noheader,nounits"], seconds=10)
    except NodeError:
        return None
    values = (
        [value.strip() for value in done.stdout.splitlines()[0].split(",")]
        if (done.status == 0 and done.stdout.strip())
        else []
    )
    return dict(zip(GPU_FIELDS, values, strict=True)) if len(values) == len(GPU_FIELDS) else None


def _counters(context: NodeContext, rdma: str) -> dict[str, int]:
    result = {}
    for name in COUNTERS:
        text = read_line(context.path(f"/sys/class/infiniband/{rdma}/ports/1/{name}"))
        if text is not None and text.isdecimal():
            result[name.rsplit("/", 1)[1]] = int(text)
    return result


def _engram_metrics(context: NodeContext) -> dict[str, float]:
    path = context.node.mapping("env").get(ENGRAM_METRICS)
    if not isinstance(path, str):
        return {}
    try:
        text = context.path(path).read_text(encoding="utf-8")
    except OSError:
        return {}
    result = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            try:
                result[name] = float(value)
            except ValueError:
                continue
    return result


def _readlink(path: Path) -> str | None:
    try:
        return str(path.readlink())
    except OSError:
        return None
