"""Installs through the stand-in ssh: the real script, the real node program, fake roots."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from fleet_world import DIGEST, World, make_plan

from spark_appliance import node_zipapp
from spark_appliance.dgxos.render import node_files
from spark_appliance.fleet.crew import Crew, FleetError
from spark_appliance.fleet.evidence import RunFolder
from spark_appliance.fleet.install import Installer
from spark_appliance.fleet.nixos import Nixos
from spark_appliance.fleet.remote import Rehearsal, StepError
from spark_appliance.model.plan import Plan


@pytest.fixture
def rooted(world: World) -> Installer:
    """An installer whose root is each node's own folder."""
    return Installer(world.crew(), world.root)


@pytest.fixture
def first(world: World) -> Installer:
    """The same for the head alone: every file is flushed to the disk, which takes its time."""
    return Installer(world.crew().only(["spark1"]), world.root)


def installed(world: World, name: str) -> dict[str, bytes]:
    root = world.node(name)
    found = {}
    for top in ("etc", "usr"):
        for path in (root / top).rglob("*"):
            if path.is_symlink():
                found["/" + str(path.relative_to(root))] = str(path.readlink()).encode()
            elif path.is_file():
                found["/" + str(path.relative_to(root))] = path.read_bytes()
    return found


def wanted(plan: Plan, name: str) -> dict[str, bytes]:
    node = plan.node(name)
    assert node is not None
    return {file.path: file.content for file in node_files(plan, node, node_zipapp.build())}


def test_every_node_gets_its_files_and_its_image(world: World, rooted: Installer) -> None:
    applied = rooted.install()
    for node in world.plan.nodes:
        assert installed(world, node.name) == wanted(world.plan, node.name)
        assert applied[node.name].generation == 1
        assert world.calls(node.name) == [
            f"docker image inspect --format {{{{.Id}}}} registry.lan/spark-engine@{DIGEST}",
            f"docker pull --quiet registry.lan/spark-engine@{DIGEST}",
        ]
    again = rooted.install()
    assert {name: a.changes for name, a in again.items()} == dict.fromkeys(again, ())


def test_a_diff_changes_nothing(world: World, rooted: Installer) -> None:
    answers = rooted.diff()
    assert {name: installed(world, name) for name in answers} == {n: {} for n in answers}
    assert "+++ /etc/spark/plan.json" in answers["spark2"]["diff"]
    assert world.calls("spark1") == []


def test_foreign_files_are_named_with_what_to_do(world: World, rooted: Installer) -> None:
    world.set("spark2", "etc/spark/plan.json", "somebody's\n")
    some = Installer(rooted.crew.only(["spark1", "spark2"]), world.root)
    with pytest.raises(FleetError) as caught:
        some.install()
    assert list(caught.value.failures) == ["spark2"]
    text = str(caught.value)
    assert "/etc/spark/plan.json: is not ours" in text
    assert "spark-appliance install --diff --node spark2" in text
    assert installed(world, "spark2") == {"/etc/spark/plan.json": b"somebody's\n"}
    assert installed(world, "spark1") == wanted(world.plan, "spark1")
    second = Installer(rooted.crew.only(["spark2"]), world.root)
    second.install(adopt=True)
    assert installed(world, "spark2") == wanted(world.plan, "spark2")
    second.uninstall()
    assert installed(world, "spark2") == {"/etc/spark/plan.json": b"somebody's\n"}


def test_uninstall_leaves_nothing(world: World, first: Installer) -> None:
    first.install()
    first.uninstall()
    assert installed(world, "spark1") == {}
    assert not (world.node("spark1") / "var/lib/spark/generations").exists()


def test_purge_removes_the_plan_s_files_and_no_other(world: World, first: Installer) -> None:
    engram = "var/lib/spark/engram"
    world.set("spark1", f"{engram}/engram-l1-r0of3.bin", "x")
    world.set("spark1", f"{engram}/engram-l1-r0of3.bin.receipt.json", "{}")
    world.set("spark1", f"{engram}/keep.me", "x")
    world.set("spark1", "var/cache/spark-engine/jit/kernel.so", "x")
    first.uninstall()
    assert (world.node("spark1") / engram / "engram-l1-r0of3.bin").exists()
    first.uninstall(purge=True)
    left = [p.name for p in (world.node("spark1") / engram).iterdir()]
    assert left == ["keep.me"]
    assert not (world.node("spark1") / "var/cache/spark-engine").exists()


