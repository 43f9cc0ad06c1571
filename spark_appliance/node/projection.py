"""What of the plan lies on a node: the node's own plan, and the part that all nodes share.

``projection.json`` says for every key of the plan whom it concerns; ``lib/node-plan.nix`` reads the
same file, and a test holds the two projections equal. ``all``: every node. ``head``: the node of
rank 0 alone. ``cables``: every node, with the cables that end at it. ``peers``: the list of nodes,
the own entry whole, of the others the keys of ``peer``. ``none``: only whoever holds the whole
plan. A key that the file does not name concerns nobody.

The result has the shape of a plan, with keys left out: the programs of a node read both.
"""

from __future__ import annotations

import hashlib
import json
import pkgutil
from collections.abc import Mapping
from typing import Any, Final

_RULES: Final[dict[str, Any]] = json.loads(
    pkgutil.get_data(__package__, "projection.json") or b"{}"  # also from within the zipapp
)

AUDIENCE: Final[Mapping[str, str]] = _RULES["plan"]
"""Key of the plan -> whom it concerns."""

PEER: Final[frozenset[str]] = frozenset(_RULES["peer"])
"""What a node knows of another node: all that ``spark_appliance.node`` reads of one. Addresses of
rails are in the own entry (``rails[].peers``)."""


def node_plan(plan: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a node's own plan: what concerns it and nothing else.

    Takes a whole plan or that node's own, which it returns as it is.

    Raises:
        KeyError: when the plan has no such node, or only its name and address.
    """
    own = next((node for node in plan["nodes"] if node["name"] == name), None)
    if own is None or not is_whole(own):
        raise KeyError(name)
    result = shared_plan(plan)
    result["nodes"] = [own if node is own else _peer(node) for node in plan["nodes"]]
    for key, value in plan.items():
        audience = AUDIENCE.get(key)
        if audience == "head" and own["role"] == "head":
            result[key] = value
        elif audience == "cables":
            result[key] = {**value, "cables": [c for c in value["cables"] if _ends_at(c, name)]}
    return result


def shared_plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the own plans of all nodes have in common, out of a whole plan or any of them.

    Ranks whose plans differ here do not belong to one group.
    """
    result = {key: value for key, value in plan.items() if AUDIENCE.get(key) == "all"}
    result["nodes"] = [_peer(node) for node in plan["nodes"]]
    return result


def is_whole(node: Mapping[str, Any]) -> bool:
    """Tell whether an entry of ``nodes`` is more than what a peer knows."""
    return not PEER.issuperset(node)


def sha256(data: Any) -> str:
    """Return the sha256 of plain data as canonical JSON, as hex: white space changes nothing."""
    return hashlib.sha256(
        json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def _peer(node: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key in PEER}


def _ends_at(cable: Mapping[str, Any], name: str) -> bool:
    return any(end is not None and end["node"] == name for end in (cable["a"], cable["b"]))
