from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from spark_appliance.node.errors import NodeError
from spark_appliance.node.guard import Guard, Killer
from spark_appliance.node.memory import MemInfo
from spark_appliance.node.notify import Notifier
from spark_appliance.node.plan import NodeContext

from .conftest import FakeRunner, Log

GIB = 2**30
CGROUP = "/system.slice/spark-engine.service"


class Host:
    """Memory and cgroups of a node; each step of ``script`` runs before a sample."""

    def __init__(self, root: Path, context: NodeContext, log: Log) -> None:
        self.root, self.context, self.log = root, context, log
        self.cgroup = CGROUP
        self.kill_works = True
        self.container_killed = False
        self.runner = FakeRunner(self.answer)
        self.memory(20)

    def memory(self, gib: float) -> None:
        path = self.root / "proc/meminfo"
        path.parent.mkdir(exist_ok=True)
        text = f"MemTotal: 127601012 kB\nMemFree: 9 kB\nMemAvailable: {int(gib * 2**20)} kB\n"
        if path.exists():  # in place: the guard keeps the file open, as with the real one
            with path.open("r+") as file:
                file.write(text)
                file.truncate()
        else:
            path.write_text(text)

    def engine_up(self, group: str = CGROUP) -> Path:
        file = self.root / f"sys/fs/cgroup{group}/cgroup.kill"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
        return file

    def answer(self, argv: Sequence[str]) -> tuple[int, str]:
        if argv[:2] == ["systemctl", "show"]:
            return 0, f"Id=spark-engine.service\nActiveState=active\nControlGroup={self.cgroup}\n"
        return (0 if self.kill_works else 1), ""

    def run(self, *script: Callable[[], None], **options: Any) -> None:
        steps = list(script)

        def wait(seconds: float) -> bool:
            assert seconds == 1
            if not steps:
                return True
            steps.pop(0)()
            return False

        killer = Killer(self.context, self.runner, **options)
        Guard(self.context, killer, self.log.journal, Notifier({}), wait).run()

    @property
    def programs(self) -> list[str]:
        return [" ".join(call[:2]) for call in self.runner.calls if call[1] != "show"]


@pytest.fixture
def host(
    root: Path, plan: dict[str, Any], context_of: Callable[..., NodeContext], log: Log
) -> Host:
    guard = plan["nodes"][0]["guard"]
    assert (guard["start_bytes"], guard["steady_bytes"]) == (5 * GIB, 3 * GIB)
    return Host(root, context_of(plan), log)


def test_kills_the_cgroup_by_one_write_and_says_so(host: Host) -> None:
    kill = host.engine_up()
    host.run(lambda: host.memory(4.9))
    assert kill.read_text() == "1"
    assert host.programs == []
    assert host.log.lines == [
        "<5>armed: MemAvailable 20.00 GiB, threshold 5.00 GiB",
        (
            "<3>MemAvailable 4.90 GiB is below the threshold 5.00 GiB (starting): "
            f"killed cgroup {kill.parent}"
        ),
    ]
    state = json.loads((host.root / "run/spark/guard.json").read_text())
    assert state["available_bytes"] == int(4.9 * 2**20) * 1024
    assert state["threshold_bytes"] == 5 * GIB
    assert state["killed"] == [f"cgroup {kill.parent}"]


def test_nothing_happens_at_the_threshold(host: Host) -> None:
    kill = host.engine_up()
    host.run(lambda: host.memory(5))
    assert kill.read_text() == ""


def test_ready_lowers_the_threshold_and_its_end_raises_it(host: Host) -> None:
    kill = host.engine_up()
    ready = host.root / "run/spark/ready"
    ready.parent.mkdir(parents=True)
    ready.touch()
    host.run(lambda: host.memory(4), lambda: host.memory(3.0))
    assert kill.read_text() == ""
    host.run(lambda: host.memory(2.9))
    assert kill.read_text() == "1"
    assert "below the threshold 3.00 GiB (serving)" in host.log.lines[-1]
    kill.write_text("")
    host.memory(20)
    host.run(lambda: host.memory(4), ready.unlink)
    assert kill.read_text() == "1"


