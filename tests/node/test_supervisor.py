"""Head and workers in one event loop, on loopback addresses, with a systemd that is a table."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from spark_appliance.node.errors import GaveUpError, NodeError
from spark_appliance.node.notify import Notifier
from spark_appliance.node.plan import NodeContext, read_context
from spark_appliance.node.projection import node_plan
from spark_appliance.node.supervisor.protocol import Timing
from spark_appliance.node.supervisor.service import run_head, run_worker
from spark_appliance.node.supervisor.state import State
from spark_appliance.node.systemctl import UnitState

from .conftest import Log

ENGINE, GUARD, READY = "spark-engine.service", "spark-guard.service", "spark-ready.service"
TIMING = Timing(heartbeat=0.1, deadline=5, handshake=5, poll=0.02, reconnect=0.05, settle=0.2)
PATIENT = replace(TIMING, settle=15)
KEY = b"0123456789abcdef"


@dataclass
class System:
    """What happens on all nodes, and a way to wait for it."""

    events: list[str] = field(default_factory=list)
    phases: dict[str, list[str]] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    ready_when_started: bool = True

    def record(self, event: str) -> None:
        self.events.append(event)
        self.news.set()

    async def until(self, check: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not check():
                self.news.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.1):  # files and logs send no news
                        await self.news.wait()

    def phase(self, node: str, text: str) -> Callable[[], bool]:
        """Whether a node has entered a phase since ``mark``; phases may pass quickly."""

        def check() -> bool:
            new = self.phases.get(node, [])[self.marks.get(node, 0) :]
            return any(line.startswith(text) for line in new)

        return check

    def mark(self) -> None:
        self.marks = {node: len(lines) for node, lines in self.phases.items()}
        self.events.clear()

    def count(self, event: str) -> int:
        return self.events.count(event)


class FakeUnits:
    """One node's units; ``fail_start`` makes the engine refuse."""

    def __init__(self, node: str, system: System) -> None:
        self.node, self.system = node, system
        self.states = {
            ENGINE: UnitState(ENGINE, "inactive"),
            GUARD: UnitState(GUARD, "active"),
            READY: UnitState(READY, "inactive"),
        }
        self.looks = 0
        self.fail_start: str | None = None
        self.hold_start: asyncio.Event | None = None

    async def start(self, unit: str, *, seconds: float, wait: bool = True) -> None:
        assert seconds > 0
        self.system.record(f"{self.node} start {unit.split('.')[0]}")
        if unit == READY:
            assert not wait
            active = "active" if self.system.ready_when_started else "activating"
            self.states[READY] = UnitState(READY, active)
            return
        if self.hold_start is not None:
            await self.hold_start.wait()
        if self.fail_start is not None:
            raise NodeError(self.fail_start)
        self.states[unit] = UnitState(unit, "active")

    async def stop(self, unit: str, *, seconds: float) -> None:
        assert seconds > 0
        if self.states[unit].active not in ("inactive", "failed"):
            self.system.record(f"{self.node} stop {unit.split('.')[0]}")
        self.states[unit] = UnitState(unit, "inactive")

    async def kill(self, unit: str) -> None:
        if self.states[unit].running:
            self.system.record(f"{self.node} kill {unit.split('.')[0]}")
            self.states[unit] = UnitState(unit, "failed", result="signal", status="9")

    async def show(self, units: Sequence[str]) -> dict[str, UnitState]:
        self.looks += 1
        return {unit: self.states[unit] for unit in units}

    def end(self, result: str, status: str, active: str = "failed") -> None:
        self.states[ENGINE] = UnitState(ENGINE, active, result=result, status=status)

    def crash(self, unit: str = ENGINE, status: str = "139") -> None:
        self.states[unit] = UnitState(unit, "failed", result="signal", status=status)


class RecordingNotifier(Notifier):
    def __init__(self, node: str, system: System) -> None:
        super().__init__({})
        self.node, self.system = node, system

    def status(self, text: str) -> None:
        self.system.phases.setdefault(self.node, []).append(text)
        self.system.news.set()


