"""Rollouts over the stand-in ssh, with the real node program in fake roots."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from fleet_world import World, make_plan

from spark_appliance import lockfile
from spark_appliance.errors import InputError, OperationError
from spark_appliance.fleet.crew import Crew
from spark_appliance.fleet.install import APPLY_SECONDS, Installer
from spark_appliance.fleet.nixos import ACTIVATE_SECONDS, Nixos
from spark_appliance.fleet.remote import Rehearsal, Remote, StepError
from spark_appliance.fleet.rollout import HOLD_SECONDS, KEEP_SECONDS, Rollout, RolloutError
from spark_appliance.fleet.rolloutstate import NodeState, RolloutState, read, write
from spark_appliance.fleet.serve import Start
from spark_appliance.model.plan import Plan

NAMES = ("spark1", "spark2", "spark3")


class QuickStart(Start):
    """A start that only asks whether the world is ready."""

    def run(self, preflight: object = None) -> float:
        del preflight
        self._start_all()
        return 0.0


def new_plan(port: int = 9000) -> Plan:
    return make_plan(api={"port": port, "key_file": "/etc/spark/api-key"})


def rollout_of(world: World, plan: Plan, **more: Any) -> Rollout:
    crew = Crew.of(plan, rehearsal=more.pop("rehearsal", None))
    return Rollout(
        crew,
        world.base / "rollout.json",
        drain_limit=0,
        root=world.root,
        start=more.pop("start", lambda c: QuickStart(c)),
        **more,
    )


def ports(world: World) -> list[int | None]:
    """Return the API port of the plan on each node: which version lies there."""
    found: list[int | None] = []
    for name in NAMES:
        path = world.node(name) / "etc/spark/plan.json"
        found.append(json.loads(path.read_text())["ports"]["api"] if path.exists() else None)
    return found


def confirmed(world: World) -> list[bool]:
    result = []
    for name in NAMES:
        path = world.node(name) / "var/lib/spark/generations/state.json"
        state = json.loads(path.read_text())
        result.append(state["current"] == state["confirmed"] and state["switching"] is None)
    return result


@pytest.fixture
def old(world: World) -> World:
    """A cluster that has the old version (port 8888) and serves."""
    for name in NAMES:
        world.set(name, "image")
    Installer(world.crew(), world.root).install()
    for name in NAMES:
        world.set(name, "active/spark.target", "active")
    world.forget()
    assert ports(world) == [8888] * 3
    return world


def fail_start(_: Crew) -> Start:
    raise OperationError("not serving: a rank failed")


def test_the_new_version_is_put_served_and_confirmed(old: World) -> None:
    order: list[str] = []
    work = rollout_of(old, new_plan())
    work.crew.board.listen(
        lambda row: order.append(row.node) if row.stage == "writing files" else None
    )
    state = work.run()
    assert state.phase == "done"
    assert ports(old) == [9000] * 3
    assert confirmed(old) == [True] * 3
    # the last rank is the canary
    assert order[0] == "spark3"
    for name in NAMES:
        calls = old.calls(name)
        stopped = calls.index("systemctl stop -- spark.target")
        started = max(i for i, c in enumerate(calls) if c.startswith("systemctl start"))
        assert stopped < started
        # what the stop cut short is not held against the new version
        forgotten = next(i for i, c in enumerate(calls) if c.startswith("systemctl reset-failed"))
        judged = next(i for i, c in enumerate(calls) if i > stopped and c.endswith("report"))
        assert stopped < forgotten < judged


def only_on_spark2(world: World) -> Plan:
    """The plan of the world with another row cache on spark2."""
    data = world.plan.model_dump(mode="json")
    data["source"]["cluster_sha256"] = "0" * 64
    data["nodes"][1]["engram"]["cache_bytes"] += 1
    return Plan.model_validate(data)


def generations(world: World) -> list[int]:
    states = [world.node(name) / "var/lib/spark/generations/state.json" for name in NAMES]
    return [json.loads(path.read_text())["current"] for path in states]


def test_a_change_of_one_node_is_a_generation_there_alone(old: World) -> None:
    newer = only_on_spark2(old)
    state = rollout_of(old, newer).run()
    assert state.phase == "done"
    assert generations(old) == [1, 2, 1]
    assert confirmed(old) == [True] * 3
    rollout_of(old, newer).rollback()
    assert generations(old) == [1, 1, 1]
    assert confirmed(old) == [True] * 3


def test_a_change_of_one_node_goes_back_when_it_does_not_serve(old: World) -> None:
    with pytest.raises(RolloutError, match="every node has its old version again"):
        rollout_of(old, only_on_spark2(old), start=fail_start).run()
    assert generations(old) == [1, 1, 1]
    assert confirmed(old) == [True] * 3
    for name in NAMES:
        assert "systemctl start --no-block -- spark.target" in old.calls(name)


def test_a_canary_that_is_not_healthy_stops_it_and_all_have_the_old_version(old: World) -> None:
    old.report("spark2", status={"units": {"spark-guard.service": {"active": "failed"}}})
    with pytest.raises(RolloutError) as caught:
        rollout_of(old, new_plan()).run(canary="spark2")
    assert "spark2: health: spark-guard.service failed" in str(caught.value)
    assert "every node has its old version again" in str(caught.value)
    assert ports(old) == [8888] * 3
    assert confirmed(old) == [True] * 3
    assert "systemctl start --no-block -- spark.target" in old.calls("spark1")
    # the others were never touched
    state = read(old.base / "rollout.json")
    assert state is not None
    assert [n for n, node in state.nodes.items() if node.touched] == ["spark2"]


def test_a_canary_that_takes_no_new_connection_is_not_healthy(old: World) -> None:
    old.set("spark3", "gone-for-new")
    with pytest.raises(RolloutError, match="spark3: read the state: no SSH connection"):
        rollout_of(old, new_plan()).run()
    assert ports(old) == [8888] * 3


def test_a_cluster_that_does_not_serve_goes_back(old: World) -> None:
    with pytest.raises(RolloutError, match="not serving: a rank failed"):
        rollout_of(old, new_plan(), start=fail_start).run()
    assert ports(old) == [8888] * 3
    assert confirmed(old) == [True] * 3
    with pytest.raises(InputError, match="no rollout was interrupted"):
        rollout_of(old, new_plan()).run(resume=True)


def test_a_lost_node_returns_by_its_own_timer_and_the_rest_at_once(old: World) -> None:
    def lose(_: Crew) -> Start:
        old.set("spark2", "gone")
        raise OperationError("spark2 is gone")

    with pytest.raises(RolloutError) as caught:
        rollout_of(old, new_plan(), start=lose).run()
    assert "what could not be reached returns by itself within 600 s" in str(caught.value)
    assert ports(old) == [8888, 9000, 8888]
    assert confirmed(old) == [True, False, True]
    # its timer fires (the program on the node, as systemd would run it), and it comes back
    old.unset("spark2", "gone")
    remote = old.crew().get("spark2")
    Installer(old.crew(), old.root).call(remote, "timer", "return")
    assert ports(old) == [8888] * 3
    rollout_of(old, new_plan()).rollback()
    assert confirmed(old) == [True] * 3


class Interrupted(BaseException):
    """Ctrl-C, or the control machine's power."""


