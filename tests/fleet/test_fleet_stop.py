from __future__ import annotations

import pytest
from fleet_world import World

from spark_appliance.fleet.crew import FleetError
from spark_appliance.fleet.drain import rules
from spark_appliance.fleet.stop import stop


def stops(world: World) -> list[str]:
    return [
        line.split(" -- ")[1].split(" ")[0] for line in world.ssh_log() if "systemctl stop" in line
    ]


def test_requests_finish_behind_a_closed_door_then_head_then_workers(world: World) -> None:
    world.put_plan()
    left = iter([3, 1, 0, 0])
    doors: list[bool] = []

    def wait(_: float) -> None:
        doors.append((world.node("spark1") / "nft-rules").exists())
        world.report("spark1", engine={"metrics": {"running": next(left), "waiting": 0}})

    world.report("spark1", engine={"metrics": {"running": 2, "waiting": 2}})
    result = stop(world.crew(), wait=wait)
    assert (result.left, result.closed) == (0, True)
    assert doors == [True, True, True, True]
    assert stops(world)[0] == "spark1"
    assert sorted(stops(world)[1:]) == ["spark2", "spark3"]
    assert not (world.node("spark1") / "nft-rules").exists()


def test_the_export_is_never_stopped(world: World) -> None:
    world.put_plan()
    stop(world.crew())
    for node in world.plan.nodes:
        assert [c for c in world.calls(node.name) if "nfs" in c or ".mount" in c] == []


def test_a_drain_has_a_limit(world: World) -> None:
    world.put_plan()
    world.report("spark1", engine={"metrics": {"running": 1, "waiting": 4}})
    waited: list[float] = []
    result = stop(world.crew(), drain_limit=10, wait=waited.append)
    assert result.left == 5
    assert sum(waited) == 10
    assert len(stops(world)) == 3


def test_an_engine_that_says_nothing_is_not_waited_for(world: World) -> None:
    world.put_plan()
    result = stop(world.crew(), wait=lambda _: pytest.fail("waited"))
    assert result.left is None


def test_without_drain_the_door_stays_as_it_is(world: World) -> None:
    world.put_plan()
    stop(world.crew(), drain_limit=0)
    assert [c for c in world.calls("spark1") if c.startswith("nft")] == []


def test_a_gone_head_is_named_and_the_workers_stop_nevertheless(world: World) -> None:
    world.put_plan()
    world.set("spark1", "gone")
    with pytest.raises(FleetError, match=r"spark1: .*no SSH connection"):
        stop(world.crew())
    assert sorted(set(stops(world)) - {"spark1"}) == ["spark2", "spark3"]


def test_an_interrupted_drain_opens_the_door_again(world: World) -> None:
    world.put_plan()
    world.report("spark1", engine={"metrics": {"running": 1}})

    def wait(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop(world.crew(), wait=wait)
    assert not (world.node("spark1") / "nft-rules").exists()
    assert stops(world) == []


def test_nodes_without_anything_installed_have_nothing_to_stop(world: World) -> None:
    for node in world.plan.nodes:
        world.set(node.name, "no-spark.target")
    stop(world.crew())
    for node in world.plan.nodes:
        assert "systemctl stop -- spark.target" not in world.calls(node.name)


def test_the_door() -> None:
    assert rules(8888) == (
        "table inet spark_drain\n"
        "delete table inet spark_drain\n"
        "table inet spark_drain {\n"
        "  chain input {\n"
        "    type filter hook input priority filter - 10; policy accept;\n"
        '    iifname != "lo" tcp dport 8888 tcp flags & (syn | ack) == syn '
        "reject with tcp reset\n"
        '    iifname != "lo" tcp dport 8888 tcp flags & psh == psh reject with tcp reset\n'
        "  }\n"
        "  chain output {\n"
        "    type filter hook output priority filter - 10; policy accept;\n"
        '    oifname "lo" meta skuid != 0 tcp dport 8888 tcp flags & (syn | ack) == syn '
        "reject with tcp reset\n"
        '    oifname "lo" meta skuid != 0 tcp dport 8888 tcp flags & psh == psh '
        "reject with tcp reset\n"
        "  }\n"
        "}\n"
    )
