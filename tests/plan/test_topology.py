"""Every topology rule, each broken alone; the addresses that come out when none is."""

from __future__ import annotations

from typing import Any

import pytest
from clusters import addressed, changed, document, findings_of, rendering_of, rules_of

TRIANGLE = {"spark1.p0": "spark2.p1", "spark2.p0": "spark3.p1", "spark3.p0": "spark1.p1"}
RING = {
    "spark1.p0": "spark2.p1",
    "spark2.p0": "spark3.p1",
    "spark3.p0": "spark4.p1",
    "spark4.p0": "spark1.p1",
}


def cabled(cables: dict[str, str], kind: str = "triangle", count: int = 3) -> dict[str, Any]:
    return changed(document(kind, count), "topology", "cables", to=cables)


def without(data: dict[str, Any], rank: int, netdev: str) -> dict[str, Any]:
    result = changed(data, "nodes", rank, "addresses", netdev, to=None)
    del result["nodes"][rank]["addresses"][netdev]
    return result


def address(value: str, rank: int = 0, netdev: str = "enp1s0f0np0") -> dict[str, Any]:
    return changed(addressed(), "nodes", rank, "addresses", netdev, to=value)


BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("two nodes in a triangle", document("triangle", 2), "topology.node-count"),
    ("nine behind a switch is too many, one too few", document("switch", 1), "topology.node-count"),
    ("three in a ring", document("ring", 3), "topology.node-count"),
    ("unknown node", cabled(TRIANGLE | {"spark3.p0": "spark9.p1"}), "topology.unknown-node"),
    ("to itself", cabled(TRIANGLE | {"spark3.p0": "spark3.p1"}), "topology.cable-loop"),
    (
        "other end says otherwise",
        cabled(TRIANGLE | {"spark2.p1": "spark3.p0"}),
        "topology.not-reciprocal",
    ),
    (
        "cage used twice",
        cabled(TRIANGLE | {"spark3.p0": "spark2.p1"}),
        "topology.cage-used-twice",
    ),
    (
        "triangle lacks a side",
        cabled({"spark1.p0": "spark2.p1", "spark2.p0": "spark3.p1"}),
        "topology.triangle-incomplete",
    ),
    (
        "ring crosses",
        cabled(
            {
                "spark1.p0": "spark3.p1",
                "spark3.p0": "spark2.p1",
                "spark2.p0": "spark4.p1",
                "spark4.p0": "spark1.p1",
            },
            "ring",
            4,
        ),
        "topology.ring-order",
    ),
    (
        "two rings of two",
        cabled(
            {
                "spark1.p0": "spark2.p1",
                "spark2.p0": "spark1.p1",
                "spark3.p0": "spark4.p1",
                "spark4.p0": "spark3.p1",
            },
            "ring",
            4,
        ),
        "topology.ring-order",
    ),
    ("switch in a triangle", cabled(TRIANGLE | {"spark3.p0": "switch"}), "topology.switch-cable"),
    (
        "cable at a single node",
        cabled({"spark1.p0": "switch"}, "single", 1),
        "topology.switch-cable",
    ),
    (
        "direct cable at a switch",
        cabled(
            {f"spark{n}.p0": "switch" for n in (1, 2)} | {"spark3.p0": "spark4.p0"}, "switch", 4
        ),
        "topology.direct-cable",
    ),
    (
        "switch without one node",
        cabled({f"spark{n}.p0": "switch" for n in (1, 2, 3)}, "switch", 4),
        "topology.switch-one-cable",
    ),
    (
        "two cables of a node to the switch",
        cabled(
            {f"spark{n}.p0": "switch" for n in (1, 2, 3, 4)} | {"spark1.p1": "switch"}, "switch", 4
        ),
        "topology.switch-one-cable",
    ),
    (
        "mixed cages at a switch",
        cabled(
            {f"spark{n}.p0": "switch" for n in (1, 2, 3)} | {"spark4.p1": "switch"}, "switch", 4
        ),
        "topology.switch-cages-differ",
    ),
    (
        "prefix too small",
        changed(document(), "topology", "prefix", to="10.0.0.0/24"),
        "topology.prefix",
    ),
    (
        "prefix reserved",
        changed(document(), "topology", "prefix", to="240.0.0.0/16"),
        "topology.prefix",
    ),
    ("multicast address", address("224.0.0.1/24"), "topology.address-unusable"),
    ("loopback address", address("127.0.1.1/24"), "topology.address-unusable"),
    (
        "head on loopback",
        changed(document(), "nodes", 0, "address", to="127.0.0.1"),
        "nodes.address-unreachable",
    ),
    (
        "rail as management interface",
        changed(document(), "nodes", 0, "lan_interface", to="enp1s0f0np0"),
        "nodes.lan-interface",
    ),
    (
        "Engram rows inside the checkpoint",
        changed(
            document(),
            "nodes",
            0,
            "engram",
            to={"directory": "/models/DeepSeek-V4.1-Flash/engram"},
        ),
        "engram.inside-checkpoint",
    ),
    (
        "prefix loopback",
        changed(document(), "topology", "prefix", to="127.0.0.0/16"),
        "topology.prefix",
    ),
    (
        "twin without address",
        without(addressed(), 1, "enP2p1s0f0np0"),
        "topology.port-without-address",
    ),
    (
        "node without addresses",
        changed(addressed(), "nodes", 2, "addresses", to={}),
        "topology.port-without-address",
    ),
    ("lower-case p", address("10.9.0.1/24", netdev="enp2p1s0f0np0"), "topology.unknown-netdev"),
    ("other interface", address("10.9.0.1/24", netdev="eth0"), "topology.unknown-netdev"),
    ("twins in one subnet", address("10.77.212.9/24"), "topology.twins-share-subnet"),
    ("ends in two subnets", address("10.9.0.1/24"), "topology.cable-subnets-differ"),
    ("same address twice", address("10.77.112.2/24"), "topology.address-used-twice"),
    ("network address", address("10.77.112.0/24"), "topology.address-not-host"),
    ("broadcast address", address("10.77.112.255/24"), "topology.address-not-host"),
    (
        "management network overlaps",
        changed(document(), "management_network", to="10.77.0.0/17"),
        "topology.overlaps-management",
    ),
    (
        "management address in a rail",
        changed(document(), "nodes", 1, "address", to="10.77.112.40"),
        "topology.overlaps-management",
    ),
    (
        "ring with stock NCCL",
        changed(document("ring", 4), "topology", "nccl_library", to=None),
        "topology.ring-nccl",
    ),
    (
        "NCCL library without a ring",
        changed(document(), "topology", "nccl_library", to="/opt/libnccl.so.2"),
        "topology.nccl-library-unused",
    ),
]


