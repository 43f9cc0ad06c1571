"""Faults that take longer to show: run with SPARK_VM_FULL=1, after test_vm_fleet.py."""

from __future__ import annotations

import json

import pytest
from harness import cluster
from harness.fleet import Fleet
from harness.scripts import Stranger, engine_process, rails_to, run_script

pytestmark = [pytest.mark.vm, pytest.mark.vm_full, pytest.mark.slow]

READY = "test -e /run/spark/ready"


def test_another_host_key_is_refused(serving: Fleet) -> None:
    machine = serving.machine("spark3")
    key = "/etc/ssh/ssh_host_ed25519_key"
    restart = "systemctl restart ssh.service; pkill -f sshd-session || true"
    machine.succeed(f"cp -a {key} /root/kept; ssh-keygen -q -t ed25519 -N '' -f /root/other")
    machine.succeed(f"cp /root/other {key}; {restart}")
    try:
        done = serving.do("status", "--no-gpu")
        said = done.failed(
            "spark3: read the state", "Host key verification failed", "ssh-keygen -R"
        )
        assert "spark2: read the state" not in said
    finally:
        machine.succeed(f"cp -a /root/kept {key}; rm /root/other*; {restart}")
    serving.do("status", "--no-gpu").ok()


def test_a_clock_that_is_off_by_an_hour_is_found(serving: Fleet) -> None:
    machine = serving.machine("spark3")
    machine.succeed("date --set '+1 hour'")
    try:
        done = serving.do("doctor", "--json", "--no-evidence", "--node", "spark3")
    finally:
        machine.succeed("date --set '-1 hour'")
    assert done.status == 1, done.said
    results = json.loads(done.text)["results"]
    (clock,) = [r for r in results if r["check"] == "ACCESS.CLOCK" and r["status"] == "fail"]
    assert clock["node"] == "spark3" and "ahead of this machine" in clock["seen"], clock
    assert "timedatectl set-ntp true" in clock["do"], clock
    assert serving.status()["ready"]


def test_the_nfs_server_restarts_under_a_reader(serving: Fleet) -> None:
    head, worker = serving.machine("spark1"), serving.machine("spark2")
    path = f"{serving.plan.model.path}/large"
    head.succeed(f"dd if=/dev/urandom of={path} bs=1M count=24 status=none")
    wanted = head.succeed(f"sha256sum <{path}").split()[0]
    worker.succeed(f"systemd-run -q -u reader sh -c 'dd if={path} bs=256k | sha256sum >/run/sum'")
    head.succeed("systemctl restart nfs-server.service")
    worker.wait_until_succeeds("test -s /run/sum", timeout=600)
    assert wanted in worker.succeed("cat /run/sum")
    head.succeed(f"rm {path}")
    assert serving.status()["good"]


def test_a_node_that_reboots_comes_back_into_the_group(serving: Fleet) -> None:
    head, worker = serving.machine("spark1"), serving.machine("spark2")
    worker.shutdown()
    head.wait_until_fails(READY, timeout=300)
    said = serving.do("status", "--no-gpu").failed("spark2: read the state: no SSH connection")
    assert "not ready" in said
    worker.start()
    head.wait_until_succeeds(READY, timeout=900)
    log = head.succeed("journalctl --unit spark-supervisor.service --output cat")
    assert "spark2" in log.split("waiting: for the supervisor")[-1].splitlines()[0], log
    worker.wait_until_succeeds("systemctl is-active spark-engine.service", timeout=300)
    assert serving.status()["ready"]


def test_cut_cable_and_wrong_gid_stop_a_start_with_the_reason(serving: Fleet) -> None:
    serving.do("stop", "--drain", "0").ok()
    cable = rails_to(serving, "spark1", "spark2")[0]
    bare = rails_to(serving, "spark3", "spark1")[1]
    rail = next(rail for rail in serving.node("spark3").rails if rail.netdev == bare)
    serving.driver.cut(serving.cable("spark1", cable))
    serving.machine("spark3").succeed(f"ip address delete {rail.address} dev {bare}")
    try:
        done = serving.do("serve", "--no-doctor", "--fail-fast")
        said = done.failed("not serving", "failed first: ", "the fabric is not up after")
        logs = "".join(path.read_text() for path in serving.newest_run().glob("log-*.txt"))
        assert "link is down: check the cable and that the other end is on" in logs, said
        assert f"{cable} (cable spark1.p0 to spark2.p1)" in logs, said
        overview = serving.do("status", "--no-gpu").failed("check the cable")
        assert f"{rail.rdma} has no RoCE v2 GID for {rail.address.split('/')[0]}" in overview
        for machine in serving.machines:
            machine.fail("pgrep --exact --uid spark python3")
    finally:
        serving.driver.join(serving.cable("spark1", cable))
        serving.machine("spark3").succeed(f"networkctl reconfigure {bare}")
    serving.do("stop", "--drain", "0").ok()
    serving.do("serve", "--no-doctor").ok()