def test_says_it_once_and_kills_as_long_as_it_lasts(host: Host) -> None:
    kill = host.engine_up()

    def again() -> None:
        assert kill.read_text() == "1"
        kill.write_text("")

    host.run(lambda: host.memory(4), again, again, lambda: host.memory(20))
    assert [line[:3] for line in host.log.lines] == ["<5>", "<3>", "<5>"]
    assert host.log.lines[-1] == "<5>MemAvailable is back at 20.00 GiB"


def test_an_engine_that_starts_in_short_memory_is_killed_and_named(host: Host) -> None:
    host.cgroup = ""
    host.kill_works = False
    kill: list[Path] = []

    def start() -> None:
        host.cgroup = CGROUP
        kill.append(host.engine_up())

    host.run(lambda: host.memory(4), *([lambda: None] * 3), start, *([lambda: None] * 10))
    assert kill[0].read_text() == "1"
    assert [line[:3] for line in host.log.lines] == ["<5>", "<4>", "<3>"]
    assert "no engine runs, nothing to kill" in host.log.lines[1]


def test_programs_are_not_started_every_second_when_memory_is_short(host: Host) -> None:
    host.cgroup = ""
    host.kill_works = False
    host.run(lambda: host.memory(4), *([lambda: None] * 9))
    assert host.programs == ["systemctl kill"]


def test_falls_back_to_systemctl(host: Host) -> None:
    host.cgroup = "/somewhere/else"
    host.run(lambda: host.memory(1))
    kill = ["systemctl", "kill", "--signal=SIGKILL", "--", "spark-engine.service"]
    assert kill in host.runner.calls
    assert host.log.lines[-1].endswith(f"killed {' '.join(kill)}")


def test_finds_a_cgroup_that_moved(host: Host) -> None:
    host.cgroup = "/spark.slice/spark-engine.service"
    kill = host.engine_up(host.cgroup)
    host.run(lambda: host.memory(1))
    assert kill.read_text() == "1"


def test_kills_the_container_by_its_slice(host: Host) -> None:
    client = host.engine_up()
    container = host.engine_up("/sparkengine.slice")
    host.run(lambda: host.memory(1), container="spark-engine", runtime="/usr/bin/docker")
    assert (client.read_text(), container.read_text()) == ("1", "1")
    assert host.programs == []


def test_kills_the_container_by_its_runtime_when_the_slice_is_not_there(host: Host) -> None:
    client = host.engine_up()
    host.run(lambda: host.memory(1), container="spark-engine", runtime="/usr/bin/docker")
    assert client.read_text() == "1"
    assert ["/usr/bin/docker", "kill", "--signal=KILL", "spark-engine"] in host.runner.calls


def test_is_armed_only_by_a_good_sample(host: Host) -> None:
    host.memory(4)
    host.kill_works = False
    host.cgroup = ""
    host.run(lambda: None)
    assert not any("armed" in line for line in host.log.lines)
    host.run(lambda: host.memory(6))
    assert any("armed: MemAvailable 6.00 GiB" in line for line in host.log.lines)


def test_a_systemctl_that_is_missing_does_not_stop_the_guard(host: Host) -> None:
    kill = host.engine_up("/sparkengine.slice")

    def answer(argv: Sequence[str]) -> tuple[int, str]:
        raise NodeError(f"{argv[0]}: no such program")

    host.runner.answer = answer
    host.run(lambda: host.memory(1), container="spark-engine")
    assert kill.read_text() == "1"


def test_a_sample_allocates_next_to_nothing(host: Host) -> None:
    with MemInfo(host.root / "proc/meminfo") as meminfo:
        meminfo.available()
        tracemalloc.start()
        for _ in range(1000):
            meminfo.available()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 4096


def test_memory_without_the_figure_is_an_error(root: Path) -> None:
    path = root / "meminfo"
    path.write_text("MemTotal: 1 kB\n")
    with MemInfo(path) as meminfo, pytest.raises(NodeError, match="has no MemAvailable"):
        meminfo.available()
    with pytest.raises(NodeError, match="cannot read"):
        MemInfo(root / "nothing")


def test_the_real_kernel_is_understood() -> None:
    with MemInfo(Path("/proc/meminfo")) as meminfo:
        assert 0 < meminfo.available() < 2**50
