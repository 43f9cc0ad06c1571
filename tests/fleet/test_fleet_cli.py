"""The commands as people type them, over the stand-in ssh."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fleet_world import DIGEST, ROOT, World


@pytest.fixture
def folder(world: World) -> Path:
    """A folder with a cluster file whose nodes are the world's."""
    data = yaml.safe_load((ROOT / "examples/three-spark-triangle/cluster.yaml").read_text())
    data["image"] = {"reference": "registry.lan/spark-engine", "digest": DIGEST}
    for node in data["nodes"]:
        node |= {"system": "dgx-os", "ssh": node["name"]}
    folder = world.base / "work"
    folder.mkdir()
    (folder / "cluster.yaml").write_text(yaml.safe_dump(data))
    world.put_plan()
    return folder


def cli(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "spark_appliance", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def runs(folder: Path, command: str) -> Path:
    return next((folder / "runs").glob(f"*-{command}"))


def test_serve_shows_each_node_and_keeps_evidence(world: World, folder: Path) -> None:
    world.set("spark1", "auto-ready")
    done = cli(folder, "serve", "--no-doctor")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("serving after ")
    for name in ("spark1", "spark2", "spark3"):
        assert f"{name}: starting" in done.stderr
    kept = runs(folder, "serve")
    assert json.loads((kept / "result.json").read_text())["outcome"] == "done"
    assert (kept / "commands.jsonl").read_text().count('"step": "start"') == 3


def test_a_failed_stop_names_the_node_and_exits_1(world: World, folder: Path) -> None:
    world.set("spark2", "gone")
    done = cli(folder, "stop", "--drain", "0")
    assert done.returncode == 1
    assert "spark2: stop: no SSH connection" in done.stderr
    assert "Traceback" not in done.stderr
    result = json.loads((runs(folder, "stop") / "result.json").read_text())
    assert result["outcome"] == "failed"
    assert list(result["failures"]) == ["spark2"]


def test_dry_runs_print_shell_that_parses_and_run_nothing(world: World, folder: Path) -> None:
    for words in (
        ["serve"],
        ["stop"],
        ["share"],
        ["pack"],
        ["install"],
        ["rollout"],
        ["uninstall"],
    ):
        done = cli(folder, *words, "--dry-run")
        assert done.returncode == 0, (words, done.stderr)
        assert "ssh -T -o BatchMode=yes" in done.stdout
        checked = subprocess.run(
            ["bash", "-n"], input=done.stdout, capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stderr
    assert world.ssh_log() == []
    assert not (folder / "runs").exists()


def test_status_as_json_and_its_exit_status(world: World, folder: Path) -> None:
    done = cli(folder, "status", "--json", "--no-gpu")
    assert done.returncode == 1
    data = json.loads(done.stdout)
    assert data["ready"] is False
    assert [node["state"] for node in data["nodes"]] == ["stopped"] * 3
    world.set("spark1", "ready")
    for name in ("spark1", "spark2", "spark3"):
        world.set(name, "active/spark-engine.service", "active")
    done = cli(folder, "status", "--no-gpu")
    assert done.returncode == 0, done.stdout
    assert "triangle: ready" in done.stdout


def test_logs_of_one_node(world: World, folder: Path) -> None:
    world.journal("spark2", "spark-engine.service", "hello api_key='abc'")
    done = cli(folder, "logs", "spark2", "-n", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "spark2 hello api_key=***\n"


def test_a_stale_plan_is_not_put_on_any_node(world: World, folder: Path) -> None:
    (folder / "cluster.lock.json").write_text("{}\n")
    done = cli(folder, "install")
    assert done.returncode == 2
    assert "plan.stale" in done.stderr
    assert "spark-appliance render" in done.stderr
    assert world.ssh_log() == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["install", "--node", "spark9"], "there is no node spark9"),
        (["rollback"], "there is no rollout to take back"),
        (["rollout", "--resume"], "no rollout was interrupted"),
        (["build"], "no chosen node runs NixOS"),
        (["smoke", "--only", "magic"], "there is no test magic"),
        (["serve", "missing.yaml"], "[file.unreadable]"),
    ],
)
@pytest.mark.usefixtures("world")
def test_mistakes_are_one_line_with_a_remedy(folder: Path, words: list[str], message: str) -> None:
    done = cli(folder, *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "remedy:" in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_s_no_stops_serve(world: World, folder: Path) -> None:
    done = cli(folder, "serve")
    assert done.returncode == 1
    assert "doctor: " in done.stderr
    assert "--no-doctor" in done.stderr
    assert [c for c in world.calls("spark1") if "systemctl start" in c] == []
