"""What the engines of all ranks must have in common; any difference makes them wait forever.

The rule stands here once: it refuses settings of single nodes (``overrides``), and the plan carries
a hash of what falls under it, which the supervisors compare before a start.
"""

from __future__ import annotations

from typing import Final

from spark_appliance.model.plan import NcclLibrary
from spark_appliance.node.projection import sha256
from spark_appliance.render.arguments import Arguments

MAY_DIFFER: Final = frozenset(
    {
        "mem-fraction-static",
        "log-level",
        "log-level-http",
        "log-requests",
        "log-requests-level",
        "crash-dump-folder",
        "show-time-cost",
        "enable-metrics",
        "sleep-on-idle",
        "download-dir",
        "watchdog-timeout",
        "soft-watchdog-timeout",
        "weight-loader-disable-mmap",
        "weight-loader-prefetch-checkpoints",
        "weight-loader-prefetch-num-threads",
        "weight-loader-drop-cache-after-load",
        "model-loader-extra-config",
    }
)
"""Flags that a node may set for itself."""

_OF_THE_RANK: Final = frozenset({"host", "config", "node-rank"})
"""Flags that the plan gives each rank by itself."""

_VARIABLES: Final = ("NCCL_", "SGLANG_", "GLOO_")
_VARIABLES_MAY_DIFFER: Final = ("NCCL_DEBUG", "SGLANG_LOG")
_VARIABLES_OF_THE_NODE: Final = frozenset(
    {"NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "SGLANG_HOST_IP"}
)
"""Devices, interfaces and addresses of the node (``environment.generated``)."""


def flag_must_agree(name: str) -> bool:
    """Tell whether a flag has to be the same on every rank."""
    return name not in MAY_DIFFER and name not in _OF_THE_RANK


def variable_must_agree(name: str) -> bool:
    """Tell whether a variable has to be the same on every rank."""
    return (
        name.startswith(_VARIABLES)
        and not name.startswith(_VARIABLES_MAY_DIFFER)
        and name not in _VARIABLES_OF_THE_NODE
    )


def agreement_sha256(args: Arguments, env: dict[str, str], library: NcclLibrary | None) -> str:
    """Return the hash of what must agree, out of the settings of any one rank."""
    return sha256(
        {
            "args": {name: value for name, value in args.items() if flag_must_agree(name)},
            "env": {name: value for name, value in env.items() if variable_must_agree(name)},
            "nccl_library": None if library is None else library.model_dump(mode="json"),
        }
    )