def test_contradictions_are_warned_of(world: World, first: Installer) -> None:
    world.set("spark1", "etc/netplan/40-cx7.yaml", "enp1s0f0np0: {}\n")
    warnings = first.install()["spark1"].warnings
    assert warnings == (
        (
            "/etc/netplan/40-cx7.yaml names enp1s0f0np0: two owners of one interface lose its "
            "address at a reboot; remove it there"
        ),
    )


def test_a_missing_registry_is_named(world: World, rooted: Installer) -> None:
    world.set("spark3", "no-registry")
    with pytest.raises(FleetError, match="spark3: pull the image: Error: no such host"):
        Installer(rooted.crew.only(["spark3"]), world.root).install()
    assert installed(world, "spark3") == {}


def test_a_node_without_python_is_explained(world: World, rooted: Installer) -> None:
    (world.base / "bin/python3").write_text(
        "#!/bin/sh\necho 'sh: python3: not found' >&2\nexit 127\n"
    )
    (world.base / "bin/python3").chmod(0o755)
    with pytest.raises(FleetError, match=r"install Python 3\.11 or newer on the node"):
        rooted.install()


@pytest.mark.usefixtures("world")
def test_an_image_by_id_must_be_there() -> None:
    plan = make_plan(image={"digest": DIGEST})
    crew = Crew.of(plan)
    with pytest.raises(StepError, match="load it there"):
        Installer(crew).pull(crew.remotes[0])


def test_a_plan_without_an_image_is_refused_before_anything(world: World) -> None:
    crew = Crew.of(world.plan.model_copy(update={"image": None}))
    with pytest.raises(FleetError, match="the plan names no image"):
        Installer(crew, world.root).install()
    assert world.ssh_log() == []


def test_the_exact_commands_for_nixos(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NIX_SSHOPTS", "SPARK_SSH_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    rehearsal = Rehearsal()
    crew = world.crew(rehearsal=rehearsal)
    work = Nixos(crew.only(["spark1"]), "/flake")
    paths = work.build()
    work.copy(paths)
    remote = crew.remotes[0]
    work.arm(remote, 600)
    work.test(remote, paths["spark1"])
    work.keep(remote, paths["spark1"])
    path = "/nix/store/HASH-nixos-system-spark1"
    nix = ("nix", "--extra-experimental-features")
    commands = rehearsal.commands
    assert commands[0][2] == (
        *nix,
        "nix-command flakes",
        "build",
        "--no-link",
        "--print-out-paths",
        "--",
        "/flake#nixosConfigurations.spark1.config.system.build.toplevel",
    )
    copy = ("nix-command", "copy", "--to", "ssh-ng://spark1", "--", path)
    assert commands[1][2] == ("env", "NIX_SSHOPTS=-o BatchMode=yes", *nix, *copy)
    assert commands[2][3] == (
        "systemctl stop spark-return.timer 2>/dev/null || true\n"
        "systemctl reset-failed spark-return.service 2>/dev/null || true\n"
        "exec systemd-run --quiet --unit=spark-return --on-active=600s "
        "--timer-property=AccuracySec=1s --collect -- /bin/sh -c '"
        "/run/current-system/sw/bin/systemctl stop spark.target; "
        "/nix/var/nix/profiles/system/bin/switch-to-configuration test; "
        "/run/current-system/sw/bin/systemctl start --no-block spark.target'\n"
    )
    assert commands[3][2][-1].endswith(
        "systemd-run --quiet --wait --collect --pipe --service-type=exec --unit=spark-activate -- "
        f"{path}/bin/switch-to-configuration test"
    )
    assert commands[4][3] == (
        "set -eu\n"
        f"nix-env --profile /nix/var/nix/profiles/system --set {path}\n"
        f"{path}/bin/switch-to-configuration boot\n"
        "systemctl stop spark-return.timer 2>/dev/null || true\n"
    )


def test_scripts_are_valid_shell(world: World) -> None:
    rehearsal = Rehearsal()
    crew = world.crew(rehearsal=rehearsal)
    installer = Installer(crew)
    installer.diff()
    installer.install()
    installer.uninstall(purge=True)
    scripts = {text for _, _, _, text in rehearsal.commands if text}
    assert len(scripts) >= 4
    for script in scripts:
        done = subprocess.run(
            ["sh", "-n"], input=script, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_evidence_has_no_bundle_only_its_hash(world: World, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "runs", "install", world.plan, [])
    Installer(world.crew(folder).only(["spark3"]), world.root).install()
    lines = [json.loads(x) for x in (folder.path / "commands.jsonl").read_text().splitlines()]
    applied = [line for line in lines if line["step"] == "apply files"]
    assert len(applied) == 1
    assert all(line["input"]["bytes"] > 50_000 for line in applied)
    assert sum(p.stat().st_size for p in folder.path.iterdir()) < 300_000
