"""Any valid cluster renders, the same plan every time, with no address used twice."""

from __future__ import annotations

import ipaddress
import json
import random
from typing import Any

import yaml
from clusters import PROFILES, ROOT
from drawn import SHAPES, clusters
from hypothesis import given
from hypothesis import strategies as st

from spark_appliance import lockfile
from spark_appliance.model.cluster import read_cluster
from spark_appliance.model.yamlfile import parse
from spark_appliance.profiles import load_profile
from spark_appliance.render import Rendering, render


def rendered(data: dict[str, Any]) -> Rendering:
    cluster, findings = read_cluster(data)
    assert cluster is not None, findings
    return render(cluster, load_profile(cluster.profile, ROOT))


def lock(data: dict[str, Any]) -> str:
    rendering = rendered(data)
    assert rendering.plan is not None, rendering.findings
    return lockfile.dump(rendering.plan)


@given(clusters())
def test_a_valid_cluster_renders_and_its_addresses_never_collide(data: dict[str, Any]) -> None:
    plan = rendered(data).plan
    assert plan is not None
    rails = [rail for node in plan.nodes for rail in node.rails]
    addresses = [ipaddress.IPv4Interface(rail.address) for rail in rails]
    assert len({address.ip for address in addresses}) == len(addresses)
    assert not {str(address.ip) for address in addresses} & {node.address for node in plan.nodes}
    for node in plan.nodes:
        own = [ipaddress.IPv4Interface(rail.address).network for rail in node.rails]
        assert len(set(own)) == len(own)
        assert len(node.env["NCCL_IB_HCA"].split(",")) == len(own) if own else True
    for rail in rails:
        for peer in rail.peers:
            assert (
                ipaddress.IPv4Address(peer.address) in ipaddress.IPv4Interface(rail.address).network
            )


@given(clusters())
def test_rendering_is_idempotent_and_survives_yaml(data: dict[str, Any]) -> None:
    text = lock(data)
    assert lock(data) == text
    again = parse("f.yaml", yaml.safe_dump(data).encode()).data
    assert lock(again) == text
    assert json.dumps(json.loads(text), sort_keys=True, indent=2, ensure_ascii=False) + "\n" == text


@given(clusters(), st.randoms(use_true_random=False))
def test_order_of_keys_does_not_matter(data: dict[str, Any], rng: random.Random) -> None:
    assert lock(_shuffled(data, rng)) == lock(data)


@given(clusters())
def test_order_of_nodes_is_the_rank_order(data: dict[str, Any]) -> None:
    plan = rendered(data).plan
    assert plan is not None
    assert [node.name for node in plan.nodes] == [node["name"] for node in data["nodes"]]
    assert [node.rank for node in plan.nodes] == list(range(len(plan.nodes)))


@given(clusters(), st.data())
def test_breaking_a_cable_is_always_found(data: dict[str, Any], draw: st.DataObject) -> None:
    cables = data["topology"].get("cables")
    if not cables:
        return
    removed = draw.draw(st.sampled_from(sorted(cables)))
    data["topology"]["cables"] = {key: end for key, end in cables.items() if key != removed}
    assert rendered(data).plan is None


def test_every_bundled_profile_but_the_pair_is_drawn() -> None:
    assert {PROFILES[count] for _, count in SHAPES} == {"single-dev", "stable-tp3", "stable-tp4"}


def _shuffled(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict):
        keys = list(value)
        rng.shuffle(keys)
        return {key: _shuffled(value[key], rng) for key in keys}
    if isinstance(value, list):
        return [_shuffled(item, rng) for item in value]
    return value
