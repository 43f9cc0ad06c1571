"""A node's own plan: what concerns it is there, what concerns others does not change it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from clusters import ROOT, cluster_of, document, rendering_of
from drawn import clusters
from hypothesis import assume, given
from hypothesis import strategies as st

from spark_appliance import lockfile
from spark_appliance.model.plan import NodePlan, Plan
from spark_appliance.node.projection import AUDIENCE, PEER, node_plan, sha256, shared_plan
from spark_appliance.profiles import load_profile
from spark_appliance.render.agreement import agreement_sha256
from spark_appliance.render.arguments import arguments

Data = dict[str, Any]


def plan_of(data: Data) -> Data:
    """Render; the plan as a JSON reader gets it."""
    plan = rendering_of(data).plan
    assert plan is not None, rendering_of(data).findings
    result: Data = json.loads(lockfile.dump(plan))
    return result


def own_plans(data: Data) -> dict[str, Data]:
    plan = plan_of(data)
    return {node["name"]: node_plan(plan, node["name"]) for node in plan["nodes"]}


def shared_of(data: Data) -> str:
    return sha256(shared_plan(plan_of(data)))


def test_every_key_of_the_plan_is_given_to_somebody() -> None:
    assert set(AUDIENCE) == set(Plan.model_fields)
    assert set(AUDIENCE.values()) == {"all", "head", "cables", "peers", "none"}
    assert [key for key, audience in AUDIENCE.items() if audience == "peers"] == ["nodes"]
    assert [key for key, audience in AUDIENCE.items() if audience == "cables"] == ["topology"]
    assert set(NodePlan.model_fields) > PEER >= {"name"}


def test_what_a_worker_and_the_head_get() -> None:
    plan = plan_of(document("triangle", 3))
    everybody = {"engine", "image", "model", "name", "parallel", "ports", "version"}
    worker, head = node_plan(plan, "spark2"), node_plan(plan, "spark1")
    assert set(worker) == everybody | {"nodes", "topology"}
    assert set(head) == set(worker) | {"api", "health", "restart", "router", "start_order"}
    assert [sorted(node) for node in worker["nodes"]] == [
        ["address", "name"],
        sorted(NodePlan.model_fields),
        ["address", "name"],
    ]
    assert len(plan["topology"]["cables"]) == 3
    assert [(c["a"]["node"], c["b"]["node"]) for c in worker["topology"]["cables"]] == [
        ("spark1", "spark2"),
        ("spark2", "spark3"),
    ]


def test_an_unknown_node_and_another_node_s_plan_are_refused() -> None:
    plan = plan_of(document("triangle", 3))
    with pytest.raises(KeyError, match="spark9"):
        node_plan(plan, "spark9")
    with pytest.raises(KeyError, match="spark3"):
        node_plan(node_plan(plan, "spark2"), "spark3")


@given(clusters())
def test_projecting_again_changes_nothing_and_all_share_one_part(data: Data) -> None:
    plan = plan_of(data)
    before = copy.deepcopy(plan)
    for node in plan["nodes"]:
        own = node_plan(plan, node["name"])
        assert node_plan(own, node["name"]) == own
        assert shared_plan(own) == shared_plan(plan)
        assert own["nodes"][node["rank"]] == node
        assert all(own[key] == plan[key] for key in own if key not in ("nodes", "topology"))
    assert shared_plan(shared_plan(plan)) == shared_plan(plan)
    assert plan == before


@given(clusters())
def test_the_ranks_agreement_can_be_read_from_any_rank(data: Data) -> None:
    cluster = cluster_of(data)
    plan = rendering_of(data).plan
    assert plan is not None
    profile = load_profile(cluster.profile, ROOT).profile
    found = {
        agreement_sha256(arguments(profile, cluster, node.rank), node.env, node.nccl_library)
        for node in plan.nodes
    }
    assert found == {plan.engine.agreement_sha256}


def _disk(node: Data) -> None:
    node["engram"] = {"device": "/dev/disk/by-id/nvme-another-one"}


def _ssh(node: Data) -> None:
    node["ssh"] = f"somebody@{node['address']}"


def _lan(node: Data) -> None:
    node["lan_interface"] = "enp9s9"


def _log(node: Data) -> None:
    node["engine"] = {"env": {"NCCL_DEBUG": "INFO"}, "args": {"log-level": "warning"}}


def _patience(node: Data) -> None:
    node["engine"] = {"args": {"watchdog-timeout": 4321}}


def _system(node: Data) -> None:
    node["system"] = "nixos" if node.get("system") == "dgx-os" else "dgx-os"


@given(clusters(), st.sampled_from([_disk, _ssh, _lan, _log, _patience, _system]), st.data())
def test_what_changes_on_one_node_changes_no_other(
    data: Data, change: Callable[[Data], None], draw: st.DataObject
) -> None:
    rank = draw.draw(st.integers(0, len(data["nodes"]) - 1), label="rank")
    assume(change is not _disk or "engram" in data["nodes"][rank])
    changed = copy.deepcopy(data)
    change(changed["nodes"][rank])
    before, after = own_plans(data), own_plans(changed)
    name = data["nodes"][rank]["name"]
    assert {key for key in before if before[key] != after[key]} == {name}
    assert shared_of(data) == shared_of(changed)


def set_at(*path: str | int, to: Any) -> Callable[[Data], None]:
    def change(data: Data) -> None:
        place: Any = data
        for key in path[:-1]:
            place = place.setdefault(key, {}) if isinstance(place, dict) else place[key]
        place[path[-1]] = to

    return change


HEAD, WORKERS, ALL = {"spark1"}, {"spark2", "spark3"}, {"spark1", "spark2", "spark3"}
ROUTER = {"replicas": [{"name": "east", "url": "http://192.168.1.99:8888"}]}
IMAGE = {"digest": "sha256:" + "a" * 64}

CLUSTER_WIDE: dict[str, tuple[Callable[[Data], None], set[str], bool]] = {
    # name: (change, whose own plan changes, whether ranks before and after disagree)
    "length of the LAN prefix": (set_at("management_network", to="192.168.1.0/24"), ALL, False),
    "key file": (set_at("api", "key_file", to="/etc/spark/other-key"), HEAD, False),
    "bind": (set_at("api", "bind", to="192.168.1.11"), HEAD, False),
    "router": (set_at("router", to=ROUTER), HEAD, False),
    "api port": (set_at("api", "port", to=9999), ALL, True),
    "supervisor port": (set_at("ports", "supervisor", to=20099), ALL, True),
    "rendezvous port": (set_at("ports", "rendezvous", to=20098), ALL, True),
    "name": (set_at("name", to="other"), ALL, True),
    "image": (set_at("image", to=IMAGE), ALL, True),
    "served name": (set_at("model", "served_name", to="other"), ALL, True),
    "checkpoint": (set_at("model", "revision", to="0123456"), ALL, True),
    "a flag of all": (set_at("engine", "args", "random-seed", to=7), ALL, True),
    "a variable of all": (set_at("engine", "env", "NCCL_MAX_NCHANNELS", to="4"), ALL, True),
    "a flag that may differ": (set_at("engine", "args", "log-level", to="debug"), ALL, False),
    "a variable that may differ": (set_at("engine", "env", "NCCL_DEBUG", to="INFO"), ALL, False),
    "mtu": (set_at("topology", "mtu", to=4200), ALL, False),
    "addresses of rails": (set_at("topology", "prefix", to="10.88.0.0/16"), ALL, False),
    "weights": (set_at("weights", "mode", to="local"), ALL, True),
    "weights over RDMA": (set_at("weights", "rdma", to=True), ALL, False),
    "address of a worker": (set_at("nodes", 2, "address", to="192.168.1.33"), ALL, True),
    "name of a worker": (set_at("nodes", 2, "name", to="spark4"), ALL, True),
}


@pytest.mark.parametrize("name", CLUSTER_WIDE)
def test_who_is_concerned_by_a_change_of_the_cluster(name: str) -> None:
    change, concerned, disagree = CLUSTER_WIDE[name]
    data = document("triangle", 3)
    changed = copy.deepcopy(data)
    change(changed)
    before, after = own_plans(data), own_plans(changed)
    found = {key for key in before if before[key] != after.get(key)}
    assert found == concerned
    assert plan_of(data) != plan_of(changed)
    assert (shared_of(data) != shared_of(changed)) is disagree


def test_a_cable_concerns_its_two_ends() -> None:
    plan = plan_of(document("triangle", 3))
    changed = copy.deepcopy(plan)
    [cable] = [
        cable
        for cable in changed["topology"]["cables"]
        if {cable["a"]["node"], cable["b"]["node"]} == {"spark2", "spark3"}
    ]
    cable["a"]["cage"], cable["b"]["cage"] = "p9", "p8"
    names = ("spark1", "spark2", "spark3")
    found = {name for name in names if node_plan(plan, name) != node_plan(changed, name)}
    assert found == {"spark2", "spark3"}
    switch = plan_of(document("switch", 4))
    own = node_plan(switch, "spark3")["topology"]["cables"]
    assert [(cable["a"]["node"], cable["b"]) for cable in own] == [("spark3", None)]


def test_a_flag_that_a_profile_sets_for_all_is_part_of_the_agreement() -> None:
    plan = rendering_of(document("triangle", 3)).plan
    four = rendering_of(document("switch", 4)).plan
    assert plan is not None
    assert four is not None
    assert plan.engine.agreement_sha256 != four.engine.agreement_sha256


def test_the_ring_s_own_nccl_is_part_of_the_agreement() -> None:
    data = document("ring", 4)
    changed = copy.deepcopy(data)
    changed["topology"]["nccl_library_sha256"] = "b" * 64
    assert shared_of(data) != shared_of(changed)
