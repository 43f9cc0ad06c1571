"""``exec``: become the engine (or a tool beside it) with the plan's environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spark_appliance.node.fabric import ENV_FILE, GID_INDEX, read_environment
from spark_appliance.node.plan import NodeContext


def engine_environment(
    context: NodeContext, inherited: Mapping[str, str], *, fabric: bool = True
) -> dict[str, str]:
    """Return the environment: inherited < plan < what the fabric resolved.

    Without ``fabric`` (the packer, which talks to no other node) the rails may be down.

    HOME is the cache directory unless the plan says otherwise: libraries that keep state in a
    home directory find a place that lasts. An empty or inherited GID index never reaches NCCL:
    empty means 0, a link-local address (field notes 1.5).

    Raises:
        NodeError: when the node has rails and the fabric was not brought up.
    """
    result = dict(inherited)
    for name in (GID_INDEX, "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        result.pop(name, None)
    result["HOME"] = context.node.text("cache_directory")
    result |= plan_environment(context, fabric=fabric)
    return result


def plan_environment(context: NodeContext, *, fabric: bool = True) -> dict[str, str]:
    """Return only the variables of the plan and of the fabric.

    Raises:
        NodeError: when the node has rails and the fabric was not brought up.
    """
    env = context.node.view("env")
    result = {name: env.text(name) for name in env.data}
    if fabric and context.node.views("rails"):
        result |= read_environment(context.path(ENV_FILE))
    return result


def engine_command(
    context: NodeContext, python: str | None, command: Sequence[str] = ()
) -> list[str]:
    """Return what to run: ``command``, or the plan's command line with its interpreter replaced."""
    if command:
        return list(command)
    argv = context.node.texts("argv")
    return [python, *argv[1:]] if python is not None else argv
