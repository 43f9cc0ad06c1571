"""``status``: everything about this node in one JSON document."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from spark_appliance.node import guard
from spark_appliance.node.errors import NodeError
from spark_appliance.node.fabric import ENV_FILE, read_environment
from spark_appliance.node.files import read_json
from spark_appliance.node.memory import all_figures
from spark_appliance.node.plan import NodeContext
from spark_appliance.node.prepare import RECEIPT_SUFFIX
from spark_appliance.node.process import Runner
from spark_appliance.node.rails import addresses, look, rails_of
from spark_appliance.node.supervisor.state import STATE_FILE
from spark_appliance.node.systemctl import show

STATUS_VERSION: Final = 1

_FIGURES: Final = (
    "MemTotal",
    "MemFree",
    "MemAvailable",
    "Cached",
    "SwapTotal",
    "SwapFree",
    "CmaTotal",
    "CmaFree",
)

_T = TypeVar("_T")


def status(context: NodeContext, runner: Runner) -> dict[str, Any]:
    """Return the state of this node; what cannot be read is null and named in ``problems``.

    Sizes are bytes, times are seconds since the epoch.
    """
    problems: list[str] = []

    def tried(step: Callable[[], _T]) -> _T | None:
        try:
            return step()
        except NodeError as error:
            problems.append(str(error))
            return None

    figures = all_figures(context.path("/proc/meminfo"))
    document = {
        "version": STATUS_VERSION,
        "node": context.name,
        "role": context.node.text("role"),
        "rank": context.node.integer("rank"),
        "time": time.time(),
        "plan": {
            "sha256": context.sha256,
            "shared_sha256": context.shared_sha256,
        },
        "units": tried(lambda: _units(context, runner)),
        "ready": context.path(guard.READY_FILE).exists(),
        "supervisor": read_json(context.path(STATE_FILE)),
        "guard": read_json(context.path(guard.STATE_FILE)),
        "memory": {name: figures.get(name) for name in _FIGURES},
        "rails": tried(lambda: _rails(context, runner)),
        "fabric_env": tried(lambda: _fabric_env(context)),
        "engram": _engram(context),
    }
    return {**document, "problems": problems}


def _units(context: NodeContext, runner: Runner) -> dict[str, dict[str, str]]:
    names = [view.text("name") for view in context.node.views("units")]
    return {
        name: {
            "load": state.loaded,
            "active": state.active,
            "sub": state.sub,
            "result": state.result,
            "text": state.text,
            "restarts": state.restarts,
        }
        for name, state in show(runner, names).items()
    }


def _rails(context: NodeContext, runner: Runner) -> list[dict[str, Any]]:
    rails = rails_of(context)
    by_netdev = addresses(runner) if rails else {}
    seen = [look(context, rail, by_netdev) for rail in rails]
    return [
        {
            "netdev": item.rail.netdev,
            "rdma": item.rail.rdma,
            "operstate": item.operstate,
            "mtu": item.mtu,
            "speed_mbps": item.speed,
            "addresses": list(item.addresses),
            "port_state": item.state,
            "port_phys_state": item.phys_state,
            "gid_index": item.gid_index,
            "gids": [
                {"index": gid.index, "gid": gid.gid, "type": gid.type, "netdev": gid.netdev}
                for gid in item.gids
            ],
            "missing": list(item.missing),
        }
        for item in seen
    ]


def _fabric_env(context: NodeContext) -> dict[str, str] | None:
    return read_environment(context.path(ENV_FILE)) if context.node.views("rails") else None


def _engram(context: NodeContext) -> list[dict[str, Any]]:
    engram = context.node.optional_view("engram")
    if engram is None:
        return []
    folder = context.path(engram.text("directory"))
    result = []
    for file in engram.views("files"):
        name = file.text("name")
        try:
            size: int | None = (folder / name).stat().st_size
        except OSError:
            size = None
        receipt = read_json(folder / f"{name}{RECEIPT_SUFFIX}")
        expected = file.integer("bytes")
        result.append(
            {
                "name": name,
                "layer": file.integer("layer"),
                "bytes": size,
                "expected_bytes": expected,
                "receipt": receipt is not None,
                "good": size == expected and receipt is not None,
            }
        )
    return result
