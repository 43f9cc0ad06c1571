"""Rollouts of NixOS nodes over the stand-in ssh: nothing is rehearsed, every script runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fleet_world import World, environment, make_world, remote_words
from nixos_world import Nodes, add_nixos, nixos_plan, system_of

from spark_appliance.errors import InputError, OperationError
from spark_appliance.fleet.crew import Crew
from spark_appliance.fleet.remote import AS_ROOT
from spark_appliance.fleet.rollout import Rollout, RolloutError
from spark_appliance.fleet.rolloutstate import read
from spark_appliance.fleet.serve import Start

NAMES = ("spark1", "spark2", "spark3")
RETURN = (
    "/run/current-system/sw/bin/systemctl stop spark.target; "
    "/nix/var/nix/profiles/system/bin/switch-to-configuration test; "
    "/run/current-system/sw/bin/systemctl start --no-block spark.target"
)


class QuickStart(Start):
    """A start that ends when the units are started."""

    def run(self, preflight: object = None) -> float:
        del preflight
        self._start_all()
        return 0.0


class Interrupted(BaseException):
    """Ctrl-C, or the control machine's power."""


@pytest.fixture
def nixos(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """Three nodes that run the system 'old'; Nix builds the system 'new'."""
    world = make_world(quick_path / "fleet", nixos_plan())
    (world.base / "run").mkdir(mode=0o700)
    for name, value in environment(world).items():
        monkeypatch.setenv(name, value)
    for name in ("NIX_SSHOPTS", "SPARK_SSH_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    nodes = add_nixos(world)
    nodes.build(nixos_plan(9000), "new")
    return nodes


def rollout_of(nodes: Nodes, **more: Any) -> Rollout:
    return Rollout(
        Crew.of(nixos_plan(9000)),
        nodes.world.base / "rollout.json",
        flake="/flake",
        drain_limit=0,
        start=more.pop("start", lambda crew: QuickStart(crew)),
        **more,
    )


def fail_start(_: Crew) -> Start:
    raise OperationError("not serving: a rank failed")


def calls(world: World, name: str) -> list[str]:
    """Return what ran on a node and changes something, in order."""
    return [
        call
        for call in world.calls(name)
        if not call.startswith(("readlink", "spark-node", "nft", "systemctl cat", "date"))
        and not call.startswith("systemctl reset-failed")
    ]


def armed(seconds: int = 600) -> list[str]:
    return [
        "systemctl stop spark-return.timer",
        (
            f"systemd-run --quiet --unit=spark-return --on-active={seconds}s "
            f"--timer-property=AccuracySec=1s --collect -- /bin/sh -c {RETURN}"
        ),
    ]


def activated(label: str, name: str) -> list[str]:
    program = f"{system_of(label, name)}/bin/switch-to-configuration"
    return [
        (
            "systemd-run --quiet --wait --collect --pipe --service-type=exec "
            f"--unit=spark-activate -- {program} test"
        ),
        f"{program} test",
    ]


def kept(label: str, name: str) -> list[str]:
    path = system_of(label, name)
    return [
        f"nix-env --profile /nix/var/nix/profiles/system --set {path}",
        f"{path}/bin/switch-to-configuration boot",
        "systemctl stop spark-return.timer",
    ]


STOPPED = ["systemctl stop -- spark.target"]
STARTED = ["systemctl start --no-block -- spark.target"]


def test_a_rollout_tries_the_new_system_everywhere_and_then_makes_it_the_default(
    nixos: Nodes,
) -> None:
    world = nixos.world
    while_serving: list[Any] = []

    class Looking(QuickStart):
        def run(self, preflight: object = None) -> float:
            while_serving.extend([nixos.running(), nixos.booting(), nixos.timers()])
            return super().run(preflight)

    state = rollout_of(nixos, start=lambda crew: Looking(crew)).run()
    assert state.phase == "done"
    # until it serves, a reboot or the timer leads back
    assert while_serving == [["new"] * 3, ["old"] * 3, [True] * 3]
    assert (nixos.running(), nixos.booting()) == (["new"] * 3, ["new"] * 3)
    assert nixos.timers() == [False] * 3
    nix = "nix --extra-experimental-features"
    assert nixos.nix_log()[:3] == [
        f"NIX_SSHOPTS= {nix} nix-command flakes build --no-link --print-out-paths -- "
        f"/flake#nixosConfigurations.{name}.config.system.build.toplevel"
        for name in NAMES
    ]
    assert sorted(nixos.nix_log()[3:]) == [
        f"NIX_SSHOPTS=-o BatchMode=yes {nix} nix-command copy --to ssh-ng://{name} -- "
        f"{system_of('new', name)}"
        for name in NAMES
    ]
    for name in NAMES:
        started = [c for c in calls(world, name) if c.startswith("systemctl start")]
        assert len(started) == 1
        assert calls(world, name) == [
            *STOPPED,
            *armed(),
            *activated("new", name),
            *started,
            *armed(1200),
            *kept("new", name),
        ]


def test_the_canary_is_looked_at_before_any_other_node_changes(nixos: Nodes) -> None:
    rollout_of(nixos).run(canary="spark2")
    lines = nixos.world.ssh_log()
    node = [line.split(" -- ", 1)[1].split(" ", 1)[0] for line in lines]
    words = [remote_words(line) for line in lines]
    root = list(AS_ROOT)
    script = [*root, "sh", "-s"]
    assert words[0] == ["readlink", "-f", "/run/current-system", "/nix/var/nix/profiles/system"]
    changes = [n for n, w in enumerate(words) if w == script or "spark-activate" in " ".join(w)]
    looked = [
        n for n, w in enumerate(words) if w[-1] == "report" and "ControlMaster=auto" not in lines[n]
    ]
    # armed, activated, looked at over a connection of its own; only then the others
    assert [node[n] for n in changes[:2]] == ["spark2"] * 2
    assert words[changes[0]] == script
    assert words[changes[1]] == [
        *root,
        *("systemd-run", "--quiet", "--wait", "--collect", "--pipe"),
        *("--service-type=exec", "--unit=spark-activate", "--"),
        *(f"{system_of('new', 'spark2')}/bin/switch-to-configuration", "test"),
    ]
    assert node[looked[0]] == "spark2"
    assert words[looked[0]] == [*root, "spark-node", "--node", "spark2", "report"]
    assert changes[1] < looked[0] < changes[2]
    assert sorted(node[n] for n in changes[2:6]) == ["spark1"] * 2 + ["spark3"] * 2


@pytest.mark.parametrize("how", ["unhealthy", "another plan", "not activated"])
def test_a_canary_that_fails_goes_back_and_the_others_were_never_changed(
    nixos: Nodes, how: str
) -> None:
    world = nixos.world
    new = world.base / system_of("new", "spark3").lstrip("/")
    match how:
        case "unhealthy":
            world.report("spark3", status={"units": {"spark-guard.service": {"active": "failed"}}})
            said = "spark3: health: spark-guard.service failed"
        case "another plan":
            (new / "plan.json").write_text(
                (world.node("spark3") / "etc/spark/plan.json").read_text()
            )
            said = "spark3: health: the node does not have the new plan"
        case _:
            (new / "broken").touch()
            said = "spark3: activate: units failed"
    with pytest.raises(RolloutError) as caught:
        rollout_of(nixos).run()
    assert said in str(caught.value)
    assert "every node has its old version again" in str(caught.value)
    assert (nixos.running(), nixos.booting()) == (["old"] * 3, ["old"] * 3)
    assert nixos.timers() == [False] * 3
    assert calls(world, "spark3") == [
        *STOPPED,
        *armed(),
        *activated("new", "spark3"),
        *STOPPED,
        *activated("old", "spark3"),
        *kept("old", "spark3"),
        *STARTED,
    ]
    for name in ("spark1", "spark2"):
        assert calls(world, name) == [*STOPPED, *STOPPED, *STARTED]
    state = read(world.base / "rollout.json")
    assert state is not None
    assert state.phase == "returned"
    assert [n for n, node in state.nodes.items() if node.touched] == ["spark3"]


def test_a_cluster_that_does_not_serve_goes_back(nixos: Nodes) -> None:
    with pytest.raises(RolloutError, match="not serving: a rank failed"):
        rollout_of(nixos, start=fail_start).run()
    assert (nixos.running(), nixos.booting()) == (["old"] * 3, ["old"] * 3)
    assert nixos.timers() == [False] * 3
    for name in NAMES:
        assert nixos.world.calls(name)[-1] == STARTED[0]


def test_rollback_of_a_finished_rollout(nixos: Nodes) -> None:
    rollout_of(nixos).run()
    nixos.world.forget()
    rollout_of(nixos).rollback()
    assert (nixos.running(), nixos.booting()) == (["old"] * 3, ["old"] * 3)
    for name in NAMES:
        assert calls(nixos.world, name) == [
            *STOPPED,
            *activated("old", name),
            *kept("old", name),
            *STARTED,
        ]
    with pytest.raises(InputError, match="no rollout to take back"):
        rollout_of(nixos).rollback()


def cut_off(patch: pytest.MonkeyPatch, method: str, after: int) -> None:
    """Cut the controller off at the call of a step after the first ``after`` ones."""
    original = getattr(Rollout, method)
    count = 0

    def step(self: Rollout, *args: Any) -> Any:
        nonlocal count
        count += 1
        if count > after:
            raise Interrupted
        return original(self, *args)

    patch.setattr(Rollout, method, step)


@pytest.mark.parametrize(
    ("method", "after", "running"),
    [
        ("_stop", 0, ["old", "old", "old"]),
        ("_put", 0, ["old", "old", "old"]),
        ("_gate", 0, ["old", "old", "new"]),
        ("_gate", 1, ["new", "new", "new"]),
        ("_serve", 0, ["new", "new", "new"]),
    ],
)
@pytest.mark.parametrize("then", ["resume", "rollback", "timers, resume", "timers, rollback"])
def test_an_interrupted_controller_resumes_or_goes_back(
    nixos: Nodes,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    after: int,
    running: list[str],
    then: str,
) -> None:
    with monkeypatch.context() as patch:
        cut_off(patch, method, after)
        with pytest.raises(Interrupted):
            rollout_of(nixos).run()
    assert nixos.running() == running
    assert nixos.booting() == ["old"] * 3
    # whoever has the new system goes back by itself
    assert nixos.timers() == [label == "new" for label in running]
    with pytest.raises(InputError, match="rollout --resume"):
        rollout_of(nixos).run()
    if then.startswith("timers"):
        for name, label in zip(NAMES, running, strict=True):
            if label == "new":
                nixos.fire(name)
                assert nixos.world.calls(name)[-1] == "systemctl start --no-block spark.target"
        assert nixos.running() == ["old"] * 3
    if then.endswith("resume"):
        assert rollout_of(nixos).run(resume=True).phase == "done"
        assert (nixos.running(), nixos.booting()) == (["new"] * 3, ["new"] * 3)
    else:
        rollout_of(nixos).rollback()
        assert (nixos.running(), nixos.booting()) == (["old"] * 3, ["old"] * 3)
        assert nixos.world.calls("spark1")[-1] == STARTED[0]
    assert nixos.timers() == [False] * 3


def test_a_default_that_was_not_set_everywhere_is_finished_without_a_build_or_a_start(
    nixos: Nodes,
) -> None:
    world = nixos.world
    world.set("spark2", "fail-nix-env")
    with pytest.raises(RolloutError, match="rollout --resume, before the nodes return") as caught:
        rollout_of(nixos).run()
    assert "spark2: keep: error: disk full" in str(caught.value)
    assert nixos.booting() == ["new", "old", "new"]
    # the node that could not keep it still goes back by itself
    assert nixos.timers() == [False, True, False]
    world.unset("spark2", "fail-nix-env")
    built = nixos.nix_log()
    world.forget()
    rollout_of(nixos, start=fail_start).run(resume=True)
    assert nixos.nix_log() == built
    assert nixos.booting() == ["new"] * 3
    assert nixos.timers() == [False] * 3
    for name in NAMES:
        assert calls(world, name) == [*armed(1200), *kept("new", name)]


def test_a_lost_node_returns_by_its_own_timer_and_the_rest_at_once(nixos: Nodes) -> None:
    def lose(_: Crew) -> Start:
        nixos.world.set("spark2", "gone")
        raise OperationError("spark2 is gone")

    with pytest.raises(RolloutError, match="returns by itself within 600 s"):
        rollout_of(nixos, start=lose).run()
    assert nixos.running() == ["old", "new", "old"]
    assert nixos.booting() == ["old"] * 3
    assert nixos.timers() == [False, True, False]
    nixos.fire("spark2")
    assert nixos.running() == ["old"] * 3
    nixos.world.unset("spark2", "gone")
    rollout_of(nixos).rollback()
    assert nixos.running() == ["old"] * 3
    assert nixos.timers() == [False] * 3


def test_a_node_that_runs_what_it_does_not_boot_is_refused_before_anything_stops(
    nixos: Nodes,
) -> None:
    nixos.world.set("spark1", "current-system", f"{system_of('hand', 'spark1')}\n")
    with pytest.raises(OperationError, match="it runs another system than the one it boots"):
        rollout_of(nixos).run()
    assert [calls(nixos.world, name) for name in NAMES] == [[], [], []]
