"""Supervisors as real processes (the zipapp, on a bare Python) with real ranks that die.

``systemctl`` is a shell script that starts and stops processes and keeps their state in a folder
for each node. What the supervisors report arrives by sd_notify: the tests wait for that.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_appliance.node.projection import node_plan
from spark_appliance.node_zipapp import build

SYSTEMCTL = r"""#!/bin/sh
# Units of one node: $FAKE_SYSTEMD/UNIT.pid (a process) or UNIT.active (a flag).
set -u
dir=$FAKE_SYSTEMD node=${FAKE_SYSTEMD##*/} verb=$1
shift
units=
for word in "$@"; do case $word in -*) ;; *) units="$units $word" ;; esac; done
alive() {
  [ -s "$dir/$1.pid" ] || return 1
  read -r pid < "$dir/$1.pid"
  read -r _ _ state _ < "/proc/$pid/stat" 2>/dev/null || return 1
  [ "$state" != Z ]
}
end() {  # signal, unit
  if alive "$2"; then
    kill "-$1" "$pid"
    while alive "$2"; do sleep 0.02; done
  fi
}
for unit in $units; do
  case $verb in
    start)
      echo "$node start $unit" >> "$dir/../events"
      if [ -e "$dir/refuse" ]; then
        echo "Job for $unit failed." >&2
        exit 1
      fi
      if [ "$unit" = spark-engine.service ]; then
        setsid sleep 100000 < /dev/null > /dev/null 2>&1 &
        echo $! > "$dir/$unit.pid"
        echo $! >> "$dir/../pids"
      else
        touch "$dir/$unit.active"
      fi ;;
    stop)
      echo "$node stop $unit" >> "$dir/../events"
      end TERM "$unit"
      rm -f "$dir/$unit.pid" "$dir/$unit.active" ;;
    kill)
      echo "$node kill $unit" >> "$dir/../events"
      end KILL "$unit" ;;
    show)
      active=inactive result=success
      if [ -e "$dir/$unit.active" ]; then active=active; fi
      if [ -e "$dir/$unit.pid" ]; then
        if alive "$unit"; then active=active; else active=failed result=signal; fi
      fi
      printf 'Id=%s\nActiveState=%s\nResult=%s\nExecMainStatus=9\n\n' "$unit" "$active" "$result" ;;
  esac
done
"""

TIMING = [
    *("--heartbeat", "0.2", "--peer-deadline", "3", "--poll", "0.1", "--reconnect", "0.2"),
    *("--settle", "0.5"),
]
SECONDS = 30.0
ENGINE = "spark-engine.service"


class Supervisor:
    """One node: its root, its systemd, its process and what it reports."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.fleet, self.name = fleet, name
        self.root = fleet.folder / "roots" / name
        self.systemd = fleet.folder / "systemd" / name
        for path in (self.root / "etc/spark", self.systemd):
            path.mkdir(parents=True)
        (self.root / "etc/spark/plan.json").write_text(json.dumps(node_plan(fleet.plan, name)))
        key = self.root / "etc/spark/cluster-key"
        key.write_bytes(b"the same secret on every node\n")
        key.chmod(0o600)
        (self.systemd / "spark-guard.service.active").touch()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(fleet.folder / f"{name}.sock"))
        self.log = fleet.folder / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.heard: list[str] = []
        self.said: queue.Queue[str] = queue.Queue()
        self.listener = threading.Thread(target=self.listen, daemon=True)
        self.listener.start()

    def listen(self) -> None:
        """Read all the time, as systemd does: a full queue drops states."""
        while text := self.socket.recv(65536).decode():
            for line in text.splitlines():
                self.said.put(line)

    def start(self) -> None:
        words = ["--root", str(self.root), "--node", self.name, "supervise", *TIMING]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(self.fleet.program), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={
                    "PATH": f"{self.fleet.bin}:{os.environ['PATH']}",
                    "NOTIFY_SOCKET": str(self.fleet.folder / f"{self.name}.sock"),
                    "FAKE_SYSTEMD": str(self.systemd),
                },
            )

    def wait_for(self, status: str) -> str:
        """Wait until it reports a status that begins so; returns it."""
        end = time.monotonic() + SECONDS
        while True:
            try:
                line = self.said.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                heard = "\n".join(self.heard)
                pytest.fail(f"{self.name} never said {status!r}; it said:\n{heard}\n{self.text}")
            self.heard.append(line)
            if line.startswith(f"STATUS={status}"):
                return line.removeprefix("STATUS=")

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def exit_status(self) -> int:
        assert self.process is not None
        return self.process.wait(SECONDS)

    @property
    def text(self) -> str:
        return self.log.read_text()

    @property
    def engine(self) -> int:
        return int((self.systemd / f"{ENGINE}.pid").read_text())

    def kill_engine(self) -> int:
        pid = self.engine
        os.kill(pid, signal.SIGKILL)
        return pid


