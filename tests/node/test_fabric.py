from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from spark_appliance.node.errors import NodeError
from spark_appliance.node.fabric import Fabric, read_environment
from spark_appliance.node.plan import NodeContext, read_context

from .conftest import FakeClock, FakeRunner, Log, Sysfs, mapped_gid


class World:
    """A node with healthy rails and peers that answer, until told otherwise."""

    def __init__(
        self, plan: dict[str, Any], root: Path, context: NodeContext, clock: FakeClock, log: Log
    ) -> None:
        self.plan = plan
        self.node = plan["nodes"][0]
        self.root, self.context, self.clock, self.log = root, context, clock, log
        self.sysfs = Sysfs(root, self.node)
        self.sysfs.build()
        self.silent: set[str] = set()
        self.small_only: set[str] = set()
        self.ip = (0, "")
        self.runner = FakeRunner(self.answer)
        self.env_file = root / "run/spark/fabric.env"

    def answer(self, argv: Sequence[str]) -> tuple[int, str]:
        if argv[0] == "ip":
            return self.ip if self.ip != (0, "") else (0, self.sysfs.ip_json())
        target = argv[-1]
        if target in self.silent or ("-s" in argv and target in self.small_only):
            return 1, ""
        return 0, ""

    def run(self, deadline: float = 30) -> None:
        Fabric(self.context, self.runner, self.clock, self.log.journal, deadline).run()

    def fails(self, deadline: float = 30) -> str:
        with pytest.raises(NodeError) as caught:
            self.run(deadline)
        assert not self.env_file.exists()
        return str(caught.value)

    @property
    def rail(self) -> dict[str, Any]:
        return self.node["rails"][0]


@pytest.fixture
def world(
    plan: dict[str, Any],
    root: Path,
    context_of: Callable[..., NodeContext],
    clock: FakeClock,
    log: Log,
) -> World:
    return World(plan, root, context_of(plan), clock, log)


def test_writes_the_index_that_all_agree_on(world: World) -> None:
    world.run()
    text = world.env_file.read_text()
    assert text.splitlines()[1:] == ["NCCL_IB_GID_INDEX=3"]
    assert read_environment(world.env_file) == {"NCCL_IB_GID_INDEX": "3"}
    assert world.log.lines[-1] == "<5>fabric ready: 4 rails, every peer answers"


def test_pings_each_peer_on_its_rail_small_then_full(world: World) -> None:
    world.run()
    assert world.runner.calls[0] == ["ip", "-json", "-4", "addr", "show"]
    rail = world.rail
    peer = rail["peers"][0]["address"]
    base = ["ping", "-n", "-q", "-I", rail["netdev"], "-W", "1"]
    pings = [call for call in world.runner.calls if call[0] == "ping"]
    assert pings[:2] == [
        [*base, "-c", "1", peer],
        [*base, "-c", "3", "-i", "0.2", "-M", "do", "-s", "8972", peer],
    ]
    assert len(pings) == 2 * sum(len(rail["peers"]) for rail in world.node["rails"])


def test_different_indices_leave_it_unset_and_say_so(world: World) -> None:
    other = world.node["rails"][1]
    world.sysfs.drop_gid(other, 3)
    world.sysfs.gid(other, 5, mapped_gid(other["address"]), "RoCE v2")
    world.run()
    assert read_environment(world.env_file) == {}
    assert "NCCL_IB_GID_INDEX" not in world.env_file.read_text()
    [warning] = [line for line in world.log.lines if line.startswith("<4>")]
    assert f"{world.rail['rdma']}: 3" in warning
    assert f"{other['rdma']}: 5" in warning


@pytest.mark.parametrize("wrong", ["type", "address", "netdev", "none"])
def test_a_gid_that_matches_only_in_part_is_none(world: World, wrong: str) -> None:
    rail = world.rail
    world.sysfs.drop_gid(rail, 3)
    gid = mapped_gid(rail["address"])
    if wrong == "type":
        world.sysfs.gid(rail, 3, gid, "IB/RoCE v1")
    elif wrong == "address":
        world.sysfs.gid(rail, 3, mapped_gid("10.9.9.9/24"), "RoCE v2")
    elif wrong == "netdev":
        world.sysfs.gid(rail, 3, gid, "RoCE v2", world.node["rails"][1]["netdev"])
    message = world.fails()
    address = rail["address"].split("/")[0]
    expected = f"{rail['rdma']} has no RoCE v2 GID for {address} on {rail['netdev']} (seen: 0: "
    assert expected in message
    assert "fe80:" in message


def test_an_empty_gid_table_is_said(world: World) -> None:
    for index in (0, 1, 2, 3):
        world.sysfs.drop_gid(world.rail, index)
    assert "(seen: an empty GID table)" in world.fails()


def test_each_missing_piece_is_named_with_its_cable(world: World) -> None:
    first, second, third, fourth = world.node["rails"]
    world.sysfs.net(first, "operstate", "down")
    world.sysfs.net(second, "mtu", "1500")
    (world.sysfs.port(third) / "state").write_text("1: DOWN\n")
    (world.sysfs.port(third) / "phys_state").write_text("3: Disabled\n")
    fourth["address"] = "10.1.1.1/24"  # what ip then says differs from the plan
    message = world.fails()
    assert "spark1: the fabric is not up after 30 s" in message
    assert f"rail {first['netdev']} (cable spark1.p0 to spark2.p1): link is down" in message
    assert f"rail {second['netdev']}" in message
    assert "MTU is 1500, the plan says 9000" in message
    assert f"RDMA port of {third['rdma']} is '1: DOWN' (3: Disabled)" in message
    assert "is not there (the netdev has 10.1.1.1/24)" in message