@dataclass
class Member:
    context: NodeContext
    units: FakeUnits
    log: Log
    stop: asyncio.Event
    task: asyncio.Task[None]

    async def end(self) -> None:
        self.stop.set()
        await self.task

    @property
    def state(self) -> dict[str, Any]:
        path = self.context.path("/run/spark/supervisor.json")
        state: dict[str, Any] = json.loads(path.read_text())
        return state

    @property
    def ready(self) -> bool:
        return self.context.path("/run/spark/ready").exists()


@dataclass
class Cluster:
    folder: Path
    plan: dict[str, Any]
    system: System = field(default_factory=System)
    members: dict[str, Member] = field(default_factory=dict)
    keys: dict[str, bytes | None] = field(default_factory=dict)
    timing: Timing = TIMING

    def start(self, node: str, *, running: bool = False) -> Member:
        root = self.folder / node
        file = root / "etc/spark/plan.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(node_plan(self.plan, node)))
        key = self.keys.get(node, KEY)
        if key is not None:
            (file.parent / "cluster-key").write_bytes(key)
            (file.parent / "cluster-key").chmod(0o600)
        context = read_context(file, node, root)
        log, units = Log(), FakeUnits(node, self.system)
        if running:
            units.states[ENGINE] = UnitState(ENGINE, "active")
        notifier = RecordingNotifier(node, self.system)
        state = State(context, log.journal, notifier)
        stop = asyncio.Event()
        service = run_head if context.is_head else run_worker
        task = asyncio.create_task(
            service(context, units, log.journal, notifier, self.timing, state, stop)
        )
        member = Member(context, units, log, stop, task)
        self.members[node] = member
        return member

    def start_all(self) -> None:
        for node in self.plan["nodes"]:
            self.start(node["name"])

    async def serving(self) -> None:
        await self.system.until(self.system.phase("spark1", "serving"))
        self.system.mark()

    async def heard_of(self, node: str) -> None:
        """Wait until the head has the report of a worker whose engine ended."""
        await self.system.until(lambda: any(ENGINE in line for line in self[node].log.lines))
        await asyncio.sleep(0.2)  # the line is written before the report is sent

    def __getitem__(self, node: str) -> Member:
        return self.members[node]


def free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def make(plan: dict[str, Any], tmp_path: Path) -> Callable[..., Any]:
    plan["restart"] = {"limit": 2, "window": 3600, "backoff": [0]}
    plan["ports"]["supervisor"] = free_port("127.0.0.11")

    @asynccontextmanager
    async def cluster(**options: Any) -> AsyncIterator[Cluster]:
        made = Cluster(tmp_path, plan, **options)
        try:
            yield made
        finally:
            for member in made.members.values():
                member.task.cancel()
            await asyncio.gather(
                *(member.task for member in made.members.values()), return_exceptions=True
            )

    return cluster


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(40):
            await body()

    asyncio.run(bounded())


STARTS = [
    "spark1 start spark-engine",
    "spark1 start spark-ready",
    "spark2 start spark-engine",
    "spark3 start spark-engine",
]


def test_starts_workers_then_head_then_ready(make: Any) -> None:
    async def body() -> None:
        async with make() as cluster:
            cluster.start("spark1")
            await cluster.system.until(
                cluster.system.phase("spark1", "waiting: for the supervisors of spark2, spark3")
            )
            cluster.start("spark3")
            await cluster.system.until(
                cluster.system.phase("spark1", "waiting: for the supervisors of spark2")
            )
            assert cluster.system.events == []
            cluster.start("spark2")
            await cluster.system.until(cluster.system.phase("spark1", "serving"))
            events = cluster.system.events
            assert sorted(events[:2]) == STARTS[2:]
            assert events[2:] == STARTS[:2]
            await cluster.system.until(lambda: cluster["spark2"].ready and cluster["spark3"].ready)
            assert cluster["spark1"].state["phase"] == "serving"
            assert cluster["spark1"].state["connected"] == ["spark2", "spark3"]
            assert cluster["spark2"].state["phase"] == "running"

    run(body)


