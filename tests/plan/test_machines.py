"""What tells the machines apart (serial, mac) and the LAN address that a node takes itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_appliance.errors import InputError
from spark_appliance.model.plan import Plan
from spark_appliance.workspace import Opened, open_cluster

CLUSTER = """
version: 1
name: pair
profile: stable-tp3
topology: {{kind: triangle}}
management_network: {network}
api: {{key_file: /etc/spark/api-key}}
nodes:
  - {{name: spark1, address: 192.168.1.11, engram: {{directory: /srv/engram}}, {one}}}
  - {{name: spark2, address: 192.168.1.12, engram: {{directory: /srv/engram}}, {two}}}
  - {{name: spark3, address: spark3.lan, engram: {{directory: /srv/engram}}}}
"""


def opened(folder: Path, one: str = "", two: str = "", network: str = "192.168.1.0/24") -> Opened:
    file = folder / "cluster.yaml"
    file.write_text(CLUSTER.format(one=one, two=two, network=network))
    return open_cluster(file)


def plan_of(*words: str, folder: Path, network: str = "192.168.1.0/24") -> Plan:
    return opened(folder, *words, network=network).require_plan()


def test_they_are_in_the_plan(tmp_path: Path) -> None:
    plan = plan_of("serial: S-1", "mac: 4C-BB-47-00-00-0A", folder=tmp_path)
    assert [(node.serial, node.mac) for node in plan.nodes] == [
        ("S-1", None),
        (None, "4c:bb:47:00:00:0a"),
        (None, None),
    ]


@pytest.mark.parametrize(
    ("network", "addresses"),
    [
        ("192.168.1.0/24", ["192.168.1.11/24", "192.168.1.12/24", None]),
        ("192.168.0.0/16", ["192.168.1.11/16", "192.168.1.12/16", None]),
        ("null", [None, None, None]),
        ("10.0.0.0/24", [None, None, None]),
    ],
)
def test_the_lan_address_needs_the_network(
    tmp_path: Path, network: str, addresses: list[str | None]
) -> None:
    plan = plan_of(folder=tmp_path, network=network)
    assert [node.lan_address for node in plan.nodes] == addresses


@pytest.mark.parametrize(
    ("one", "two", "rule"),
    [
        ("serial: S-1", "serial: s-1", "nodes.serial-used-twice"),
        ("mac: '4c:bb:47:00:00:01'", "mac: 4C-BB-47-00-00-01", "nodes.mac-used-twice"),
    ],
)
def test_two_machines_cannot_be_the_same(tmp_path: Path, one: str, two: str, rule: str) -> None:
    assert rule in [problem.rule for problem in opened(tmp_path, one, two).errors]


@pytest.mark.parametrize(
    "one", ["serial: ''", "serial: 'a b'", "serial: 1234", "mac: 4c:bb:47:00:00", "mac: x"]
)
def test_values_that_are_none(tmp_path: Path, one: str) -> None:
    with pytest.raises(InputError) as caught:
        opened(tmp_path, one)
    assert "nodes[0]." in str(caught.value) or "nodes.0" in str(caught.value)


@pytest.mark.parametrize(
    ("one", "remedy"),
    [
        ("serial: '0'", "leave it out and give mac instead"),
        ("serial: None", "leave it out and give mac instead"),
        ("mac: '00:00:00:00:00:00'", "take it from the node's ip link"),
        ("mac: FF-FF-FF-FF-FF-FF", "take it from the node's ip link"),
    ],
)
def test_values_that_no_machine_has(tmp_path: Path, one: str, remedy: str) -> None:
    with pytest.raises(InputError, match=remedy):
        opened(tmp_path, one)