def test_devices_that_do_not_exist_are_said_with_those_that_do(world: World) -> None:
    rail = world.rail
    (world.root / f"sys/class/net/{rail['netdev']}").rename(world.root / "sys/class/net/eth9")
    device = world.root / f"sys/class/infiniband/{rail['rdma']}"
    device.rename(device.parent / "mlx5_0")
    message = world.fails()
    assert f"netdev {rail['netdev']} does not exist (there are: " in message
    assert "eth9" in message
    assert f"RDMA device {rail['rdma']} does not exist (there are: " in message
    assert "mlx5_0" in message


def test_waits_for_a_link_that_comes_up(world: World, clock: FakeClock) -> None:
    world.sysfs.net(world.rail, "operstate", "down")
    clock.events.append((12.0, lambda: world.sysfs.net(world.rail, "operstate", "up")))
    world.run()
    assert 12 <= clock.time < 15
    waiting = [line for line in world.log.lines if "waiting" in line]
    assert len(waiting) == 1  # said once, not every second


def test_the_deadline_bounds_everything(world: World, clock: FakeClock) -> None:
    world.sysfs.net(world.rail, "operstate", "down")
    world.fails(deadline=7)
    assert clock.time <= 8


def test_a_silent_peer_is_named_with_rail_and_cable(world: World) -> None:
    peer = world.rail["peers"][0]
    world.silent.add(peer["address"])
    own = world.rail["address"].split("/")[0]
    assert world.fails() == (
        f"spark1 {own} -> spark2 {peer['address']} on rail {world.rail['netdev']} "
        "(cable spark1.p0 to spark2.p1): no answer within 30 s: check that spark2 is up, its "
        "address, and the cable"
    )


def test_a_peer_that_only_answers_small_packets_has_the_wrong_mtu(world: World) -> None:
    peer = world.rail["peers"][0]
    world.small_only.add(peer["address"])
    message = world.fails()
    assert "small packets pass, unfragmented ones of 8972 bytes do not: set MTU 9000" in message


def test_a_peer_that_comes_later_is_waited_for(world: World, clock: FakeClock) -> None:
    peer = world.rail["peers"][0]["address"]
    world.silent.add(peer)
    clock.events.append((5.0, world.silent.clear))
    world.run()
    assert world.env_file.exists()


def test_a_stale_file_never_survives_a_failure(world: World) -> None:
    world.run()
    world.silent.add(world.rail["peers"][0]["address"])
    world.fails()


@pytest.mark.parametrize("output", ["no json", "{}", '["x"]', '[{"ifname": 1, "addr_info": [1]}]'])
def test_an_ip_without_json_is_an_error(world: World, output: str) -> None:
    world.ip = (0, output)
    message = world.fails(deadline=1)
    assert "did not answer the JSON of iproute2" in message or "no IPv4 address" in message


def test_ip_that_fails_is_an_error(world: World) -> None:
    world.ip = (1, "no such thing")
    assert world.fails() == "'ip -json -4 addr show' failed: no such thing"


def test_reading_without_fabric_says_what_to_look_at(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match=r"is spark-fabric\.service up"):
        read_environment(tmp_path / "fabric.env")


def with_lan(world: World, *addresses: str) -> None:
    """Take the address out of the plan, as for a node with a host name, and give it to the LAN."""
    del world.node["env"]["SGLANG_HOST_IP"]
    (world.root / "etc/spark/plan.json").write_text(json.dumps(world.plan))
    world.context = read_context(world.root / "etc/spark/plan.json", "spark1", world.root)
    links = json.loads(world.sysfs.ip_json())
    info = [{"local": address, "prefixlen": 24} for address in addresses]
    links.append({"ifname": world.node["lan_interface"], "addr_info": info})
    world.ip = (0, json.dumps(links))


def test_a_node_with_a_host_name_gets_its_address_from_the_lan(world: World) -> None:
    with_lan(world, "192.168.7.5", "192.168.7.6")
    world.run()
    assert read_environment(world.env_file) == {
        "SGLANG_HOST_IP": "192.168.7.5",
        "NCCL_IB_GID_INDEX": "3",
    }


def test_a_lan_without_an_address_is_said(world: World) -> None:
    with_lan(world)
    assert world.fails() == (
        "spark1: enP7s7 has no IPv4 address, so SGLANG_HOST_IP cannot be set: give it one, or "
        "correct nodes[].lan_interface in the cluster file (services.spark.fabric.lanInterface in "
        "hand-written options)"
    )


def test_a_hand_written_plan_without_a_lan_leaves_the_address_to_the_engine(world: World) -> None:
    world.node["lan_interface"] = None
    with_lan(world)
    world.run()
    assert read_environment(world.env_file) == {"NCCL_IB_GID_INDEX": "3"}