def test_stops_the_head_first(make: Any) -> None:
    async def body() -> None:
        async with make() as cluster:
            cluster.start_all()
            await cluster.serving()
            await cluster["spark1"].end()
            events = cluster.system.events
            assert events[:2] == ["spark1 stop spark-ready", "spark1 stop spark-engine"]
            assert sorted(events[2:4]) == ["spark2 stop spark-engine", "spark3 stop spark-engine"]
            assert cluster["spark1"].state["phase"] == "stopped"
            await cluster.system.until(cluster.system.phase("spark2", "waiting"))
            assert not cluster["spark2"].ready
            # the workers stay, and serve the head when it comes back
            cluster.system.events.clear()
            cluster.start("spark1")
            await cluster.system.until(cluster.system.phase("spark1", "serving"))
            assert sorted(cluster.system.events) == STARTS

    run(body)


@pytest.mark.parametrize("node", ["spark1", "spark2"])
def test_one_rank_down_stops_and_restarts_all(make: Any, node: str) -> None:
    async def body() -> None:
        async with make() as cluster:
            cluster.start_all()
            await cluster.serving()
            cluster[node].units.crash()
            await cluster.system.until(
                lambda: cluster.system.count("spark1 start spark-ready") == 1
            )
            events = cluster.system.events
            others = sorted({"spark1", "spark2", "spark3"} - {node})
            first_start = next(i for i, event in enumerate(events) if " start " in event)
            before = events[:first_start]
            assert sorted(e for e in before if "kill" in e) == [
                f"{other} kill spark-engine" for other in others
            ]
            after = events[first_start:]
            assert sorted(after[:2]) == STARTS[2:]
            assert after[2:] == STARTS[:2]
            failure = cluster["spark1"].state["last_failure"]["text"]
            assert failure == (
                f"stopping every rank, because of {node}: {ENGINE} failed (signal, status 139)"
            )
            assert len(cluster["spark1"].state["restarts"]) == 1

    run(body)


@pytest.mark.parametrize("end", [("signal", "9"), ("exit-code", "137"), ("oom-kill", "9")])
def test_a_killed_rank_is_the_cause_even_when_it_is_heard_last(
    make: Any, end: tuple[str, str]
) -> None:
    async def body() -> None:
        async with make(timing=PATIENT) as cluster:
            cluster.start_all()
            await cluster.serving()
            cluster["spark2"].units.end("exit-code", "1")
            await cluster.heard_of("spark2")
            cluster["spark3"].units.end(*end, active="deactivating")
            await cluster.system.until(cluster.system.phase("spark1", "loading"))
            failure = cluster["spark1"].state["last_failure"]["text"]
            result, status = end
            assert failure == (
                f"stopping every rank, because of spark3: {ENGINE} is deactivating "
                f"({result}, status {status})"
            )

    run(body)


def test_ranks_that_end_by_themselves_are_named_in_the_order_they_are_heard(make: Any) -> None:
    async def body() -> None:
        async with make(timing=PATIENT) as cluster:
            cluster.start_all()
            await cluster.serving()
            cluster["spark2"].units.end("exit-code", "1")
            await cluster.heard_of("spark2")
            cluster["spark3"].units.end("signal", "6")
            cluster["spark1"].units.end("exit-code", "1")
            await cluster.system.until(cluster.system.phase("spark1", "loading"))
            failure = cluster["spark1"].state["last_failure"]["text"]
            assert failure.endswith(f"because of spark2: {ENGINE} failed (exit-code, status 1)")

    run(body)


def test_a_stop_while_the_cause_is_looked_for_uses_up_no_restart(make: Any) -> None:
    async def body() -> None:
        async with make(timing=PATIENT) as cluster:
            cluster.plan["restart"]["limit"] = 0  # one more failure would be giving up
            cluster.start_all()
            await cluster.serving()
            cluster["spark2"].units.end("exit-code", "1")
            await cluster.heard_of("spark2")
            await cluster["spark1"].end()
            state = cluster["spark1"].state
            assert (state["phase"], state["restarts"]) == ("stopped", [])
            for node in ("spark1", "spark2", "spark3"):
                assert not cluster[node].units.states[ENGINE].running

    run(body)