def interrupt_at(monkeypatch: pytest.MonkeyPatch, method: str, after: int) -> Callable[[], int]:
    """Cut the controller off at the n-th call of one of the rollout's steps."""
    original = getattr(Rollout, method)
    calls = 0

    def cut(self: Rollout, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise Interrupted
        return original(self, *args)

    monkeypatch.setattr(Rollout, method, cut)
    return lambda: calls


@pytest.mark.parametrize(
    ("method", "after"),
    [
        ("_stop", 0),
        ("_put", 0),
        ("_put", 1),
        ("_gate", 0),
        ("_gate", 2),
        ("_serve", 0),
        ("_save", 2),
    ],
)
@pytest.mark.parametrize("then", ["resume", "rollback"])
def test_an_interrupted_controller_resumes_or_goes_back(
    old: World, monkeypatch: pytest.MonkeyPatch, method: str, after: int, then: str
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, method, after)
        with pytest.raises(Interrupted):
            rollout_of(old, new_plan()).run()
    with pytest.raises(InputError, match="rollout --resume"):
        rollout_of(old, new_plan()).run()
    if then == "resume":
        rollout_of(old, new_plan()).run(resume=True)
        assert ports(old) == [9000] * 3
    else:
        rollout_of(old, new_plan()).rollback()
        assert ports(old) == [8888] * 3
        assert "systemctl start --no-block -- spark.target" in old.calls("spark1")
    assert confirmed(old) == [True] * 3


def test_a_resume_after_nodes_went_back_puts_the_new_version_again(
    old: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, "_serve", 0)
        with pytest.raises(Interrupted):
            rollout_of(old, new_plan()).run()
    installer = Installer(old.crew(), old.root)
    for name in ("spark1", "spark3"):
        installer.call(old.crew().get(name), "timer", "return")
    assert ports(old) == [8888, 9000, 8888]
    rollout_of(old, new_plan()).run(resume=True)
    assert ports(old) == [9000] * 3
    assert confirmed(old) == [True] * 3


def test_a_confirmation_that_was_cut_off_is_finished_without_a_new_start(
    old: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Installer.call

    def call(self: Installer, remote: Remote, step: str, *words: str, **more: Any) -> Any:
        if words == ("confirm",) and remote.name == "spark2":
            raise StepError(remote.name, step, "cut off")
        return original(self, remote, step, *words, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Installer, "call", call)
        with pytest.raises(RolloutError, match="rollout --resume, before the nodes return"):
            rollout_of(old, new_plan()).run()
    assert confirmed(old) == [True, False, True]
    old.forget()
    with monkeypatch.context() as patch:
        # the timers run: nothing is built or copied again
        interrupt_at(patch, "_prepare", 0)
        rollout_of(old, new_plan(), start=fail_start).run(resume=True)
    assert confirmed(old) == [True] * 3
    assert ports(old) == [9000] * 3


def test_rollback_of_a_finished_rollout(old: World) -> None:
    rollout_of(old, new_plan()).run()
    rollout_of(old, new_plan()).rollback()
    assert ports(old) == [8888] * 3
    assert confirmed(old) == [True] * 3
    with pytest.raises(InputError, match="no rollout to take back"):
        rollout_of(old, new_plan()).rollback()


def test_a_first_rollout_goes_back_to_nothing(world: World) -> None:
    for name in NAMES:
        world.set(name, "image")
    with pytest.raises(RolloutError, match="not serving"):
        rollout_of(world, new_plan(), start=fail_start).run()
    assert ports(world) == [None] * 3
    assert "systemctl start --no-block -- spark.target" not in world.calls("spark1")


def test_another_plan_cannot_be_resumed(old: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, "_serve", 0)
        with pytest.raises(Interrupted):
            rollout_of(old, new_plan()).run()
    with pytest.raises(InputError, match="another plan"):
        rollout_of(old, new_plan(9001)).run(resume=True)


def test_nothing_is_stopped_when_a_node_cannot_be_prepared(old: World) -> None:
    old.unset("spark2", "image")
    old.set("spark2", "no-registry")
    with pytest.raises(OperationError, match="spark2: pull the image"):
        rollout_of(old, new_plan()).run()
    assert [c for c in old.calls("spark1") if c.startswith("systemctl stop")] == []
    assert ports(old) == [8888] * 3


def test_nodes_that_hang_cost_no_other_node_its_winding(
    old: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    wound: list[str] = []
    deadlines: set[float] = set()
    enough = threading.Event()
    original = Installer.call

    def call(self: Installer, remote: Remote, step: str, *words: str, **more: Any) -> Any:
        if words == ("hold", "--return-after", "6"):
            wound.append(remote.name)
            deadlines.add(more["seconds"])
            if all(wound.count(name) > 1 for name in NAMES) and wound.count("spark3") > 2:
                enough.set()
        return original(self, remote, step, *words, **more)

    class Waiting(QuickStart):
        def run(self, preflight: object = None) -> float:
            # the start takes longer than two rounds, and two nodes do not answer meanwhile
            for name in ("spark1", "spark2"):
                old.set(name, "hangs")
            assert enough.wait(60)
            for name in ("spark1", "spark2"):
                old.unset(name, "hangs")
            return super().run(preflight)

    monkeypatch.setattr(Installer, "call", call)
    rollout_of(old, new_plan(), start=lambda crew: Waiting(crew), hold=6).run()
    # each try ends before the next round
    assert deadlines == {1.0}
    assert confirmed(old) == [True] * 3


def test_every_timer_outlasts_the_confirmation(old: World, monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, list[tuple[str, ...]]] = {name: [] for name in NAMES}
    original = Installer.call

    def call(self: Installer, remote: Remote, step: str, *words: str, **more: Any) -> Any:
        said[remote.name].append(words)
        return original(self, remote, step, *words, **more)

    monkeypatch.setattr(Installer, "call", call)
    rollout_of(old, new_plan()).run()
    assert max(APPLY_SECONDS, ACTIVATE_SECONDS) <= KEEP_SECONDS
    # a confirmation's whole deadline, and a hold for a resume after it
    wound = ("hold", "--return-after", str(KEEP_SECONDS + HOLD_SECONDS))
    assert said == {name: [wound, ("confirm",)] for name in NAMES}


def test_a_damaged_state_file_is_named(old: World) -> None:
    (old.base / "rollout.json").write_text("{")
    with pytest.raises(InputError, match="state cannot be read"):
        rollout_of(old, new_plan()).run()


NODE = {"system": "dgx-os", "old": "1", "new": "", "touched": False}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"phase": "bogus", "nodes": {}}, "no phase: 'bogus'"),
        ({"phase": ["done"]}, "no phase"),
        ({"nodes": {}}, "no state of the canary: 'spark3'"),
        ({"nodes": {"spark3": {**NODE, "system": "bsd"}}}, "no state of a node: spark3"),
        ({"nodes": {"spark3": {**NODE, "old": 1}}}, "no state of a node: spark3"),
        ({"nodes": {"spark3": {**NODE, "touched": "no"}}}, "no state of a node: spark3"),
        ({"nodes": {"spark3": None}}, "argument after"),
        ({"nodes": []}, "has no attribute"),
        ({"more": 1}, "unexpected keyword"),
    ],
)
def test_a_state_that_cannot_be_is_refused(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    path = tmp_path / "rollout.json"
    good = {"version": 1, "plan_sha256": "0", "canary": "spark3", "phase": "done"}
    path.write_text(json.dumps(good | {"nodes": {"spark3": NODE}}))
    assert read(path) is not None
    path.write_text(json.dumps(good | {"nodes": {"spark3": NODE}} | changed))
    with pytest.raises(InputError, match=said):
        read(path)


def stopped_nodes(world: World) -> list[str]:
    return [n for n in NAMES if any(c.startswith("systemctl stop") for c in world.calls(n))]


def state_of(*names: str, system: Literal["nixos", "dgx-os"] = "dgx-os") -> RolloutState:
    nodes = {name: NodeState(system, "1", "2", touched=True) for name in names}
    return RolloutState("0" * 64, names[0], "done", nodes)


def test_a_rollback_with_other_nodes_stops_nothing(old: World) -> None:
    write(old.base / "rollout.json", state_of("spark1", "spark2", "spark9"))
    with pytest.raises(InputError) as caught:
        rollout_of(old, new_plan()).rollback()
    assert "spark9 only in the rollout; spark3 only in the plan" in str(caught.value)
    assert "remedy: use the cluster file of that rollout" in str(caught.value)
    assert stopped_nodes(old) == []


def test_a_rollback_of_nixos_nodes_without_a_flake_stops_nothing(old: World) -> None:
    path = Path(__file__).resolve().parents[2] / "examples/three-spark-triangle"
    plan = lockfile.load(path / "cluster.lock.json")
    before = old.ssh_log()
    write(old.base / "rollout.json", state_of(*NAMES, system="nixos"))
    with pytest.raises(InputError, match="give it with --flake"):
        rollout_of(old, plan).rollback()
    write(old.base / "rollout.json", state_of("spark1", "spark2", system="nixos"))
    with pytest.raises(InputError, match="spark3 only in the plan"):
        rollout_of(old, plan, flake=".").rollback()
    assert old.ssh_log() == before


def test_a_dry_run_names_every_command_in_order_and_runs_none(old: World) -> None:
    rehearsal = Rehearsal()
    before = old.ssh_log()
    rollout_of(old, new_plan(), rehearsal=rehearsal, start=lambda c: Start(c)).run(canary="spark2")
    assert old.ssh_log() == before
    assert not (old.base / "rollout.json").exists()
    steps = [f"{node}: {step}" for node, step, _, _ in rehearsal.commands]
    assert [s for s in steps if "apply files" in s] == [
        "spark2: apply files",
        "spark1: apply files",
        "spark3: apply files",
    ]
    assert steps.index("spark1: stop") < steps.index("spark2: stop")
    assert steps.index("spark3: stop") < steps.index("spark2: apply files")
    assert steps[-6:] == [f"{name}: {step}" for name in NAMES for step in ("hold", "keep")]
    applied = [text for _, step, _, text in rehearsal.commands if step == "apply files"]
    assert all(text is not None and "apply --return-after 600" in text for text in applied)


def test_a_dry_run_for_nixos_has_the_flake_s_commands(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = world.base / "ssh_config"
    config.touch()
    monkeypatch.setenv("SPARK_SSH_CONFIG", str(config))
    monkeypatch.delenv("NIX_SSHOPTS", raising=False)
    path = Path(__file__).resolve().parents[2] / "examples/three-spark-triangle"
    plan = lockfile.load(path / "cluster.lock.json")
    assert [node.system for node in plan.nodes] == ["nixos"] * 3
    rehearsal = Rehearsal()
    rollout_of(world, plan, rehearsal=rehearsal, flake=".", start=lambda c: Start(c)).run()
    steps = [f"{node}: {step}" for node, step, _, _ in rehearsal.commands]
    assert steps[:6] == [
        *(f"control: build {name}" for name in NAMES),
        *(f"control: copy to {name}" for name in NAMES),
    ]
    copies = [argv for _, step, argv, _ in rehearsal.commands if step.startswith("copy to")]
    assert [argv[:3] for argv in copies] == [
        ("env", f"NIX_SSHOPTS=-F {config} -o BatchMode=yes", "nix")
    ] * 3
    armed, tested = steps.index("spark3: arm the return"), steps.index("spark3: activate")
    assert armed < tested < steps.index("spark1: arm the return")
    assert steps[-6:] == [
        f"{name}: {step}" for name in NAMES for step in ("arm the return", "keep")
    ]
    with pytest.raises(InputError, match="give it with --flake"):
        rollout_of(world, plan, rehearsal=Rehearsal()).run()


def test_nix_copy_runs_with_the_configuration(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = world.base / "nix-bin/nix"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$NIX_SSHOPTS" >> {world.base}/nix-options\n')
    program.chmod(0o755)
    config = world.base / "ssh_config"
    config.touch()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SPARK_SSH_CONFIG", str(config))
    monkeypatch.delenv("NIX_SSHOPTS", raising=False)
    Nixos(world.crew().only(["spark1"]), ".").copy({"spark1": "/nix/store/x"})
    assert (world.base / "nix-options").read_text() == f"-F {config} -o BatchMode=yes\n"
