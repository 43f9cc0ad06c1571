"""``share`` with local copies and the real rsync: server on the head, clients on the workers.

The nodes are those of ``fleet_world``, but each command of one runs in a mount name space of its
own, where the folder of the checkpoint is the node's and so is /run. What is not real: systemd
starts no unit, and all addresses are 127.0.0.1.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet_world import World, environment, make_plan, make_world, write_program

from spark_appliance.fleet import share as sharing
from spark_appliance.fleet.crew import Crew, FleetError
from spark_appliance.fleet.share import share

SIZE = 3 << 20
"""Bytes of a shard."""
SHARDS = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]

_NODE = """\
mkdir -p "$FAKE_ROOT/run"
exec unshare -m sh -c 'mount --bind "$1" "$2" && mount --bind "$3" /run && exec sh -c "$4"' \\
  sh "$FAKE_ROOT/checkpoint" "$FAKE_MODELS" "$FAKE_ROOT/run" "$2"
"""

_SYSTEMD_RUN = """\
#!/bin/sh
printf '%s\\n' "systemd-run $*" >> "$FAKE_ROOT/calls"
while [ "$1" != rsync ]; do shift; done
"$@" > "$FAKE_ROOT/server.log" 2>&1 &
echo $! > "$FAKE_ROOT/server"
"""

_SYSTEMCTL_STOP = """\
if [ "$*" = "stop spark-copy.service" ] && [ -e "$FAKE_ROOT/server" ]; then
  kill "$(cat "$FAKE_ROOT/server")"
  rm "$FAKE_ROOT/server"
  # as systemctl does: back when it is gone
  while bash -c ': < /dev/tcp/127.0.0.1/"$0"' "$FAKE_PORT" 2> /dev/null; do :; done
fi
"""

# A client that is to be cut is slow, and interrupted when part of a shard is there.
_RSYNC = """\
#!/bin/sh
real=%s
[ "$1" = --daemon ] && exec "$real" "$@"
printf '%%s\\n' "rsync $*" >> "$FAKE_ROOT/calls"
if [ -e "$FAKE_ROOT/cut" ]; then
  "$real" --bwlimit=512K "$@" &
  part='.model-00001-of-*'  # its name until it is whole or interrupted
  until [ -n "$(find "$FAKE_MODELS" -name "$part" -size +100k)" ]; do kill -0 $! || break; done
  kill -INT $!
  wait $!
  exit