def test_gives_up_when_the_limit_is_reached(make: Any) -> None:
    async def body() -> None:
        async with make() as cluster:
            cluster.start_all()
            for _ in range(2):
                await cluster.serving()
                cluster["spark3"].units.crash()
                await cluster.system.until(cluster.system.phase("spark1", "loading"))
            await cluster.serving()
            cluster["spark3"].units.crash()
            with pytest.raises(GaveUpError) as caught:
                await cluster["spark1"].task
            assert caught.value.exit_status == 3
            assert str(caught.value).startswith(
                "gave up after 2 restarts within 3600 s; last: spark3: spark-engine.service failed"
            )
            assert cluster["spark1"].state["phase"] == "gave-up"
            for node in ("spark1", "spark2", "spark3"):
                assert not cluster[node].units.states[ENGINE].running
            await cluster.system.until(
                lambda: (
                    "waiting: for spark1 (its last word: gave-up: after 2 restarts"
                    in cluster.system.phases["spark2"][-1]
                )
            )

    run(body)


def test_a_rank_that_does_not_start_stops_the_others(make: Any) -> None:
    async def body() -> None:
        async with make() as cluster:
            cluster.start("spark1")
            cluster.start("spark2")
            member = cluster.start("spark3")
            member.units.fail_start = "spark-engine.service did not start: shard missing"
            with pytest.raises(GaveUpError, match=r"spark3: spark-engine\.service did not start"):
                await cluster["spark1"].task
            assert cluster.system.count("spark3 start spark-engine") == 3
            assert cluster.system.count("spark1 start spark-engine") == 0
            assert not cluster["spark2"].units.states[ENGINE].running

    run(body)


def test_a_start_that_takes_long_is_cancelled_when_another_fails(make: Any) -> None:
    async def body() -> None:
        async with make() as cluster:
            cluster.plan["restart"]["limit"] = 0
            cluster.start("spark1")
            cluster.start("spark2").units.hold_start = asyncio.Event()
            cluster.start("spark3").units.fail_start = "no"
            with pytest.raises(GaveUpError):
                await cluster["spark1"].task

    run(body)


def test_a_worker_that_disappears_stops_all_and_comes_back(make: Any) -> None:
    async def body() -> None:
        async with make() as cluster:
            cluster.start_all()
            await cluster.serving()
            lost = cluster["spark2"]
            lost.task.cancel()
            await asyncio.gather(lost.task, return_exceptions=True)
            await cluster.system.until(cluster.system.phase("spark1", "waiting"))
            assert "spark1 kill spark-engine" in cluster.system.events
            assert "spark3 kill spark-engine" in cluster.system.events
            cluster.system.events.clear()
            cluster.start("spark2")
            await cluster.system.until(cluster.system.phase("spark1", "serving"))
            assert sorted(cluster.system.events) == STARTS

    run(body)


def test_a_worker_that_leaves_orderly_uses_up_no_restart(make: Any) -> None:
    async def body() -> None:
        async with make() as cluster:
            cluster.start_all()
            for _ in range(4):  # more than the limit
                await cluster.serving()
                await cluster["spark2"].end()
                await cluster.system.until(cluster.system.phase("spark1", "waiting"))
                cluster.start("spark2")
            await cluster.serving()
            assert cluster["spark1"].state["restarts"] == []

    run(body)


def test_workers_stop_when_the_head_is_gone(make: Any) -> None:
    async def body() -> None:
        async with make() as cluster:
            cluster.start_all()
            await cluster.serving()
            head = cluster["spark1"]
            # killed, not stopped: no goodbye and no stop commands
            head.context.path("/run/spark/supervisor.json").unlink()
            for task in asyncio.all_tasks():
                name = getattr(task.get_coro(), "__qualname__", "")
                if name.startswith("Hub._accept"):
                    task.cancel()
            await cluster.system.until(
                lambda: (
                    "spark2 kill spark-engine" in cluster.system.events
                    and "spark3 kill spark-engine" in cluster.system.events
                )
            )
            assert not cluster["spark2"].ready

    run(body)


