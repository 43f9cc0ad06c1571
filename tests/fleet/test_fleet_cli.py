"""The commands as people type them, over the stand-in ssh."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import yaml
from fleet_world import DIGEST, ROOT, World

from spark_appliance.cli.rollout import rollout
from spark_appliance.errors import OperationError
from spark_appliance.fleet.remote import AS_ROOT
from spark_appliance.fleet.rollout import Rollout
from spark_appliance.fleet.rolloutstate import NodeState, RolloutState, write


@pytest.fixture
def folder(world: World) -> Path:
    """A folder with a cluster file whose nodes are the world's."""
    folder = world.base / "work"
    folder.mkdir()
    write_cluster(folder, "dgx-os")
    world.put_plan()
    return folder


def write_cluster(folder: Path, system: str) -> None:
    data = yaml.safe_load((ROOT / "examples/three-spark-triangle/cluster.yaml").read_text())
    data["image"] = {"reference": "registry.lan/spark-engine", "digest": DIGEST}
    for node in data["nodes"]:
        node |= {"system": system, "ssh": node["name"]}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(data))


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


STOP = [
    "sh",
    "-c",
    'systemctl cat -- "$1" >/dev/null 2>&1 || exit 0; exec systemctl stop -- "$1"',
    "sh",
    "spark.target",
]
START = ["systemctl", "start", "--no-block", "--", "spark.target"]


def put_state(folder: Path, system: Literal["nixos", "dgx-os"]) -> None:
    """Leave a rollout that was cut off: spark1 was not reached, spark2 had nothing before."""
    old = {"spark1": "1", "spark2": "0", "spark3": "3"}
    if system == "nixos":
        old = {name: f"/nix/store/old-nixos-system-{name}" for name in old}
    nodes = {
        name: NodeState(system, text, "", touched=name != "spark1") for name, text in old.items()
    }
    write(folder / "runs/rollout.json", RolloutState("0" * 64, "spark3", "rest", nodes))


def printed(world: World, node: str, step: str, argv: list[str], rest: str = "") -> str:
    """Return what a dry run says about a command that needs root."""
    options = ["BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=15"]
    options += ["ServerAliveCountMax=4", "ControlMaster=auto", "ControlPersist=60"]
    options += [f"ControlPath={world.base}/run/spark-appliance/%C"]
    words = ["ssh", "-T", *(word for option in options for word in ("-o", option))]
    words += ["--", node, shlex.join([*AS_ROOT, *argv])]
    return f"# {node}: {step}\n{shlex.join(words)}{rest}\n"


def test_a_dry_rollback_prints_every_command_for_nixos(world: World, folder: Path) -> None:
    write_cluster(folder, "nixos")
    put_state(folder, "nixos")
    state = (folder / "runs/rollout.json").read_text()
    done = cli(folder, "rollback", "--dry-run")
    assert done.returncode == 0, done.stderr
    expected = [printed(world, name, "stop", STOP) for name in ("spark1", "spark2", "spark3")]
    for name in ("spark2", "spark3"):
        path = f"/nix/store/old-nixos-system-{name}"
        keep = (
            "set -eu\n"
            f"nix-env --profile /nix/var/nix/profiles/system --set {path}\n"
            f"{path}/bin/switch-to-configuration boot\n"
            "systemctl stop spark-return.timer 2>/dev/null || true"
        )
        activate = ["systemd-run", "--quiet", "--wait", "--collect", "--pipe"]
        activate += ["--service-type=exec", "--unit=spark-activate", "--"]
        activate += [f"{path}/bin/switch-to-configuration", "test"]
        expected += [
            printed(world, name, "activate", activate),
            printed(world, name, "keep", ["sh", "-s"], f" <<'END'\n{keep}\nEND"),
        ]
    for name in ("spark1", "spark2", "spark3"):
        expected.append(printed(world, name, "start again", START))
    assert done.stdout == "".join(expected)
    assert world.ssh_log() == []
    # nothing is written either: the rollback itself can still be made
    assert (folder / "runs/rollout.json").read_text() == state
    assert [path.name for path in (folder / "runs").iterdir()] == ["rollout.json"]


def test_a_dry_rollback_prints_every_command_for_dgx_os(world: World, folder: Path) -> None:
    put_state(folder, "dgx-os")
    done = cli(folder, "rollback", "--dry-run")
    assert done.returncode == 0, done.stderr
    program = "/var/lib/spark/generations/program.pyz"
    call = ["env", f"PYTHONPATH={program}", "python3", "-m"]
    call += ["spark_appliance.node.generations", "--root", "/"]
    text = "  # with N characters on standard input"
    look = "look at the generations"
    expected = [
        *(printed(world, name, "stop", STOP) for name in ("spark1", "spark2", "spark3")),
        printed(world, "spark2", look, ["sh", "-s"], text),
        printed(world, "spark2", "return", [*call, "uninstall"]),
        printed(world, "spark3", look, ["sh", "-s"], text),
        printed(world, "spark3", "return", [*call, "rollback", "--to", "3", "--adopt"]),
        printed(world, "spark1", "start again", START),
        printed(world, "spark3", "start again", START),
    ]
    said = re.sub(r"# with \d+ characters", "# with N characters", done.stdout)
    assert said == "".join(expected)
    assert world.ssh_log() == []


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