fi
"$real" --stats "$@" > "$FAKE_ROOT/stats"
status=$?
cat "$FAKE_ROOT/stats"
exit $status
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A cluster whose nodes keep the checkpoint themselves; the head's is complete."""
    rsync = shutil.which("rsync")
    if rsync is None:
        pytest.skip("rsync is not installed")
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("needs root and a mount name space: rsync's server changes root and user")
    models = tmp_path / "models"
    models.mkdir()
    plan = make_plan("four-spark-ring", model={"path": str(models), "shards": len(SHARDS)})
    world = make_world(tmp_path / "fleet", plan)
    (world.base / "run").mkdir(mode=0o700)
    port = free_port()
    for name, value in environment(world).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FAKE_MODELS", str(models))
    monkeypatch.setenv("FAKE_PORT", str(port))
    monkeypatch.setattr(sharing, "COPY_PORT", port)
    monkeypatch.setattr(sharing, "copy_source", lambda _crew, _remote: "127.0.0.1")
    ssh = world.base / "here/ssh"
    ssh.write_text(ssh.read_text().replace('exec sh -c "$2"\n', _NODE))
    write_program(world.base / "bin/systemd-run", _SYSTEMD_RUN)
    write_program(world.base / "bin/rsync", _RSYNC % rsync)
    systemctl = world.base / "bin/systemctl"
    write_program(systemctl, systemctl.read_text().replace("verb=$1", _SYSTEMCTL_STOP + "verb=$1"))
    for node in plan.nodes:
        folder(world, node.name).mkdir()
    head = folder(world, "spark1")
    (head / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    for number, shard in enumerate(SHARDS):
        # no two blocks alike: a copy that goes on can only match what it has
        block = b"".join(value.to_bytes(8, "big") for value in range(SIZE // 8))
        (head / shard).write_bytes(bytes(byte ^ number for byte in block))
    yield world
    server = world.node("spark1") / "server"
    assert not server.exists()  # a server that is left would be found by the next test


def folder(world: World, name: str) -> Path:
    return world.node(name) / "checkpoint"


def readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server also serve 127.0.0.1, which stands for every worker's address."""
    real = sharing.daemon_config

    def config(crew: Crew, clients: list[str]) -> str:
        return real(crew, [*clients, "127.0.0.1"])

    monkeypatch.setattr(sharing, "daemon_config", config)


def contents(world: World, name: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder(world, name).iterdir()}


def statistic(world: World, name: str, what: str) -> int:
    """Return a number of ``rsync --stats``, in bytes."""
    (line,) = [
        line for line in (world.node(name) / "stats").read_text().splitlines()
        if line.startswith(f"{what}:")
    ]  # fmt: skip
    return int(line.split(":")[1].split()[0].replace(",", ""))


def test_every_worker_gets_the_heads_files(copies: World, monkeypatch: pytest.MonkeyPatch) -> None:
    readable(monkeypatch)
    texts = share(copies.crew())
    wanted = contents(copies, "spark1")
    assert len(wanted) == len(SHARDS) + 1
    workers = [node.name for node in copies.plan.nodes if node.rank != 0]
    for name in workers:
        assert contents(copies, name) == wanted
        assert texts[name] == "3 shards, the head's index"
        assert statistic(copies, name, "Literal data") >= len(SHARDS) * SIZE
    share(copies.crew())
    for name in workers:
        assert statistic(copies, name, "Total transferred file size") == 0
    assert copies.calls("spark1")[-1] == "systemctl stop spark-copy.service"


def test_a_node_that_is_not_in_the_plan_reads_nothing(copies: World) -> None:
    # 127.0.0.1 is no worker's address
    with pytest.raises(FleetError, match=r"spark2: copy: @ERROR: .*checkpoint"):
        share(copies.crew())
    assert contents(copies, "spark2") == {}


def test_a_copy_that_was_cut_goes_on(copies: World, monkeypatch: pytest.MonkeyPatch) -> None:
    readable(monkeypatch)
    copies.set("spark2", "cut")
    with pytest.raises(FleetError, match="spark2: copy"):
        share(copies.crew())
    left = folder(copies, "spark2") / SHARDS[0]
    part = left.stat().st_size
    assert 0 < part < SIZE
    copies.unset("spark2", "cut")
    share(copies.crew())
    assert contents(copies, "spark2") == contents(copies, "spark1")
    # the part was compared, not fetched again, up to the block in which it ends
    assert statistic(copies, "spark2", "Matched data") > part - (64 << 10)
    assert statistic(copies, "spark2", "Literal data") < len(SHARDS) * SIZE - part + (64 << 10)


def test_verify_finds_a_byte_that_changed_and_brings_the_right_one(
    copies: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    readable(monkeypatch)
    share(copies.crew())
    wanted = contents(copies, "spark1")
    path = folder(copies, "spark3") / SHARDS[1]
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(SIZE // 2)
        file.write(b"\xff" if wanted[SHARDS[1]][SIZE // 2] != 0xFF else b"\0")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    share(copies.crew())  # size and time are the same: not seen
    assert contents(copies, "spark3") != wanted
    share(copies.crew(), verify=True)
    assert contents(copies, "spark3") == wanted
    assert statistic(copies, "spark3", "Number of regular files transferred") == 1
    assert statistic(copies, "spark2", "Number of regular files transferred") == 0