def test_a_full_disk_is_named_and_a_power_cut_while_packing_is_resumed(serving: Fleet) -> None:
    serving.do("stop", "--drain", "0").ok()
    full, victim = serving.machine("spark3"), serving.machine("spark2")
    engram = serving.node("spark2").engram
    assert engram is not None
    folder = engram.directory
    for machine in (full, victim):
        machine.succeed(f"systemctl stop spark-engram-pack.service; rm {folder}/engram-*")
    full.succeed(
        f"fallocate -l $(($(df --output=avail -B1 {folder} | tail -1) - 2000000)) {folder}/filler"
    )
    running = serving.begin("pack", str(serving.plan_file))
    # stop the packer the moment that its first file grows, so that the power goes in the middle
    victim.succeed(
        f"until ls {folder}/*.partial >/dev/null 2>&1; do :; done; pkill -STOP spark-engram"
    )
    victim.crash()
    said = running.end().failed("spark2: ", "no SSH connection", "spark3: pack: ")
    assert "No space left" in said or "free" in said, said
    assert "Traceback" not in said
    full.succeed(f"rm {folder}/filler")
    victim.start()
    victim.wait_for_unit("ssh.service")
    serving.do("pack").ok()
    for name in ("spark2", "spark3"):
        node = serving.node(name)
        assert node.engram is not None
        serving.machine(name).fail(f"ls {folder}/*.partial")
        for file in node.engram.files:
            size = serving.machine(name).succeed(f"stat -c %s {folder}/{file.name}")
            assert int(size) == file.bytes
    serving.do("serve", "--no-doctor").ok()


def test_power_cuts_in_a_rollout_are_resumed_and_taken_back(serving: Fleet) -> None:
    plan = cluster.make_plan(serving.image, engine_env={"SPARK_RELEASE": "2"})
    new = str(serving.write_plan("new.json", plan))
    state = serving.folder / "runs" / "rollout.json"
    running = serving.begin("rollout", new, "--no-doctor", "--drain", "0", "--hold", "180")
    # the canary has the new version, then the controller and another node lose their power
    serving.machine("spark3").wait_until_succeeds("grep -q SPARK_RELEASE /etc/spark/plan.json")
    running.kill()
    serving.machine("spark2").crash()
    assert json.loads(state.read_text())["phase"] in ("canary", "rest", "serving")
    said = serving.run("rollout", new).failed("a rollout was interrupted", "rollout --resume")
    assert "spark-appliance rollback" in said
    serving.machine("spark2").start()
    serving.machine("spark2").wait_for_unit("ssh.service")
    serving.run("rollout", new, "--resume", "--no-doctor", "--drain", "0").ok()
    assert json.loads(state.read_text())["phase"] == "done"
    for machine in serving.machines:
        machine.succeed("grep -q SPARK_RELEASE /etc/spark/plan.json")
        process = engine_process(machine)
        machine.succeed(f"tr '\\0' '\\n' </proc/{process}/environ | grep -x SPARK_RELEASE=2")
    serving.run("status", new, "--no-gpu").ok()
    serving.do("status", "--no-gpu").failed("the node has another plan")
    serving.run("rollback", new).ok()
    for machine in serving.machines:
        machine.fail("grep -q SPARK_RELEASE /etc/spark/plan.json")
    serving.machine("spark1").wait_until_succeeds(READY, timeout=900)
    assert serving.status()["ready"]


@pytest.mark.parametrize("name", ["fabric", "engine", "weights"])
def test_scripts_of_the_nixos_tests(serving: Fleet, name: str) -> None:
    serving.do("stop", "--drain", "0").ok()  # and with it the count of restarts
    for machine in serving.machines:
        machine.succeed("systemctl start --no-block spark.target")
    if name != "weights":
        run_script(serving, name)
        return
    stranger = Stranger(
        serving.machine("spark3"), serving.node("spark3").lan_interface, "192.168.1.99"
    )
    run_script(serving, name, stranger=stranger)
