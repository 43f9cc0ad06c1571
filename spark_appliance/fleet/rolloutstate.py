"""How far a rollout is, on the control machine: read back after any interruption."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Literal, get_args

from spark_appliance import lockfile
from spark_appliance.errors import InputError, Location, OperationError

STATE_VERSION: Final = 1

Phase = Literal[
    "prepared", "stopping", "canary", "rest", "serving", "confirming", "done", "returned"
]
"""In this order; ``returned``: every node is back at what it had."""

System = Literal["nixos", "dgx-os"]

FINISHED: Final = ("done", "returned")


@dataclass(frozen=True, slots=True)
class NodeState:
    """One node: what it had and what it gets.

    A NixOS node is named by store path, a DGX OS node by generation; the new generation's number
    is known once it is applied. ``touched``: the new one may be active there.
    """

    system: System
    old: str
    new: str
    touched: bool = False


@dataclass(frozen=True, slots=True)
class RolloutState:
    """A rollout."""

    plan_sha256: str
    canary: str
    phase: Phase
    nodes: dict[str, NodeState]

    @property
    def unfinished(self) -> bool:
        """Whether something has to be resumed or rolled back."""
        return self.phase not in FINISHED

    def at(self, phase: Phase) -> RolloutState:
        """Return the state in another phase."""
        return replace(self, phase=phase)

    def with_node(self, name: str, *, new: str | None = None) -> RolloutState:
        """Return the state with a node touched."""
        node = self.nodes[name]
        touched = replace(node, touched=True, new=node.new if new is None else new)
        return replace(self, nodes={**self.nodes, name: touched})


def write(path: Path, state: RolloutState) -> RolloutState:
    """Write the state in one step and return it.

    Raises:
        OperationError: when it cannot be written: then nothing may go on.
    """
    text = json.dumps({"version": STATE_VERSION, **asdict(state)}, indent=1, sort_keys=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lockfile.write(path, text + "\n")
    except OSError as error:
        raise OperationError(
            f"{path}: cannot write the rollout's state: {error.strerror}\n"
            "    remedy: give another folder with --runs"
        ) from None
    return state


def read(path: Path) -> RolloutState | None:
    """Read the state, None when there was no rollout.

    Raises:
        InputError: when the file is damaged.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("version") != STATE_VERSION:
            raise ValueError("another version")
        nodes = {name: NodeState(**node) for name, node in data.pop("nodes").items()}
        return _checked(RolloutState(nodes=nodes, **data))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError.one(
            "rollout.state",
            f"the rollout's state cannot be read ({error})",
            "look at the nodes with spark-appliance status, then remove the file",
            Location(str(path)),
        ) from None


def _checked(state: RolloutState) -> RolloutState:
    if state.phase not in get_args(Phase):
        raise ValueError(f"no phase: {state.phase!r}")
    if not isinstance(state.plan_sha256, str):
        raise ValueError("plan_sha256 is no text")
    for name, node in state.nodes.items():
        texts = isinstance(node.old, str) and isinstance(node.new, str)
        if node.system not in get_args(System) or not texts or not isinstance(node.touched, bool):
            raise ValueError(f"no state of a node: {name}")
    if state.canary not in state.nodes:
        raise ValueError(f"no state of the canary: {state.canary!r}")
    return state
