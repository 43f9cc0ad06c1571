"""The part of a cluster that can be drawn, also when memory does not suffice for a plan."""

from __future__ import annotations

from dataclasses import dataclass

from spark_appliance.model.plan import RailPlan, TopologyPlan


@dataclass(frozen=True, slots=True)
class DrawnNode:
    """What a picture shows of a node."""

    name: str
    rank: int
    role: str
    address: str
    lan_interface: str
    rails: tuple[RailPlan, ...]


@dataclass(frozen=True, slots=True)
class Drawing:
    """What a picture shows of a cluster."""

    name: str
    topology: TopologyPlan
    nodes: tuple[DrawnNode, ...]