_WATCH = """
from spark_appliance.cli import main, status
real = status._watch
def quick(crew, interval, **more):
    assert interval == 10
    real(crew, 0, **more)
status._watch = quick
main()
"""
"""``status --watch`` as typed, without its pause."""


@contextlib.contextmanager
def watching(folder: Path, out: int, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _WATCH, "status", "--watch", "--no-gpu", *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "40"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended_by_an_interrupt(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == b"\ninterrupted\n"


def test_watching_as_json_refreshes_names_a_lost_node_and_ends(world: World, folder: Path) -> None:
    looks: list[dict[str, str]] = []
    with watching(folder, subprocess.PIPE, "--json") as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, b"")

        def until(state: str) -> None:
            for line in lines:
                looks.append({node["name"]: node["state"] for node in json.loads(line)["nodes"]})
                if looks[-1]["spark2"] == state:
                    return
            raise AssertionError(f"it ended before spark2 was {state}")

        until("stopped")
        world.set("spark2", "gone")
        until("gone")
        assert looks[-1] == {"spark1": "stopped", "spark2": "gone", "spark3": "stopped"}
        # it goes on, and sees it come back
        world.unset("spark2", "gone")
        until("stopped")
        ended_by_an_interrupt(process)
    assert not (folder / "runs").exists()


def test_watching_on_a_terminal_refreshes_and_gives_the_screen_back(
    world: World, folder: Path
) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
    chunks: list[bytes] = []

    def until(mark: bytes) -> None:
        start = len(b"".join(chunks))
        while mark not in b"".join(chunks)[start:]:
            chunks.append(os.read(ours, 65536))

    with watching(folder, theirs) as process:
        os.close(theirs)
        until(b"spark3")
        world.set("spark2", "gone")
        until(b"spark2: read the state: no SSH connection")
        # somebody reads on, or a full buffer would hold it
        reader = threading.Thread(target=_drain, args=(ours, chunks), daemon=True)
        reader.start()
        ended_by_an_interrupt(process)
        reader.join(60)
    os.close(ours)
    text = b"".join(chunks)
    assert text.count(b"\x1b[?1049h") == 1
    assert b"\x1b[?1049l" in text[-200:]


def _drain(fd: int, chunks: list[bytes]) -> None:
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while chunk := os.read(fd, 65536):
            chunks.append(chunk)


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
        (["rollback", "--dry-run"], "there is no rollout to take back"),
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
    # what doctor saw can be judged again
    (kept,) = runs(folder, "serve").glob("*-doctor")
    assert sorted(path.name for path in kept.iterdir()) == [
        "plan.json",
        *(f"probe-{name}.json" for name in ("spark1", "spark2", "spark3")),
        "results.json",
    ]
    count = json.loads((kept / "results.json").read_text())["counts"]["fail"]
    assert f"doctor: {count} checks failed" in done.stderr
    again = cli(folder, "doctor", "--replay", str(kept))
    assert again.returncode == 1
    assert "triangle: " in again.stderr


@pytest.mark.usefixtures("world")
def test_a_rollout_keeps_what_doctor_saw(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def only_ask(self: Rollout, **_: object) -> None:
        assert self.preflight is not None
        self.preflight()

    monkeypatch.setattr(Rollout, "run", only_ask)
    monkeypatch.chdir(folder)
    with pytest.raises(OperationError, match="nothing was started"):
        rollout.main([], standalone_mode=False)
    (kept,) = runs(folder, "rollout").glob("*-doctor")
    assert (kept / "probe-spark3.json").is_file()
    assert (kept / "plan.json").read_text() == (kept.parent / "plan.json").read_text()


def test_smoke_leaves_its_results(world: World, folder: Path) -> None:
    words = ["smoke", "--url", "http://127.0.0.1:9/v1", "--only", "models", "--only", "arithmetic"]
    done = cli(folder, *words)
    assert done.returncode == 1
    kept = runs(folder, "smoke")
    assert f"evidence: runs/{kept.name}" in done.stderr
    data = json.loads((kept / "smoke.json").read_text())
    assert data["url"] == "http://127.0.0.1:9/v1"
    assert [(r["name"], r["outcome"]) for r in data["results"]] == [
        ("models", "fail"),
        ("arithmetic", "fail"),
    ]
    assert all("no answer from" in r["seen"] for r in data["results"])
    assert json.loads((kept / "result.json").read_text())["outcome"] == "failed"
    assert world.ssh_log() == []