def test_a_guard_that_is_down_stops_all(make: Any) -> None:
    async def body() -> None:
        async with make() as cluster:
            cluster.start_all()
            await cluster.serving()
            cluster["spark3"].units.crash(GUARD, "1")
            await cluster.system.until(lambda: "spark1 kill spark-engine" in cluster.system.events)
            text = cluster["spark1"].state["last_failure"]["text"]
            assert (
                "spark3: spark-guard.service failed (signal, status 1): without the memory" in text
            )

    run(body)


def test_the_guard_is_armed_before_the_engine(make: Any) -> None:
    async def body() -> None:
        async with make() as cluster:
            cluster.start("spark1")
            cluster.start("spark2")
            cluster.start("spark3").units.states[GUARD] = UnitState(GUARD, "inactive")
            await cluster.system.until(cluster.system.phase("spark1", "serving"))
            events = [event for event in cluster.system.events if event.startswith("spark3")]
            assert events == ["spark3 start spark-guard", "spark3 start spark-engine"]

    run(body)


def test_an_engine_that_somebody_restarts_alone_takes_all_down(make: Any) -> None:
    async def body() -> None:
        async with make() as cluster:
            cluster.start_all()
            units = cluster["spark2"].units
            await cluster.serving()
            looks = units.looks
            await cluster.system.until(lambda: units.looks > looks)
            units.states[ENGINE] = UnitState(ENGINE, "active", invocation="another")
            await cluster.system.until(cluster.system.phase("spark1", "loading"))
            text = cluster["spark1"].state["last_failure"]["text"]
            assert "spark2: spark-engine.service was restarted by somebody else" in text
            assert "spark1 kill spark-engine" in cluster.system.events

    run(body)


def test_the_guards_kill_is_named(make: Any) -> None:
    async def body() -> None:
        async with make() as cluster:
            cluster.start_all()
            await cluster.serving()
            import time

            path = cluster["spark2"].context.path("/run/spark/guard.json")
            path.write_text(
                json.dumps(
                    {
                        "time": time.time(),
                        "available_bytes": 3 * 2**30,
                        "threshold_bytes": 5 * 2**30,
                        "killed": ["cgroup x"],
                    }
                )
            )
            cluster["spark2"].units.crash()
            await cluster.system.until(cluster.system.phase("spark1", "loading"))
            assert (
                cluster["spark1"]
                .state["last_failure"]["text"]
                .endswith("(memory guard: 3.00 GiB available, threshold 5.00 GiB)")
            )

    run(body)


def test_an_endpoint_that_stops_to_answer_restarts_all(make: Any) -> None:
    async def body() -> None:
        async with make() as cluster:
            cluster.start_all()
            await cluster.serving()
            cluster["spark1"].units.states[READY] = UnitState(
                READY, "failed", result="exit-code", status="1", text="the engine is wedged"
            )
            await cluster.system.until(cluster.system.phase("spark1", "loading"))
            assert "spark2 kill spark-engine" in cluster.system.events
            text = cluster["spark1"].state["last_failure"]["text"]
            assert "spark-ready.service failed (exit-code, status 1): the engine is wedged" in text

    run(body)


def test_ready_is_waited_for(make: Any) -> None:
    async def body() -> None:
        async with make() as cluster:
            cluster.system.ready_when_started = False
            cluster.start_all()
            await cluster.system.until(cluster.system.phase("spark1", "loading"))
            assert not cluster["spark2"].ready
            cluster["spark1"].units.states[READY] = UnitState(READY, "active")
            await cluster.system.until(cluster.system.phase("spark1", "serving"))
            await cluster.system.until(lambda: cluster["spark2"].ready)

    run(body)


