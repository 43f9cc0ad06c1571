"""Which cage is joined to which: the customary cabling, the declared one, and the rules."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from spark_appliance.model.cluster import CageName, Cluster, TopologyKind
from spark_appliance.model.findings import Finding, Path

NODE_COUNTS: Final[dict[TopologyKind, range]] = {
    "single": range(1, 2),
    "pair": range(2, 3),
    "triangle": range(3, 4),
    "switch": range(2, 9),
    "ring": range(4, 5),
}
"""How many nodes each topology takes."""

SWITCH: Final = "switch"
_CABLES: Final[Path] = ("topology", "cables")


@dataclass(frozen=True, slots=True, order=True)
class End:
    """One end of a cable: a node by rank and its cage."""

    rank: int
    cage: CageName


@dataclass(frozen=True, slots=True, order=True)
class Cable:
    """A cable between two nodes, or from a node to the switch (``b`` is None)."""

    a: End
    b: End | None

    @property
    def ends(self) -> tuple[End, ...]:
        """The ends that are on Sparks."""
        return (self.a,) if self.b is None else (self.a, self.b)


def customary_cables(kind: TopologyKind, count: int) -> list[Cable]:
    """Return the cabling used when the cluster file names no cables.

    Direct topologies go from p0 of a rank to p1 of the next (NVIDIA connect-three-sparks; the
    ring of four is the same rule); a pair uses the same cage on both ends (NVIDIA
    connect-two-sparks); behind a switch every Spark uses p0.
    """
    if kind == "pair":
        return [Cable(End(0, "p0"), End(1, "p0"))]
    if kind == "switch":
        return [Cable(End(rank, "p0"), None) for rank in range(count)]
    if kind in ("triangle", "ring"):
        return sorted(
            _direct(End(rank, "p0"), End((rank + 1) % count, "p1")) for rank in range(count)
        )
    return []


def read_cables(cluster: Cluster) -> tuple[list[Cable], list[Finding]]:
    """Return the cluster's cables in a fixed order, and what is wrong with the declared ones."""
    count = len(cluster.nodes)
    kind = cluster.topology.kind
    if cluster.topology.cables is None:
        return customary_cables(kind, count), []
    findings: list[Finding] = []
    ranks = {node.name: rank for rank, node in enumerate(cluster.nodes)}
    declared: dict[End, End | None] = {}
    for left, right in cluster.topology.cables.items():
        path = (*_CABLES, left)
        a = _end(left, ranks)
        b = None if right == SWITCH else _end(right, ranks)
        for text, end in ((left, a), (right, b)):
            if end is None and text != SWITCH:
                findings.append(
                    Finding(
                        "topology.unknown-node",
                        path,
                        f"{text} names no node of this cluster",
                        f"use one of: {', '.join(ranks)}",
                    )
                )
        if a is None or (b is None and right != SWITCH):
            continue
        if b is not None and a.rank == b.rank:
            findings.append(
                Finding(
                    "topology.cable-loop",
                    path,
                    f"the cable joins {cluster.nodes[a.rank].name} to itself",
                    "give the cage of another Spark",
                )
            )
            continue
        declared[a] = b
    findings += _reciprocity(cluster, declared)
    if findings:
        return [], findings
    cables = {_direct(a, b) if b is not None else Cable(a, None) for a, b in declared.items()}
    ordered = sorted(cables, key=lambda cable: (cable.a, cable.b or cable.a))
    findings += _cages_used_once(cluster, ordered)
    if not findings:
        findings += _shape(cluster, ordered)
    return ordered, findings


def _direct(a: End, b: End) -> Cable:
    return Cable(min(a, b), max(a, b))


def _end(text: str, ranks: dict[str, int]) -> End | None:
    name, _, cage = text.rpartition(".")
    if name not in ranks:
        return None
    return End(ranks[name], "p0" if cage == "p0" else "p1")


def _text(cluster: Cluster, end: End) -> str:
    return f"{cluster.nodes[end.rank].name}.{end.cage}"


def _reciprocity(cluster: Cluster, declared: dict[End, End | None]) -> list[Finding]:
    findings = []
    for a, b in declared.items():
        if b is None or b not in declared or declared[b] == a:
            continue
        back = declared[b]
        other = _text(cluster, back) if back is not None else SWITCH
        findings.append(
            Finding(
                "topology.not-reciprocal",
                (*_CABLES, _text(cluster, a)),
                f"{_text(cluster, a)} goes to {_text(cluster, b)}, but {_text(cluster, b)} "
                f"is said to go to {other}",
                f"write {_text(cluster, b)}: {_text(cluster, a)}, or leave that line out",
            )
        )
    return findings


