from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fleet_world import World, make_plan, remote_words, write_program

from spark_appliance import lockfile
from spark_appliance.errors import OperationError
from spark_appliance.fleet.board import Board, Row
from spark_appliance.fleet.crew import FleetError
from spark_appliance.fleet.enginelog import Progress
from spark_appliance.fleet.evidence import RunFolder
from spark_appliance.fleet.follow import Followers, journal_argv, parse_entry
from spark_appliance.fleet.remote import Rehearsal
from spark_appliance.fleet.serve import ServeError, Start

TARGET_UNITS = (
    "spark-fabric.service spark-engram-pack.service spark-guard.service "
    "spark-supervisor.service spark.target"
)


def start_of(
    world: World, *, step: Callable[[int], None] = lambda _: None, folder: RunFolder | None = None
) -> Start:
    """Return a start whose waiting moves the world: ``step`` gets the number of the wait."""
    count = 0

    def wait(_: float) -> None:
        nonlocal count
        count += 1
        step(count)
        assert count < 200, "serve never came to an end"

    return Start(world.crew(folder), folder, wait=wait)


class Seen:
    """Waits until the board has shown texts with all of the wanted words."""

    def __init__(self, board: Board, *wanted: str) -> None:
        self._missing = set(wanted)
        self._all = threading.Event()
        self.texts: list[str] = []
        board.listen(self._row)

    def _row(self, row: Row) -> None:
        text = f"{row.node} {row.state} {row.stage} {row.detail}"
        self.texts.append(text)
        self._missing -= {word for word in self._missing if word in text}
        if not self._missing:
            self._all.set()

    def wait(self) -> None:
        assert self._all.wait(60), f"never shown: {self._missing}"


def starts(world: World) -> list[tuple[str, str]]:
    """Return (node, units) of every start, in the order of the ssh log."""
    result = []
    for line in world.ssh_log():
        words = remote_words(line)
        if "systemctl" in words and "start" in words:
            result.append(
                (line.split(" -- ")[1].split(" ")[0], " ".join(words[words.index("--") + 1 :]))
            )
    return result


def test_workers_start_before_the_head_and_it_ends_when_ready(world: World) -> None:
    world.put_plan()

    def step(count: int) -> None:
        if count == 3:
            world.set("spark1", "ready")

    start_of(world, step=step).run()
    order = [node for node, _ in starts(world)]
    assert sorted(order[:2]) == ["spark2", "spark3"]
    assert order[2:] == ["spark1"]
    assert starts(world)[-1][1] == TARGET_UNITS
    assert all("--no-block" in c for c in world.calls("spark2") if c.startswith("systemctl start"))


def test_the_door_is_opened_and_old_failures_forgotten_before_the_start(world: World) -> None:
    world.put_plan()
    world.set("spark1", "nft-rules", "table inet spark_drain {}")
    world.set("spark1", "auto-ready")
    start_of(world).run()
    calls = [c for c in world.calls("spark1") if c.split()[0] in ("nft", "systemctl")]
    assert calls[:4] == [
        "nft list table inet spark_drain",
        "nft delete table inet spark_drain",
        f"systemctl reset-failed -- {TARGET_UNITS}",
        f"systemctl start --no-block -- {TARGET_UNITS}",
    ]


def test_a_node_with_another_plan_stops_the_start_before_it_begins(world: World) -> None:
    world.put_plan()
    other = make_plan(api={"port": 9999, "key_file": "/etc/spark/api-key"})
    path = world.node("spark2") / "etc/spark/plan.json"
    path.write_text(lockfile.dump_own(other, "spark2"))
    with pytest.raises(FleetError, match="spark2: compare the plan: the node has another plan"):
        start_of(world).run()
    assert starts(world) == []


def test_an_unreachable_node_stops_the_start_before_it_begins(world: World) -> None:
    world.put_plan()
    world.set("spark3", "gone")
    with pytest.raises(FleetError, match="spark3: read the state: no SSH connection"):
        start_of(world).run()
    assert starts(world) == []


