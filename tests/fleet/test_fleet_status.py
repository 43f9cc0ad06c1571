from __future__ import annotations

import json

import pytest
from fleet_world import World, make_plan

from spark_appliance import lockfile
from spark_appliance.fleet.crew import Crew
from spark_appliance.fleet.logs import logs
from spark_appliance.fleet.status import look
from spark_appliance.model.plan import Plan


def serving(world: World) -> None:
    world.put_plan()
    world.set("spark1", "ready")
    for name in ("spark1", "spark2", "spark3"):
        world.set(name, "active/spark-engine.service", "active")
    for name in ("spark2", "spark3"):
        world.report(name, engine={"health": 200})


def test_a_cluster_that_serves_is_good(world: World) -> None:
    serving(world)
    overview = look(world.crew())
    assert [item.state for item in overview.nodes] == ["serving"] * 3
    assert overview.ready
    assert overview.good
    assert world.calls("spark2") == ["spark-node --node spark2 report --gpu"]


def test_one_session_a_node_and_no_key_anywhere(world: World) -> None:
    serving(world)
    look(world.crew(), gpu=False)
    assert len(world.ssh_log()) == 3
    assert world.calls("spark1") == ["spark-node --node spark1 report"]


def test_a_gone_node_is_part_of_the_answer(world: World) -> None:
    serving(world)
    world.set("spark3", "gone")
    overview = look(world.crew())
    assert [item.state for item in overview.nodes] == ["serving", "serving", "gone"]
    error = str(overview.nodes[2].error)
    assert error.startswith("read the state: no SSH connection")  # the table names the node
    assert "    remedy: " in error
    assert overview.ready
    assert not overview.good


def test_drift_from_the_plan_is_named(world: World) -> None:
    serving(world)
    other = make_plan(api={"port": 9999, "key_file": "/etc/spark/api-key"})
    (world.node("spark2") / "etc/spark/plan.json").write_text(lockfile.dump_own(other, "spark2"))
    world.report(
        "spark3",
        engine={"health": 200},
        status={
            "rails": [{"netdev": "enp1s0f0np0", "missing": ["no carrier"]}],
            "engram": [{"name": "engram-l1-r2of3.bin", "good": False}],
        },
        versions={"generation": 4, "confirmed": 3},
    )
    overview = look(world.crew())
    assert overview.nodes[1].drift == ("the node has another plan",)
    assert overview.nodes[2].drift == (
        "generation 4 is on trial, 3 is confirmed",
        "enp1s0f0np0: no carrier",
        "not packed: engram-l1-r2of3.bin",
    )
    assert not overview.good


def test_what_runs_is_compared_and_not_only_what_lies_there(world: World) -> None:
    serving(world)
    own = lockfile.own_sha256(world.plan, "spark1")
    for name, plan in (("spark1", own), ("spark2", "0" * 64), ("spark3", "0" * 64)):
        world.report(name, engine={"health": 200}, status={"supervisor": {"plan": plan}})
        if name != "spark3":  # there the file is what a supervisor left that was stopped
            world.set(name, "active/spark-supervisor.service", "active")
    overview = look(world.crew())
    assert [node.drift for node in overview.nodes] == [
        (),
        ("runs an older plan: spark-appliance restart",),
        (),
    ]
    assert not overview.good


def test_edited_files_are_named_with_what_to_do(world: World) -> None:
    serving(world)
    changes = [("/etc/a", "replace"), ("/etc/b", "create"), ("/etc/c", "chmod")]
    edited = [{"path": path, "change": change, "foreign": False} for path, change in changes]
    world.report("spark2", engine={"health": 200}, edited=edited)
    overview = look(world.crew())
    assert overview.nodes[1].drift == (
        "/etc/a was edited: spark-appliance install --adopt puts it back",
        "/etc/b is missing: spark-appliance install --adopt puts it back",
        "/etc/c has another mode: spark-appliance install --adopt puts it back",
    )
    assert not overview.good


def test_a_change_elsewhere_is_no_drift(world: World) -> None:
    """The control machine has a newer plan: it says something new to spark2 alone."""
    serving(world)
    data = world.plan.model_dump(mode="json")
    data["source"]["cluster_sha256"] = "0" * 64
    data["nodes"][1]["engram"]["device"] = "/dev/disk/by-id/nvme-new"
    newer = Plan.model_validate(data)
    overview = look(Crew.of(newer))
    assert [node.drift for node in overview.nodes] == [(), ("the node has another plan",), ()]


@pytest.mark.parametrize(
    ("engine", "health", "state"),
    [
        ("active", 200, "serving"),
        ("active", None, "starting"),
        ("activating", None, "starting"),
        ("inactive", None, "stopped"),
        ("failed", None, "failed"),
    ],
)
def test_the_word_for_a_worker(world: World, engine: str, health: int | None, state: str) -> None:
    serving(world)
    world.set("spark2", "active/spark-engine.service", engine)
    world.report("spark2", engine={"health": health})
    assert look(world.crew()).nodes[1].state == state


def test_the_json_has_its_documented_shape(world: World) -> None:
    serving(world)
    world.report("spark1", engine={"metrics": {"tokens_per_second": 71.5, "running": 2}})
    data = json.loads(json.dumps(look(world.crew()).as_json()))
    assert data["version"] == 1
    assert data["engine"] == {
        "tokens_per_second": 71.5,
        "running": 2.0,
        "waiting": None,
        "kv_use": None,
        "accept_length": None,
    }
    assert set(data) == {"version", "cluster", "url", "ready", "good", "engine", "nodes"}
    assert set(data["nodes"][0]) == {
        "name",
        "rank",
        "state",
        "error",
        "drift",
        "troubles",
        "report",
    }


def test_logs_of_all_nodes_without_keys(world: World) -> None:
    world.put_plan()
    for name in ("spark1", "spark2", "spark3"):
        world.journal(name, "spark-engine.service", f"server_args={{'api_key': 'abc{name}'}}")
    lines: list[tuple[str, str]] = []
    logs(world.crew(), lambda *line: lines.append(line), lines=5, follow=False)
    assert [name for name, _ in lines] == ["spark1", "spark2", "spark3"]
    assert not [text for _, text in lines if "abc" in text]


def test_following_logs_reads_new_lines_until_interrupted(world: World) -> None:
    world.put_plan()
    world.journal("spark2", "spark-engine.service", "api_key='abc' line")
    seen: list[str] = []

    def show(_: str, line: str) -> None:
        seen.append(line)
        if len(seen) == 1:
            assert "abc" not in line
            world.journal("spark2", "spark-engine.service", "second")
        else:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        logs(world.crew().only(["spark2"]), show, lines=5, follow=True)
    assert "second" in seen[1]