def test_an_engine_left_behind_is_stopped_first(make: Any) -> None:
    async def body() -> None:
        async with make() as cluster:
            cluster.start("spark1", running=True)
            cluster.start("spark2", running=True)
            await cluster.system.until(
                lambda: (
                    cluster.system.count("spark1 kill spark-engine") == 1
                    and cluster.system.count("spark2 kill spark-engine") == 1
                )
            )

    run(body)


def test_a_readiness_left_behind_does_not_count(make: Any) -> None:
    async def body() -> None:
        async with make() as cluster:
            head = cluster.start("spark1")
            head.units.states[READY] = UnitState(READY, "active")
            cluster.start("spark2")
            cluster.start("spark3")
            await cluster.system.until(cluster.system.phase("spark1", "serving"))
            assert cluster.system.events[0] == "spark1 stop spark-ready"
            assert cluster.system.events[-1] == "spark1 start spark-ready"

    run(body)


def test_a_crashed_supervisor_remembers_its_restarts(make: Any) -> None:
    async def body() -> None:
        async with make() as cluster:
            cluster.plan["restart"]["limit"] = 1
            cluster.start_all()
            await cluster.serving()
            cluster["spark3"].units.crash()
            await cluster.system.until(cluster.system.phase("spark1", "loading"))
            await cluster.serving()
            state = cluster["spark1"].state
            cluster["spark1"].task.cancel()
            await asyncio.gather(cluster["spark1"].task, return_exceptions=True)
            path = cluster["spark1"].context.path("/run/spark/supervisor.json")
            path.write_text(json.dumps(state))  # as a kill -9 leaves it
            cluster.start("spark1")
            await cluster.serving()
            cluster["spark3"].units.crash()
            with pytest.raises(GaveUpError):
                await cluster["spark1"].task

    run(body)


def test_a_single_node_needs_no_network(make: Any) -> None:
    async def body() -> None:
        async with make() as cluster:
            cluster.plan["nodes"] = cluster.plan["nodes"][:1]
            cluster.plan["start_order"] = [["spark1"]]
            cluster.keys["spark1"] = None
            head = cluster.start("spark1")
            await cluster.serving()
            assert not any("cluster-key" in line for line in head.log.lines)
            head.units.crash()
            await cluster.system.until(cluster.system.phase("spark1", "loading"))
            await cluster.system.until(cluster.system.phase("spark1", "serving"))
            await head.end()
            assert cluster.system.events[-1] == "spark1 stop spark-engine"

    run(body)


@pytest.mark.parametrize("wrong", ["key", "no key", "plan", "flags", "name"])
def test_who_may_not_take_part_is_refused_and_told(make: Any, wrong: str) -> None:
    async def body() -> None:
        async with make() as cluster:
            cluster.start("spark1")
            cluster.start("spark3")
            if wrong == "key":
                cluster.keys["spark2"] = b"another key of 32 bytes is here!"
            elif wrong == "no key":
                cluster.keys["spark2"] = None
            elif wrong == "plan":
                cluster.plan["name"] = "older"
            elif wrong == "flags":
                cluster.plan["engine"]["agreement_sha256"] = "0" * 64
            else:
                cluster.plan["nodes"][1]["address"] = "127.0.0.13"
                cluster.plan["nodes"][2]["address"] = "127.0.0.12"
            worker = cluster.start("spark2")
            await cluster.system.until(
                lambda: any("refuses" in x or "copy" in x for x in worker.log.lines)
            )
            lines = "\n".join(worker.log.lines)
            expected = {
                "key": "the cluster keys differ",
                "no key": "spark2 has no cluster key, spark1 has a one",
                "plan": "the plans differ",
                "flags": "the plans differ",
                "name": "the plans differ",
            }[wrong]
            assert expected in lines
            head = "\n".join(cluster["spark1"].log.lines)
            assert "refused 127.0.0.1" in head
            assert cluster.system.events == []

    run(body)