def test_doctor_s_no_stops_the_start(world: World) -> None:
    world.put_plan()

    def preflight() -> None:
        raise OperationError("doctor says no")

    with pytest.raises(OperationError, match="doctor says no"):
        start_of(world).run(preflight)
    assert starts(world) == []


def test_the_rank_that_failed_first_is_named_whatever_its_clock_says(
    world: World, tmp_path: Path
) -> None:
    world.put_plan()
    now = time.time()
    # spark3 failed 30 s before spark2, but its clock is an hour ahead
    world.set("spark3", "clock", f"{now + 3600:.6f}")

    def step(count: int) -> None:
        if count == 1:
            world.journal("spark2", "spark-engine.service", "ValueError: lost the others", now + 60)
            world.journal("spark3", "spark-engine.service", "OSError: the disk is full", now + 3630)
            seen.wait()
            world.report(
                "spark1", status={"supervisor": {"phase": "gave-up", "text": "3 restarts used"}}
            )

    folder = RunFolder.create(tmp_path / "runs", "serve", world.plan, [])
    start = start_of(world, step=step, folder=folder)
    seen = Seen(start.crew.board, "lost the others", "the disk is full")
    with pytest.raises(ServeError) as caught:
        start.run()
    assert caught.value.first is not None
    assert caught.value.first.node == "spark3"
    assert "failed first: spark3: OSError: the disk is full" in str(caught.value)
    assert "the supervisor of spark1 gave up: 3 restarts used" in str(caught.value)
    assert "the disk is full" in (folder.path / "log-spark3.txt").read_text()
    assert "lost the others" in (folder.path / "log-spark2.txt").read_text()


def test_a_node_that_goes_away_is_named(world: World) -> None:
    world.put_plan()

    def step(count: int) -> None:
        if count == 1:
            world.set("spark2", "gone")

    with pytest.raises(ServeError, match="spark2 is gone: no SSH connection"):
        start_of(world, step=step).run()


def test_an_hour_is_the_end(world: World) -> None:
    world.put_plan()
    start = start_of(world)
    ticks = iter(range(0, 10**7, 600))
    start.clock = lambda: next(ticks)
    with pytest.raises(ServeError, match="not ready after 3720 s"):
        start.run()


def test_fail_fast_ends_at_the_first_failure(world: World) -> None:
    world.put_plan()
    world.journal("spark2", "spark-engine.service", "ValueError: broken")
    start = start_of(world, step=lambda _: seen.wait())
    start.fail_fast = True
    seen = Seen(start.crew.board, "ValueError: broken")
    with pytest.raises(ServeError, match="spark2 failed"):
        start.run()


def test_what_a_silent_rank_holds_open_is_shown(world: World) -> None:
    world.put_plan()
    world.journal("spark2", "spark-engine.service", "Load weight begin. avail mem=115.20 GB")
    world.report("spark2", loading={"processes": 9, "shard": 12, "of": 48})

    def step(_: int) -> None:
        weights.wait()
        if any("shard 12 of 48" in text for text in weights.texts):
            world.set("spark1", "ready")

    start = start_of(world, step=step)
    weights = Seen(start.crew.board, "115.20 GB free")
    start.run()
    assert "spark2 working loading weights shard 12 of 48" in weights.texts


def test_a_dry_run_prints_the_starts_in_order(world: World) -> None:
    rehearsal = Rehearsal()
    Start(world.crew(rehearsal=rehearsal)).run()
    steps = [(node, step) for node, step, _, _ in rehearsal.commands]
    assert steps[-6:] == [
        ("spark2", "forget old failures"),
        ("spark2", "start"),
        ("spark3", "forget old failures"),
        ("spark3", "start"),
        ("spark1", "forget old failures"),
        ("spark1", "start"),
    ]
    assert world.ssh_log() == []