class Fleet:
    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self.folder, self.plan = folder, plan
        self.bin = folder / "bin"
        self.bin.mkdir()
        (self.bin / "systemctl").write_text(SYSTEMCTL)
        (self.bin / "systemctl").chmod(0o755)
        self.program = folder / "spark-node.pyz"
        self.program.write_bytes(build())
        self.nodes = {node["name"]: Supervisor(self, node["name"]) for node in plan["nodes"]}

    def start(self) -> None:
        for node in self.nodes.values():
            node.start()

    def __getitem__(self, name: str) -> Supervisor:
        return self.nodes[name]

    def events(self) -> list[str]:
        """What the units did since the last call."""
        path = self.folder / "systemd/events"
        lines = path.read_text().splitlines() if path.exists() else []
        path.write_text("")
        return lines

    def close(self) -> None:
        for node in self.nodes.values():
            if node.process is not None and node.process.poll() is None:
                node.process.kill()
                node.process.wait()
            # an empty message ends the listener
            node.socket.sendto(b"", node.socket.getsockname())
            node.listener.join()
            node.socket.close()
        pids = self.folder / "systemd/pids"
        for pid in pids.read_text().split() if pids.exists() else []:
            if alive(int(pid)):
                os.kill(int(pid), signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def starts(events: list[str]) -> list[str]:
    return [event for event in events if " start " in event]


@pytest.fixture
def fleet(plan: dict[str, Any], tmp_path: Path) -> Iterator[Fleet]:
    plan["restart"] = {"limit": 1, "window": 3600, "backoff": [0]}
    with socket.socket() as probe:
        probe.bind(("127.0.0.11", 0))
        plan["ports"]["supervisor"] = probe.getsockname()[1]
    made = Fleet(tmp_path, plan)
    yield made
    made.close()


def in_order(events: list[str]) -> None:
    """Workers in any order, then the head's engine, then its readiness."""
    begun = starts(events)
    assert sorted(begun[:2]) == [f"spark2 start {ENGINE}", f"spark3 start {ENGINE}"]
    assert begun[2:] == [f"spark1 start {ENGINE}", "spark1 start spark-ready.service"]


def until(check: Callable[[], bool]) -> None:
    """Wait for a process to end: nobody reports that."""
    end = time.monotonic() + SECONDS
    while not check():
        assert time.monotonic() < end
        select.select([], [], [], 0.02)


def test_a_killed_rank_takes_all_down_and_all_come_back_until_the_limit(fleet: Fleet) -> None:
    fleet.start()
    head = fleet["spark1"]
    head.wait_for("serving")
    in_order(fleet.events())
    old = [node.engine for node in fleet.nodes.values()]
    assert all(alive(pid) for pid in old)

    fleet["spark2"].kill_engine()
    backoff = head.wait_for("backoff")
    assert backoff == (
        "backoff: restart 1 of 1 in 0 s, after spark2: spark-engine.service failed (signal, "
        "status 9)"
    )
    assert not any(alive(pid) for pid in old)
    head.wait_for("serving")
    in_order(fleet.events())
    new = [node.engine for node in fleet.nodes.values()]
    assert all(alive(pid) for pid in new)
    assert not set(old) & set(new)

    fleet["spark1"].kill_engine()
    head.wait_for("gave-up: after 1 restarts within 3600 s; last: spark1: spark-engine.service")
    assert head.exit_status() == 3
    assert not any(alive(pid) for pid in new)
    state = json.loads((head.root / "run/spark/supervisor.json").read_text())
    assert state["phase"] == "gave-up"
    assert "<3>gave up after 1 restarts" in head.text
    assert "Traceback" not in "".join(node.text for node in fleet.nodes.values())
    fleet["spark2"].wait_for("waiting: for spark1 (its last word: gave-up: ")


def test_a_killed_head_supervisor_stops_the_workers_and_starts_afresh(fleet: Fleet) -> None:
    fleet.start()
    head = fleet["spark1"]
    head.wait_for("serving")
    workers = [fleet["spark2"], fleet["spark3"]]
    pids = [worker.engine for worker in workers]
    left_behind = head.engine
    for worker in workers:
        worker.wait_for("running")  # what it said before it was connected is behind us
    head.signal(signal.SIGKILL)
    head.exit_status()
    for worker in workers:
        worker.wait_for("waiting: for spark1: ")
    assert not any(alive(pid) for pid in pids)
    assert alive(left_behind)

    fleet.events()
    head.start()
    head.wait_for("serving")
    events = fleet.events()
    assert not alive(left_behind)
    assert events[:2] == [f"spark1 kill {ENGINE}", f"spark1 stop {ENGINE}"]
    in_order(events)


def test_a_frozen_worker_is_a_lost_worker(fleet: Fleet) -> None:
    fleet.start()
    head, frozen = fleet["spark1"], fleet["spark2"]
    head.wait_for("serving")
    frozen_engine = frozen.engine
    head_engine = head.engine
    frozen.signal(signal.SIGSTOP)
    assert "spark2: supervisor lost: silent for 3 s" in head.wait_for("backoff")
    assert not alive(head_engine)
    head.wait_for("waiting: for the supervisors of spark2")
    frozen.signal(signal.SIGCONT)
    head.wait_for("serving")
    assert not alive(frozen_engine)
    assert alive(frozen.engine)


def test_sigterm_stops_everything_head_first(fleet: Fleet) -> None:
    fleet.start()
    head = fleet["spark1"]
    head.wait_for("serving")
    pids = [node.engine for node in fleet.nodes.values()]
    fleet.events()
    head.signal(signal.SIGTERM)
    assert head.exit_status() == 0
    events = [event for event in fleet.events() if " stop " in event]
    assert events[:2] == ["spark1 stop spark-ready.service", f"spark1 stop {ENGINE}"]
    assert sorted(events[2:4]) == [f"spark2 stop {ENGINE}", f"spark3 stop {ENGINE}"]
    assert not any(alive(pid) for pid in pids)
    for name in ("spark2", "spark3"):
        fleet[name].signal(signal.SIGTERM)
        assert fleet[name].exit_status() == 0


def test_a_rank_that_refuses_to_start_is_named(fleet: Fleet) -> None:
    (fleet["spark3"].systemd / "refuse").touch()
    fleet.start()
    head = fleet["spark1"]
    text = head.wait_for("gave-up")
    assert (
        "spark3: spark-engine.service did not start: Job for spark-engine.service failed. "
        "(journalctl -u spark-engine.service)" in text
    )
    assert head.exit_status() == 3
    assert f"spark1 start {ENGINE}" not in fleet.events()


def test_a_worker_with_another_key_never_gets_in(fleet: Fleet) -> None:
    (fleet["spark2"].root / "etc/spark/cluster-key").write_text("some other secret of somebody\n")
    fleet.start()
    text = fleet["spark2"].wait_for("waiting: for spark1: spark1 refuses")
    assert text.endswith("the cluster keys differ: copy the same key to every node")
    assert starts(fleet.events()) == []


def test_a_worker_stopped_from_outside_is_restarted_with_all(fleet: Fleet) -> None:
    fleet.start()
    head, worker = fleet["spark1"], fleet["spark3"]
    head.wait_for("serving")
    pid = worker.engine
    os.kill(pid, signal.SIGTERM)
    (worker.systemd / f"{ENGINE}.pid").unlink()  # as 'systemctl stop spark-engine' leaves it
    assert "spark3: spark-engine.service is inactive" in head.wait_for("backoff")
    head.wait_for("serving")
    until(lambda: not alive(pid))
