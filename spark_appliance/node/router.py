"""``router``: become sglang-router with the plan's arguments and the key from its credential.

sglang-router takes the key by its command line alone, which everyone on the node could read. So
its own Python reads the key from the credential and calls what the command line would call.
"""

from __future__ import annotations

from typing import Final

from spark_appliance.node.errors import PlanError
from spark_appliance.node.plan import NodeContext

LAUNCH: Final = """\
import os, sys
from sglang_router.launch_router import launch_router, parse_router_args
words = sys.argv[1:]
folder = os.environ.get("CREDENTIALS_DIRECTORY")
path = os.path.join(folder, "api-key") if folder else ""
if os.path.exists(path):
    with open(path) as file:
        words += ["--api-key=" + file.read().strip()]
launch_router(parse_router_args(words))
"""


def router_argv(context: NodeContext, python: str) -> list[str]:
    """Return the command to become.

    Raises:
        PlanError: when the plan has no router.
    """
    router = context.plan.optional_view("router") if context.is_head else None
    if router is None:
        raise PlanError(f"{context.name}: the plan has no router for this node")
    return [python, "-c", LAUNCH, *router.texts("argv")]