@pytest.mark.parametrize(("data", "rule"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_each_rule_is_broken_alone(data: dict[str, Any], rule: str) -> None:
    found = set(rules_of(data)) - {"profile.node-count", "profile.unknown"}
    if rule == "topology.node-count":
        assert rule in found
    else:
        assert found == {rule}
    for finding in findings_of(data):
        assert finding.message
        assert finding.remedy


def test_second_cable_of_a_pair_is_refused() -> None:
    data = cabled({"spark1.p0": "spark2.p0", "spark1.p1": "spark2.p1"}, "pair", 2)
    assert "topology.cable-count" in rules_of(data)


def test_pair_with_different_cages_is_refused() -> None:
    data = cabled({"spark1.p0": "spark2.p1"}, "pair", 2)
    assert "topology.pair-cages-differ" in rules_of(data)


def test_subnet_of_another_cable_is_refused() -> None:
    data = addressed()
    for rank, netdev in ((1, "enp1s0f0np0"), (2, "enp1s0f1np1")):
        data = changed(data, "nodes", rank, "addresses", netdev, to=f"10.77.0.{rank + 1}/16")
    assert set(rules_of(data)) & {"topology.subnet-used-twice", "topology.twins-share-subnet"}


def test_subnet_used_by_two_cables() -> None:
    data = addressed("ring", 4)
    first = data["nodes"][0]["addresses"]["enp1s0f0np0"].rsplit(".", 1)[0]
    # the cable between ranks 2 and 3 takes the subnet of the one between 0 and 1
    data = changed(data, "nodes", 2, "addresses", "enp1s0f0np0", to=f"{first}.30/24")
    data = changed(data, "nodes", 3, "addresses", "enp1s0f1np1", to=f"{first}.40/24")
    assert rules_of(data) == ["topology.subnet-used-twice"]


def test_a_cable_may_be_given_from_both_ends() -> None:
    both = TRIANGLE | {right: left for left, right in TRIANGLE.items()}
    assert (
        rendering_of(cabled(both)).plan == rendering_of(cabled(TRIANGLE)).plan
        or rules_of(cabled(both)) == []
    )


def test_warnings_leave_the_plan() -> None:
    small = changed(document(), "topology", "mtu", to=1500)
    assert rules_of(small, "warning") == ["topology.mtu-small"]
    assert rendering_of(small).plan is not None
    public = changed(document(), "topology", "prefix", to="198.18.0.0/16")
    assert rules_of(public, "warning") == ["topology.prefix-public"]
    unpinned = changed(document("ring", 4), "topology", "nccl_library_sha256", to=None)
    assert rules_of(unpinned, "warning") == ["topology.ring-nccl-unpinned"]


def rails(data: dict[str, Any]) -> dict[str, list[tuple[str, str, str]]]:
    plan = rendering_of(data).plan
    assert plan is not None
    return {
        node.name: [(rail.netdev, rail.rdma, rail.address) for rail in node.rails]
        for node in plan.nodes
    }


def test_triangle_addresses() -> None:
    assert rails(document())["spark1"] == [
        ("enp1s0f0np0", "rocep1s0f0", "10.77.112.1/24"),
        ("enP2p1s0f0np0", "roceP2p1s0f0", "10.77.212.1/24"),
        ("enp1s0f1np1", "rocep1s0f1", "10.77.113.1/24"),
        ("enP2p1s0f1np1", "roceP2p1s0f1", "10.77.213.1/24"),
    ]
    assert rails(document())["spark3"] == [
        ("enp1s0f0np0", "rocep1s0f0", "10.77.113.3/24"),
        ("enP2p1s0f0np0", "roceP2p1s0f0", "10.77.213.3/24"),
        ("enp1s0f1np1", "rocep1s0f1", "10.77.123.3/24"),
        ("enP2p1s0f1np1", "roceP2p1s0f1", "10.77.223.3/24"),
    ]


def test_switch_addresses() -> None:
    assert rails(document("switch", 4))["spark4"] == [
        ("enp1s0f0np0", "rocep1s0f0", "10.77.100.4/24"),
        ("enP2p1s0f0np0", "roceP2p1s0f0", "10.77.200.4/24"),
    ]


def test_a_pair_merges_its_rails_and_a_single_node_has_none() -> None:
    single = rendering_of(document("single", 1)).plan
    assert single is not None
    assert single.nodes[0].rails == []
    assert not [name for name in single.nodes[0].env if name.startswith(("NCCL", "GLOO"))]


def test_peers_of_a_rail_are_the_nodes_on_its_wire() -> None:
    plan = rendering_of(document("ring", 4)).plan
    assert plan is not None
    reached = [{peer.node for rail in node.rails for peer in rail.peers} for node in plan.nodes]
    assert reached == [
        {"spark2", "spark4"},
        {"spark1", "spark3"},
        {"spark2", "spark4"},
        {"spark1", "spark3"},
    ]
