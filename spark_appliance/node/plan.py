"""Read the plan as plain data, with an error that names the field when something is missing.

The plan was validated where it was rendered; here only what a program asks for is checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_appliance.names import PLAN_VERSION
from spark_appliance.node.errors import PlanError
from spark_appliance.node.projection import is_whole, sha256, shared_plan

_REMEDY = "install the plan of this version again: spark-appliance render, then install"


@dataclass(frozen=True, slots=True)
class View:
    """A mapping of the plan together with the path that leads to it."""

    data: dict[str, Any]
    path: str

    def text(self, key: str) -> str:
        """Return a string.

        Raises:
            PlanError: when it is missing or of another type; so do the other readers.
        """
        value = self._get(key)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def optional_text(self, key: str) -> str | None:
        """Return a string or None."""
        return None if self._get(key) is None else self.text(key)

    def integer(self, key: str) -> int:
        """Return a whole number."""
        value = self._get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(key, "a whole number", value)
        return value

    def integers(self, key: str) -> list[int]:
        """Return a list of whole numbers."""
        value = self._get(key)
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self._wrong(key, "a list of whole numbers", value)
        return list(value)

    def texts(self, key: str) -> list[str]:
        """Return a list of strings."""
        value = self._get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of strings", value)
        return list(value)

    def view(self, key: str) -> View:
        """Return a mapping."""
        value = self._get(key)
        if not isinstance(value, dict):
            raise self._wrong(key, "a mapping", value)
        return View(value, self._at(key))

    def optional_view(self, key: str) -> View | None:
        """Return a mapping or None."""
        return None if self._get(key) is None else self.view(key)

    def views(self, key: str) -> list[View]:
        """Return a list of mappings."""
        value = self._get(key)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self._wrong(key, "a list of mappings", value)
        return [View(item, f"{self._at(key)}[{index}]") for index, item in enumerate(value)]

    def mapping(self, key: str) -> dict[str, Any]:
        """Return a mapping as plain data."""
        return self.view(key).data

    def groups(self, key: str) -> list[list[str]]:
        """Return a list of lists of strings."""
        value = self._get(key)
        if not isinstance(value, list):
            raise self._wrong(key, "a list of lists", value)
        return [View({"": item}, f"{self._at(key)}").texts("") for item in value]

    def _get(self, key: str) -> Any:
        if key not in self.data:
            raise PlanError(f"{self._at(key)}: missing; {_REMEDY}")
        return self.data[key]

    def _at(self, key: str) -> str:
        return f"{self.path}.{key}" if key else self.path

    def _wrong(self, key: str, wanted: str, value: Any) -> PlanError:
        return PlanError(
            f"{self._at(key)}: {value!r:.60} is no {wanted.split(' ', 1)[1]}; {_REMEDY}"
        )


@dataclass(frozen=True, slots=True)
class NodeContext:
    """The plan, one node of it, and the root below which all paths are looked up.

    The plan may be whole or this node's own (``projection``). ``sha256`` is over its canonical
    JSON: two files that say the same are the same plan. ``shared_sha256`` is over what the plans
    of all nodes have in common.
    """

    plan: View
    node: View
    root: Path
    sha256: str
    shared_sha256: str

    @property
    def name(self) -> str:
        """Name of this node."""
        return self.node.text("name")

    @property
    def head(self) -> View:
        """The node of rank 0."""
        return self.plan.views("nodes")[0]

    @property
    def is_head(self) -> bool:
        """Whether this node is rank 0."""
        return self.node.text("role") == "head"

    @property
    def others(self) -> Iterator[View]:
        """All other nodes in rank order."""
        return (view for view in self.plan.views("nodes") if view.text("name") != self.name)

    def path(self, absolute: str) -> Path:
        """Return where an absolute path is below the root."""
        return self.root / absolute.lstrip("/")


def read_plan(path: Path) -> View:
    """Read a plan.

    Raises:
        PlanError: when it cannot be read or is no plan of this version.
    """
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise PlanError(
            f"{path}: cannot read the plan: {error.strerror}; install the node first "
            "(spark-appliance install), or give --plan"
        ) from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path}: is no JSON ({error}); {_REMEDY}") from None
    version = data.get("version") if isinstance(data, dict) else None
    if not isinstance(data, dict) or version != PLAN_VERSION:
        raise PlanError(
            f"{path}: is no plan of version {PLAN_VERSION} (version: {version!r}); {_REMEDY}, "
            "with spark-node and spark-appliance of the same version"
        )
    return View(data, str(path) + ":")


def read_context(plan: Path, node: str, root: Path) -> NodeContext:
    """Read a plan and pick a node of it. ``plan`` itself is not below ``root``.

    Raises:
        PlanError: when it cannot be read, is no plan of this version or lacks the node.
    """
    view = read_plan(plan)
    for candidate in view.views("nodes"):
        if candidate.text("name") == node:
            if not is_whole(candidate.data):
                raise PlanError(
                    f"{plan}: is another node's own plan, {node!r} is only named in it; install "
                    "this node (spark-appliance install), or give --plan cluster.lock.json"
                )
            return NodeContext(
                view, candidate, root, sha256(view.data), sha256(shared_plan(view.data))
            )
    names = ", ".join(candidate.text("name") for candidate in view.views("nodes"))
    raise PlanError(f"{plan}: has no node {node!r}; it has {names}")