def test_the_journal_s_command_line() -> None:
    assert journal_argv(["a.service", "b.service"], since=12.4, follow=True) == [
        "journalctl",
        "--output=json",
        "--no-pager",
        "--quiet",
        "--output-fields=MESSAGE,UNIT,_SYSTEMD_UNIT",
        "--since=@12",
        "--follow",
        "--unit=a.service",
        "--unit=b.service",
    ]


def test_a_journal_is_read_from_the_second_that_holds_the_moment() -> None:
    assert "--since=@12" in journal_argv(["a.service"], since=12.7)


def test_after_a_restart_the_first_failure_is_the_one_of_the_new_attempt(world: World) -> None:
    world.put_plan()
    crew = world.crew()
    with Followers(crew, {}) as followers:
        first = Seen(crew.board, "the first reason")
        world.journal("spark2", "spark-engine.service", "ValueError: the first reason")
        first.wait()
        followers.again("spark2")
        assert followers.first_failure() is None
        assert followers.progress("spark2") == Progress()
        assert crew.board.row("spark2").state == "working"
        second = Seen(crew.board, "the second reason")
        world.journal("spark2", "spark-engine.service", "ValueError: the second reason")
        second.wait()
        failure = followers.first_failure()
    assert failure is not None
    assert failure.reason == "ValueError: the second reason"


def test_a_restart_that_helps_leaves_no_failure_on_the_board(world: World) -> None:
    world.put_plan()

    def step(count: int) -> None:
        notes.append(start.crew.board.note)
        if count == 1:
            world.journal("spark2", "spark-engine.service", "ValueError: broken")
            seen.wait()
        elif count == 2:
            world.report("spark1", status={"supervisor": {"restarts": [1.0]}})
        elif count == 3:
            world.set("spark1", "ready")

    notes: list[str] = []
    start = start_of(world, step=step)
    seen = Seen(start.crew.board, "ValueError: broken")
    start.run()
    assert notes == ["", "spark2 failed first: ValueError: broken", ""]


def test_a_reconnect_repeats_no_entry(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_appliance.fleet.follow._RETRY_SECONDS", 0.0)
    # the journal gives what it has and the connection ends; the second one gives all of it again
    write_program(
        world.base / "bin/journalctl",
        '#!/bin/sh\n[ -e "$FAKE_ROOT/once" ] || { touch "$FAKE_ROOT/once"; '
        'exec cat "$FAKE_ROOT/journal"; }\n'
        'while [ ! -e "$FAKE_ROOT/go" ]; do sleep 0.05; done\n'
        'exec tail -n +1 -f "$FAKE_ROOT/journal"\n',
    )
    now = time.time()
    world.journal("spark2", "spark-engine.service", "ValueError: old", now)
    crew = world.crew().only(["spark2"])
    old = Seen(crew.board, "ValueError: old")
    with Followers(crew, {}) as followers:
        old.wait()
        followers.again("spark2")
        new = Seen(crew.board, "ValueError: new")
        world.journal("spark2", "spark-engine.service", "ValueError: new", now + 1)
        world.set("spark2", "go")
        new.wait()
        failure = followers.first_failure()
    assert failure is not None
    assert failure.reason == "ValueError: new"


def test_journal_entries_with_bytes_and_damage() -> None:
    line = '{"__REALTIME_TIMESTAMP":"1500000","MESSAGE":[104,105],"_SYSTEMD_UNIT":"a.service"}'
    entry = parse_entry(line)
    assert entry is not None
    assert (entry.when, entry.unit, entry.text) == (1.5, "a.service", "hi")
    for bad in ("", "{", "[]", "null", '{"MESSAGE":"x"}', '{"__REALTIME_TIMESTAMP":"x"}'):
        assert parse_entry(bad) is None


def test_following_ends_with_its_context(world: World) -> None:
    crew = world.crew()
    began = time.monotonic()
    with Followers(crew, {}):
        pass
    assert time.monotonic() - began < 20
    # the crew itself goes on
    assert crew.remotes[0].run("say", ["echo", "x"], seconds=30).stdout == "x\n"
