from __future__ import annotations

from pathlib import Path

import pytest
from fleet_world import World, environment, make_plan, make_world

from spark_appliance.fleet.board import Row
from spark_appliance.fleet.crew import FleetError
from spark_appliance.fleet.pack import pack
from spark_appliance.fleet.remote import StepError
from spark_appliance.fleet.share import (
    Listing,
    _copy,
    compare,
    copy_argv,
    daemon_config,
    exported_to,
    parse_listing,
    share,
)
from spark_appliance.model.plan import Plan

OPTIONS = "(sync,wdelay,hide,no_subtree_check,fsid=0,sec=sys,ro,secure,root_squash,no_all_squash)"


def checkpoint(folder: Path, *, shards: int = 3, size: int = 10) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    for number in range(1, shards + 1):
        (folder / f"model-{number:05d}-of-{shards:05d}.safetensors").write_bytes(b"x" * size)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A cluster whose checkpoint lies in a folder of this machine, the same for every node."""
    models = tmp_path / "models"
    checkpoint(models)
    plan = make_plan(model={"path": str(models), "shards": 3})
    made = make_world(tmp_path / "fleet", plan)
    (made.base / "run").mkdir(mode=0o700)
    for name, value in environment(made).items():
        monkeypatch.setenv(name, value)
    made.put_plan()
    export = plan.nodes[0].weights.export
    assert export is not None
    lines = "".join(f"{models}\t{client}{OPTIONS}\n" for client in export.clients)
    made.set("spark1", "exports", lines)
    return made


def test_the_head_exports_and_every_worker_reads_it_through_the_mount(shared: World) -> None:
    texts = share(shared.crew())
    assert texts["spark1"] == "3 shards"
    assert texts["spark2"] == "3 shards, the head's index"
    assert shared.calls("spark1") == [
        "systemctl start -- nfs-server.service",
        "exportfs -ra",
        "exportfs -v",
    ]
    mount = shared.plan.nodes[1].weights.mount
    assert mount is not None
    assert shared.calls("spark2") == [
        f"systemctl start -- {mount.unit.removesuffix('.mount')}.automount",
        f"systemctl start -- {mount.unit}",
    ]


def test_sharing_twice_is_the_same(shared: World) -> None:
    share(shared.crew())
    assert share(shared.crew())["spark3"] == "3 shards, the head's index"


def test_a_mount_that_fails_is_named(shared: World) -> None:
    mount = shared.plan.nodes[2].weights.mount
    assert mount is not None
    shared.set("spark3", f"fail-{mount.unit}", "access denied by server")
    with pytest.raises(FleetError, match=r"spark3: mount: Job for .* access denied by server"):
        share(shared.crew())


def test_strangers_in_the_export_are_named(shared: World) -> None:
    path = shared.node("spark1") / "exports"
    models = shared.plan.model.path
    path.write_text(path.read_text() + f"{models}\n\t\t192.168.1.0/24{OPTIONS}\n")
    with pytest.raises(StepError, match=r"is exported also to 192\.168\.1\.0/24"):
        share(shared.crew())


def test_a_missing_client_is_named(shared: World) -> None:
    path = shared.node("spark1") / "exports"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(StepError, match=r"is exported not to 10\.77\.112\.2"):
        share(shared.crew())


def test_an_unfinished_download_is_named_before_anything_is_exported(shared: World) -> None:
    Path(shared.plan.model.path, "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(StepError, match="has 2 shards, the plan says 3"):
        share(shared.crew())
    assert shared.calls("spark1") == []


def test_differences_between_head_and_worker() -> None:
    head = Listing("a" * 64, {"one": 10, "two": 20})
    assert compare(head, head) is None
    assert compare(Listing("b" * 64, head.shards), head) == (
        "model.safetensors.index.json is another one than the head's"
    )
    assert compare(Listing("a" * 64, {"one": 10}), head) == "1 shards are missing, the first is two"
    assert compare(Listing("a" * 64, {"one": 10, "two": 19}), head) == (
        "two has 19 bytes, on the head 20"
    )


def test_listings_with_spaces_and_damage() -> None:
    text = "abc\n10 model 1.safetensors\nnonsense\n20 b.safetensors\n"
    assert parse_listing(text) == Listing("abc", {"model 1.safetensors": 10, "b.safetensors": 20})
    assert parse_listing("") == Listing("", {})


def test_exportfs_in_both_of_its_forms() -> None:
    text = (
        "/models/x     \t10.0.0.2(ro,fsid=0)\n"
        "/a/very/long/path/that/exportfs/breaks\n\t\t10.0.0.3(ro)\n"
        "/models/x     \t10.0.0.4(ro,fsid=0)\n"
    )
    assert exported_to(text, "/models/x") == {"10.0.0.2", "10.0.0.4"}
    assert exported_to(text, "/a/very/long/path/that/exportfs/breaks") == {"10.0.0.3"}


def test_copies_come_from_the_head_over_the_rails(tmp_path: Path) -> None:
    plan = make_plan("four-spark-ring", model={"path": "/models/x", "shards": 3})
    world = make_world(tmp_path / "fleet", plan)
    crew = world.crew()
    argv = copy_argv(crew, crew.get("spark2"), verify=False)
    assert argv[0] == "rsync"
    assert argv[-2:] == [
        f"rsync://{plan.nodes[0].rails[0].peers[0].address and _head(plan, 1)}:20873/checkpoint/",
        "/models/x/",
    ]
    # the opposite node of a ring has no cable to the head
    assert copy_argv(crew, crew.get("spark3"), verify=True)[-2] == (
        f"rsync://{plan.nodes[0].address}:20873/checkpoint/"
    )
    assert "--checksum" in copy_argv(crew, crew.get("spark3"), verify=True)
    assert daemon_config(crew, ["10.0.0.2"]) == (
        "use chroot = yes\nuid = nobody\ngid = nogroup\nhosts allow = 10.0.0.2\n"
        "hosts deny = *\n[checkpoint]\npath = /models/x\nread only = yes\nlist = no\n"
    )


def _head(plan: Plan, rank: int) -> str:
    for rail in plan.nodes[rank].rails:
        for peer in rail.peers:
            if peer.node == "spark1":
                return peer.address
    raise AssertionError


def test_a_copy_server_never_outlives_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "models"
    checkpoint(models)
    plan = make_plan("four-spark-ring", model={"path": str(models), "shards": 3})
    world = make_world(tmp_path / "fleet", plan)
    (world.base / "run").mkdir(mode=0o700)
    for name, value in environment(world).items():
        monkeypatch.setenv(name, value)
    rsync = '#!/bin/sh\nprintf \'%s\\n\' "rsync $*" >> "$FAKE_ROOT/calls"\n'
    (world.base / "bin/rsync").write_text(rsync + '[ "$1" = --daemon ] || exit 12\n')
    monkeypatch.setattr(
        "spark_appliance.fleet.share._DAEMON", 'cat > "$FAKE_ROOT/copy.conf"; systemd-run "$@"'
    )
    with pytest.raises(FleetError, match="spark2: copy"):
        share(world.crew())
    assert "hosts allow" in (world.node("spark1") / "copy.conf").read_text()
    assert world.calls("spark1")[-1] == "systemctl stop spark-copy.service"


def test_a_copy_shows_how_far_it_is_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "models"
    checkpoint(models)
    plan = make_plan("four-spark-ring", model={"path": str(models), "shards": 3})
    world = make_world(tmp_path / "fleet", plan)
    (world.base / "run").mkdir(mode=0o700)
    for name, value in environment(world).items():
        monkeypatch.setenv(name, value)
    # as rsync 3.2 writes: each update begins with a carriage return; it ends when one was seen
    (world.base / "bin/rsync").write_text(
        "#!/bin/sh\n"
        "printf '\\r  1,024   25%%    1.96MB/s    0:00:03  \\r  2,048   50%%  2.00MB/s  '\n"
        'n=0; while [ ! -e "$FAKE_ROOT/seen" ] && [ $n -lt 400 ]; do\n'
        "  sleep 0.05; n=$((n+1))\ndone\n"
        "printf '\\r  4,096  100%%    2.00MB/s    0:00:04 (xfr#1, to-chk=0/2)\\n'\n"
    )
    crew = world.crew()
    shown: list[tuple[str, float | None]] = []

    def listen(row: Row) -> None:
        shown.append((row.detail, row.share))
        if row.share == 0.25:
            world.set(row.node, "seen")

    crew.board.listen(listen)
    _copy(crew, crew.get("spark2"), verify=False)
    assert [item for item in shown if item[1] is not None] == [
        ("25 %, 1.96MB/s", 0.25),
        ("50 %, 2.00MB/s", 0.5),
        ("100 %, 2.00MB/s", 1.0),
    ]


# -- pack ------------------------------------------------------------------------------------

PACK = "spark-engram-pack.service"
BAR = "engram-l1-r0of3.bin [###...] {} % 3.0 GiB of 32.6 GiB, 1.1 GiB/s, 30 s left"


def pack_order(world: World) -> list[str]:
    return [
        line.split(" -- ")[1].split(" ")[0]
        for line in world.ssh_log()
        if f"systemctl start --no-block -- {PACK}" in line
    ]


def finish(world: World, *names: str) -> None:
    for name in names:
        world.set(name, f"active/{PACK}", "active")


def test_the_head_packs_before_the_workers(world: World) -> None:
    world.put_plan()

    def wait(_: float) -> None:
        finish(world, *pack_order(world))

    for name in ("spark1", "spark2", "spark3"):
        world.set(name, f"active/{PACK}", "inactive")
    starts_slowly(world)
    packed = pack(world.crew(), wait=wait)
    assert pack_order(world)[0] == "spark1"
    assert sorted(pack_order(world)[1:]) == ["spark2", "spark3"]
    assert packed == {node.name: node.engram.bytes for node in world.plan.nodes if node.engram}


def starts_slowly(world: World) -> None:
    """Let a start leave the unit activating, as a oneshot that runs does."""
    path = world.base / "bin/systemctl"
    text = path.read_text()
    mark = 'echo active > "$FAKE_ROOT/active/$unit"'
    if mark in text:
        path.write_text(text.replace(mark, 'echo activating > "$FAKE_ROOT/active/$unit"'))


def test_the_packer_s_bar_is_shown(world: World) -> None:
    world.put_plan()
    starts_slowly(world)
    world.journal("spark1", PACK, BAR.format("12.5"))
    crew = world.crew().only(["spark1"])
    shown: list[tuple[str, float | None]] = []
    crew.board.listen(lambda row: shown.append((row.detail, row.share)))
    pack(crew, wait=lambda _: finish(world, "spark1"))
    assert ("engram-l1-r0of3.bin 12 % 3.0 GiB of 32.6 GiB, 1.1 GiB/s, 30 s left", 0.125) in shown


def test_the_packer_s_own_reason_is_given(world: World) -> None:
    world.put_plan()
    starts_slowly(world)
    text = "spark-engram: error: engram-l1-r0of3.bin is packed for layout rows, not columns"
    world.journal("spark1", PACK, text)
    world.journal("spark1", PACK, "spark-engram-pack.service: Failed with result 'exit-code'.")

    def wait(_: float) -> None:
        world.set("spark1", f"active/{PACK}", "failed")

    with pytest.raises(FleetError, match="packed for layout rows, not columns"):
        pack(world.crew(), wait=wait)
    assert pack_order(world) == ["spark1"]


def test_a_start_that_waits_for_its_turn_is_no_failure(world: World) -> None:
    world.put_plan()
    starts_slowly(world)
    path = world.base / "bin/systemctl"
    # the job waits for a mount: the unit is still inactive
    queued = 'mkdir -p "$FAKE_ROOT/job"; echo 7 > "$FAKE_ROOT/job/$unit"'
    mark = 'echo activating > "$FAKE_ROOT/active/$unit"'
    path.write_text(path.read_text().replace(mark, queued))
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        world.unset("spark1", f"job/{PACK}")
        finish(world, "spark1")

    pack(world.crew().only(["spark1"]), wait=wait)
    assert len(waits) == 1


def test_what_systemd_says_is_no_reason_when_the_unit_spoke(world: World) -> None:
    world.put_plan()
    starts_slowly(world)
    world.journal("spark1", PACK, "cannot read /models: no such file", own=True)
    world.journal("spark1", PACK, "spark-engram-pack.service: Failed with result 'exit-code'.")
    world.journal("spark1", PACK, "spark-engram-pack.service: Consumed 4.087s CPU time.")

    def wait(_: float) -> None:
        world.set("spark1", f"active/{PACK}", "failed")

    with pytest.raises(FleetError, match="cannot read /models: no such file"):
        pack(world.crew(), wait=wait)


def test_packed_files_that_are_not_whole_are_named(world: World) -> None:
    world.put_plan()
    world.report("spark1", status={"engram": [{"name": "engram-l1-r0of3.bin", "good": False}]})
    with pytest.raises(FleetError, match=r"engram-l1-r0of3\.bin are not complete"):
        pack(world.crew().only(["spark1"]))


BAD = {"engram": [{"name": "engram-l1-r0of3.bin", "good": False}]}


def test_whole_files_are_left_alone(world: World) -> None:
    world.put_plan()
    finish(world, "spark1")
    pack(world.crew().only(["spark1"]))
    assert [c for c in world.calls("spark1") if "start" in c.split()[1]] == []


def test_a_packer_that_ran_before_is_run_again_for_damaged_files(world: World) -> None:
    world.put_plan()
    finish(world, "spark1")
    world.report("spark1", status=BAD)
    with pytest.raises(FleetError, match="are not complete"):
        pack(world.crew().only(["spark1"]))
    assert f"systemctl restart --no-block -- {PACK}" in world.calls("spark1")


def test_packing_never_stops_an_engine_that_runs(world: World) -> None:
    world.put_plan()
    finish(world, "spark1")
    world.report("spark1", status=BAD)
    world.set("spark1", "active/spark-engine.service", "active")
    with pytest.raises(FleetError, match="the engine runs, and packing would stop it"):
        pack(world.crew().only(["spark1"]))
    assert [c for c in world.calls("spark1") if "start" in c.split()[1]] == []