def test_ranks_whose_plans_differ_in_their_own_parts_belong_together(make: Any) -> None:
    async def body() -> None:
        async with make() as cluster:
            cluster.start("spark1")
            cluster.start("spark3")
            cluster.plan["source"]["cluster_sha256"] = "0" * 64
            cluster.plan["api"]["key_file"] = "/etc/spark/other"
            cluster.plan["nodes"][1]["engram"]["device"] = "/dev/disk/by-id/nvme-new"
            cluster.plan["nodes"][1]["env"]["NCCL_DEBUG"] = "INFO"
            cluster.start("spark2")
            await cluster.serving()
            hashes = {member.context.sha256 for member in cluster.members.values()}
            assert len(hashes) == 3
            assert len({m.context.shared_sha256 for m in cluster.members.values()}) == 1

    run(body)


def test_a_stranger_gets_no_word(make: Any) -> None:
    async def body() -> None:
        async with make() as cluster:
            cluster.start("spark1")
            await cluster.system.until(cluster.system.phase("spark1", "waiting"))
            port = cluster.plan["ports"]["supervisor"]
            for _ in range(3):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.11", port, local_addr=("127.0.0.99", 0)
                )
                assert await reader.read() == b""
                writer.close()
            refusals = [x for x in cluster["spark1"].log.lines if "127.0.0.99" in x]
            assert refusals == [
                "<4>refused 127.0.0.99: a stranger: its address is no worker's of the plan"
            ]

    run(body)


@pytest.mark.parametrize(
    "garbage",
    [b"\0" * 70_000, b"{}\n", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"[" * 60_000 + b"\n", b""],
)
def test_garbage_from_a_peer_changes_nothing(make: Any, garbage: bytes) -> None:
    async def body() -> None:
        async with make() as cluster:
            cluster.start_all()
            await cluster.serving()
            port = cluster.plan["ports"]["supervisor"]
            reader, writer = await asyncio.open_connection(
                "127.0.0.11", port, local_addr=("127.0.0.12", 0)
            )
            await reader.readline()  # the challenge
            writer.write(garbage)
            writer.write_eof()
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
            assert cluster.system.events == []
            assert cluster["spark1"].state["phase"] == "serving"
            assert not cluster["spark1"].task.done()

    run(body)


def test_no_key_anywhere_works_with_a_warning(make: Any) -> None:
    async def body() -> None:
        async with make() as cluster:
            cluster.keys = {"spark1": None, "spark2": None, "spark3": None}
            cluster.start_all()
            await cluster.serving()
            for member in cluster.members.values():
                assert any(
                    line.startswith("<4>/etc/spark/cluster-key is not there")
                    for line in member.log.lines
                )

    run(body)


def test_without_a_key_a_name_is_bound_to_its_address(make: Any) -> None:
    async def body() -> None:
        async with make() as cluster:
            cluster.keys = {"spark1": None}
            head = cluster.start("spark1")
            await cluster.system.until(cluster.system.phase("spark1", "waiting"))
            port = cluster.plan["ports"]["supervisor"]
            reader, writer = await asyncio.open_connection(
                "127.0.0.11", port, local_addr=("127.0.0.12", 0)
            )
            await reader.readline()
            hello = {
                "type": "hello",
                "version": 1,
                "node": "spark3",
                "nonce": "0",
                "plan": head.context.shared_sha256,
            }
            writer.write(json.dumps(hello).encode() + b"\n")
            assert json.loads(await reader.readline())["type"] == "welcome"
            answer = json.loads(await reader.readline())
            assert answer == {"type": "refused", "reason": "'spark3' may not come from 127.0.0.12"}
            writer.close()

    run(body)


def test_a_port_in_use_is_said(make: Any) -> None:
    async def body() -> None:
        async with make() as cluster:
            port = cluster.plan["ports"]["supervisor"]
            with socket.socket() as taken:
                taken.bind(("127.0.0.11", port))
                taken.listen()
                member = cluster.start("spark1")
                with pytest.raises(NodeError, match=f"cannot listen on 127.0.0.11 port {port}"):
                    await member.task

    run(body)
