"""Three Debian guests as DGX OS nodes, operated over OpenSSH by the command line of this tree.

The tests share one boot and run in order: each leaves the cluster serving for the next. What a
user reads is asserted, with the node and the remedy, beside exit codes and what the guests show.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from harness.fleet import API_KEY, Fleet
from harness.machine import Machine
from harness.scripts import Stranger, engine_process, rails_to

pytestmark = [pytest.mark.vm, pytest.mark.slow]

SPARKS = ("spark1", "spark2", "spark3")


def states(overview: dict[str, Any]) -> dict[str, str]:
    return {node["name"]: node["state"] for node in overview["nodes"]}


def come_back(head: Machine) -> None:
    """Wait until the supervisor has noticed that the group is down, and until it serves again."""
    head.wait_until_fails("test -e /run/spark/ready", timeout=300)
    head.wait_until_succeeds("test -e /run/spark/ready", timeout=900)


def test_nodes_without_anything_are_named_with_what_to_do(fleet: Fleet) -> None:
    done = fleet.do("status", "--no-gpu")
    said = done.failed(*SPARKS, "spark-node: not found", "install the node first")
    assert "Traceback" not in said


def test_install_shows_and_then_writes_the_same_files(fleet: Fleet) -> None:
    shown = fleet.do("install", "--diff").ok()
    assert "# create /etc/systemd/system/spark-engine.service" in shown
    fleet.machine("spark1").fail("test -e /etc/spark/plan.json")
    fleet.do("install").ok()
    again = fleet.do("install").ok() + fleet.do("install", "--diff").ok()
    assert "create" not in again, again
    for machine in fleet.machines:
        assert "generation" not in machine.succeed("systemctl --failed --no-legend")


def test_checkpoint_is_shared_over_the_rails_only(fleet: Fleet) -> None:
    fleet.do("share").ok()
    clients = {
        rail.address.split("/")[0]
        for name in ("spark2", "spark3")
        for rail in fleet.node(name).rails
        if any(peer.node == "spark1" for peer in rail.peers)
    }
    shown = fleet.machine("spark1").succeed("exportfs -v")
    for address in clients:
        assert address in shown
    assert "<world>" not in shown and "*" not in shown


def test_rows_are_packed_on_every_node(fleet: Fleet) -> None:
    done = fleet.do("pack")
    assert "on 3 nodes" in done.ok(), done.said
    for node in fleet.plan.nodes:
        assert node.engram is not None
        for file in node.engram.files:
            size = fleet.machine(node.name).succeed(
                f"stat -c %s {node.engram.directory}/{file.name}"
            )
            assert int(size) == file.bytes


def test_serve_ends_with_a_right_answer(fleet: Fleet) -> None:
    done = fleet.do("serve", "--no-doctor")
    assert f"http://{fleet.plan.nodes[0].address}:8888/v1" in done.ok()
    overview = fleet.status()
    assert overview["ready"] and overview["good"], json.dumps(overview)[:4000]
    assert states(overview) == dict.fromkeys(SPARKS, "serving")
    for machine in fleet.machines:
        log = machine.succeed("journalctl --unit spark-engine.service --output cat")
        assert "2 Engram files open (io_uring)" in log, log
        limits = machine.succeed(f"cat /proc/{engine_process(machine)}/limits")
        assert "Max locked memory         unlimited" in limits, limits


def test_the_key_is_needed_and_nowhere_to_be_read(serving: Fleet) -> None:
    head = serving.machine("spark1")
    url = "http://127.0.0.1:8888/v1/models"
    ask = f"curl --silent --max-time 60 --output /dev/null --write-out '%{{http_code}}' {url}"
    assert head.succeed(ask) == "401"
    assert head.succeed(f"{ask} --header 'Authorization: Bearer {API_KEY}'") == "200"
    head.fail(f"cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ | grep --text {API_KEY}")
    head.fail(f"grep -r {API_KEY} /etc/spark/plan.json /etc/systemd/system /var/lib/spark")
    head.fail(f"journalctl --output cat --unit 'spark-*' | grep {API_KEY}")
    for file in serving.folder.glob("runs/*/*"):
        assert API_KEY not in file.read_text(errors="replace"), file


def test_strangers_get_nothing(serving: Fleet) -> None:
    host, head = serving.machine("spark3"), serving.plan.nodes[0]
    lan = Stranger(host, serving.node("spark3").lan_interface, "192.168.1.99")
    for port in (2049, serving.plan.ports.rendezvous, serving.plan.ports.supervisor):
        connect = f"timeout 5 bash -c 'exec 3<>/dev/tcp/{head.address}/{port}'"
        assert lan.execute(connect)[0] == 124, port  # dropped, not refused
    status = "curl --silent --max-time 60 --output /dev/null --write-out '%{http_code}' "
    models = f"http://{head.address}:8888/v1/models"
    assert lan.succeed(status + models) == "401"
    lan.leave()
    netdev = rails_to(serving, "spark3", "spark1")[0]
    rail = next(rail for rail in serving.node("spark3").rails if rail.netdev == netdev)
    server = rail.peers[0].address
    fabric = Stranger(host, netdev, server.rpartition(".")[0] + ".99")
    mount = f"timeout 120 mount -t nfs4 -o soft,timeo=50,retrans=1 {server}:/ /mnt 2>&1"
    assert "access denied by server" in fabric.fail(mount)
    for port in (serving.plan.ports.rendezvous, serving.plan.ports.supervisor):
        # not even open there: they listen on the management address
        assert "refused" in fabric.fail(f"bash -c 'exec 3<>/dev/tcp/{server}/{port}' 2>&1")
    fabric.leave()


def test_a_killed_rank_takes_all_down_and_all_come_back(serving: Fleet) -> None:
    before = {machine.name: engine_process(machine) for machine in serving.machines}
    serving.machine("spark3").succeed(f"kill -KILL {before['spark3']}")
    head = serving.machine("spark1")
    for machine in serving.machines:
        machine.wait_until_fails(f"test -e /proc/{before[machine.name]}", timeout=300)
    come_back(head)
    log = head.succeed("journalctl --unit spark-supervisor.service --output cat")
    # emulated guests may need longer than the head listens for the one that was killed: which rank
    # it names is shown by tests/node
    assert re.search(r"because of spark[123]: spark-engine\.service", log), log
    after = {machine.name: engine_process(machine) for machine in serving.machines}
    assert not set(before.items()) & set(after.items())
    assert serving.status()["good"]


def test_a_cable_cut_while_serving_is_named(serving: Fleet) -> None:
    netdev = rails_to(serving, "spark2", "spark3")[0]
    serving.driver.cut(serving.cable("spark2", netdev))
    for name in ("spark2", "spark3"):
        far = rails_to(serving, name, "spark3" if name == "spark2" else "spark2")[0]
        serving.machine(name).wait_until_succeeds(f"ip link show {far} | grep NO-CARRIER")
    said = serving.do("status", "--no-gpu").failed("check the cable", netdev)
    assert "spark2: drift:" in said and "spark3: drift:" in said and "spark1: drift" not in said
    serving.driver.join(serving.cable("spark2", netdev))
    serving.machine("spark2").wait_until_fails(f"ip link show {netdev} | grep NO-CARRIER")
    serving.machine("spark3").wait_until_fails("ip link | grep NO-CARRIER")
    serving.do("status", "--no-gpu").ok()


def test_the_guard_kills_the_engine_before_memory_is_gone(serving: Fleet) -> None:
    head = serving.machine("spark1")
    before = engine_process(head)
    free = int(head.succeed("awk '/MemAvailable/ {print int($2 / 1024)}' /proc/meminfo"))
    head.execute(
        f"curl --silent --max-time 60 --header 'Authorization: Bearer {API_KEY}' "
        f"'http://127.0.0.1:8888/stand-in/allocate?mib={free - 400}'"
    )
    head.wait_until_fails(f"test -e /proc/{before}", timeout=300)
    said = head.succeed("journalctl --unit spark-guard.service --output cat")
    assert "is below the threshold 0.50 GiB (serving): killed cgroup" in said, said
    come_back(head)