def _cages_used_once(cluster: Cluster, cables: list[Cable]) -> list[Finding]:
    used = Counter(end for cable in cables for end in cable.ends)
    return [
        Finding(
            "topology.cage-used-twice",
            _CABLES,
            f"cage {_text(cluster, end)} has {times} cables",
            "a cage takes one cable; use the other cage (p0 or p1)",
        )
        for end, times in sorted(used.items())
        if times > 1
    ]


def _shape(cluster: Cluster, cables: list[Cable]) -> list[Finding]:
    kind = cluster.topology.kind
    if kind == "switch":
        return _switch_shape(cluster, cables)
    to_switch = [cable for cable in cables if cable.b is None]
    if to_switch:
        return [
            Finding(
                "topology.switch-cable",
                (*_CABLES, _text(cluster, to_switch[0].a)),
                f"a {kind} has no switch",
                "set topology.kind to switch, or name the other Spark's cage",
            )
        ]
    if kind == "single":
        return _unwanted(cables, "a single node has no cables", "remove topology.cables")
    if kind == "pair":
        return _pair_shape(cluster, cables)
    pairs = Counter((cable.a.rank, cable.b.rank) for cable in cables if cable.b is not None)
    if kind == "triangle":
        wanted = {(0, 1), (0, 2), (1, 2)}
    else:
        count = len(cluster.nodes)
        wanted = {(min(r, (r + 1) % count), max(r, (r + 1) % count)) for r in range(count)}
    return _compare_pairs(cluster, pairs, wanted)


def _compare_pairs(
    cluster: Cluster, pairs: Counter[tuple[int, int]], wanted: set[tuple[int, int]]
) -> list[Finding]:
    kind = cluster.topology.kind
    rule = "topology.triangle-incomplete" if kind == "triangle" else "topology.ring-order"
    why = (
        "a triangle joins every Spark to both others"
        if kind == "triangle"
        else "NCCL walks a ring in rank order, so the cables must follow the order of nodes"
    )
    findings = []
    for a, b in sorted(wanted - set(pairs)):
        findings.append(
            Finding(
                rule,
                _CABLES,
                f"no cable joins {cluster.nodes[a].name} and {cluster.nodes[b].name}; {why}",
                "add the cable, or reorder the nodes so that neighbours are cabled"
                if kind == "ring"
                else "add the cable",
            )
        )
    for a, b in sorted(set(pairs) - wanted):
        findings.append(
            Finding(
                rule,
                _CABLES,
                f"{cluster.nodes[a].name} and {cluster.nodes[b].name} are cabled but not "
                "neighbours in rank order",
                "reorder the nodes so that rank order is cable order",
            )
        )
    return findings


def _pair_shape(cluster: Cluster, cables: list[Cable]) -> list[Finding]:
    if len(cables) != 1:
        return _unwanted(
            cables,
            f"a pair needs exactly one cable, {len(cables)} are given; a second one adds no "
            "bandwidth, as both cages share the node's 200 Gb/s",
            "keep one cable",
        )
    cable = cables[0]
    if cable.b is not None and cable.a.cage != cable.b.cage:
        return [
            Finding(
                "topology.pair-cages-differ",
                (*_CABLES, _text(cluster, cable.a)),
                f"the cable joins {cable.a.cage} to {cable.b.cage}",
                "use the same cage on both ends (NCCL tests fail otherwise)",
            )
        ]
    return []


def _switch_shape(cluster: Cluster, cables: list[Cable]) -> list[Finding]:
    direct = [cable for cable in cables if cable.b is not None]
    if direct:
        return [
            Finding(
                "topology.direct-cable",
                (*_CABLES, _text(cluster, direct[0].a)),
                "behind a switch every cable goes to the switch",
                f"write {_text(cluster, direct[0].a)}: switch",
            )
        ]
    findings = []
    per_rank = Counter(cable.a.rank for cable in cables)
    for rank, node in enumerate(cluster.nodes):
        if per_rank[rank] != 1:
            findings.append(
                Finding(
                    "topology.switch-one-cable",
                    _CABLES,
                    f"{node.name} has {per_rank[rank]} cables to the switch instead of one",
                    "give every Spark one cable; a second one adds no bandwidth",
                )
            )
    if not findings and len({cable.a.cage for cable in cables}) > 1:
        findings.append(
            Finding(
                "topology.switch-cages-differ",
                _CABLES,
                "the Sparks use different cages",
                "use the same cage on every Spark, so that device names agree",
            )
        )
    return findings


def _unwanted(cables: list[Cable], message: str, remedy: str) -> list[Finding]:
    return [Finding("topology.cable-count", _CABLES, message, remedy)] if cables else []
