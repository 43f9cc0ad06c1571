"""From plan to facts: what is asked, and the measuring programs on this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import doctor_ssh
import pytest
from doctor_mutations import NODE, put, unit
from doctor_nodes import EXAMPLES
from doctor_ssh import FakeSsh

from spark_appliance.doctor import examine
from spark_appliance.doctor.document import read_document
from spark_appliance.doctor.evaluate import evaluate
from spark_appliance.doctor.program import DEEP_MODULES, program
from spark_appliance.doctor.registry import Facts
from spark_appliance.doctor.request import request, tables
from spark_appliance.errors import InputError
from spark_appliance.model.plan import Plan
from spark_appliance.names import ENGINE


def test_the_request_names_what_the_plan_has(plan: Plan):
    asked = request(plan, plan.nodes[1])
    assert asked["nfs_server"] == "10.77.112.1"
    assert {"address": "10.77.112.1", "netdev": "enp1s0f1np1"} in asked["pings"]
    assert {"address": "192.168.1.11", "netdev": None} in asked["pings"]
    assert asked["engram"]["files"] == ["engram-l1-r1of3.bin", "engram-l14-r1of3.bin"]
    assert asked["ports"] == [8888, 20000, 20010]
    json.dumps(asked)


def test_tables_are_read_from_the_command_line(plan: Plan):
    node = plan.nodes[0]
    argv = [*node.argv, "--speculative-dspark-confidence-sts-path", "/t.json"]
    changed = node.model_copy(update={"argv": argv})
    assert tables(node) == ()
    assert tables(changed) == ("/t.json",)
    assert "/t.json" in request(plan, changed)["hashes"]


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.iterdir()))
def test_every_example_can_be_examined(example: str, ssh: FakeSsh):
    """Nobody answers properly, and still every check has a result."""
    from spark_appliance.workspace import open_cluster

    opened = open_cluster(EXAMPLES / example / "cluster.yaml")
    facts = examine.base(opened.require_plan(), opened.problems)
    where = examine.hosts(facts.plan)
    for node in facts.plan.nodes:
        document = {"probe": 1, "node": node.name, "started": 0, "ended": 0, "sections": {}}
        ssh.host(node.ssh, stdout=doctor_ssh.line(document))
    facts = examine.examine(facts, where)
    assert set(facts.documents()) == {node.name for node in facts.plan.nodes}
    results = evaluate(facts, ("config", "probe", "deep"), strict=True)
    assert any(result.status == "skip" for result in results)
    assert examine.obstacle(facts) is None


def test_only_known_nodes_can_be_asked(plan: Plan):
    assert list(examine.hosts(plan, ["spark3"])) == ["spark3"]
    with pytest.raises(InputError, match="there is no node spark9"):
        examine.hosts(plan, ["spark9"])


def test_lock_states(plan: Plan, tmp_path: Path):
    from spark_appliance import lockfile

    path = tmp_path / "cluster.lock.json"
    assert examine.base(plan, lock=path).lock_state == "absent"
    path.write_text(lockfile.dump(plan))
    assert examine.base(plan, lock=path).lock_state == "same"
    path.write_bytes(b"\xff")
    assert examine.base(plan, lock=path).lock_state == "stale"


def test_obstacles(good: Facts):
    assert examine.obstacle(good) is None
    assert "spark2" in str(examine.obstacle(unit(good, ENGINE)))
    assert examine.obstacle(dataclasses.replace(good, answers={})) == "no node gave an answer"


def test_the_measuring_program_says_what_is_missing_here(plan: Plan):
    text = program(DEEP_MODULES, {**examine.deep_request(plan.nodes[1]), "gpu_bytes": 1 << 20})
    done = subprocess.run(
        [sys.executable, "-I", "-"],
        input=text,
        env={"PATH": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    document = read_document(done.stdout, "spark2")
    pings = document.section("dfping").at("pings").items()
    assert [ping.at("bytes").integer() for ping in pings] == [9000] * 4
    assert {ping.at("error").optional() for ping in pings} == {"ping: not installed"}
    assert document.section("gpu_load").at("available_bytes").integer() > 0


def test_full_size_pings_have_the_right_arguments(plan: Plan, tmp_path: Path):
    program_file = tmp_path / "ping"
    script = f'printf "%s\\n" "$*" >> {tmp_path}/log; echo "5 packets transmitted, 4 received"'
    program_file.write_text(f"#!/bin/sh\n{script}\n")
    program_file.chmod(0o755)
    text = program(DEEP_MODULES, examine.deep_request(plan.nodes[1]))
    done = subprocess.run(
        [sys.executable, "-I", "-"],
        input=text,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    first = (tmp_path / "log").read_text().splitlines()[0]
    assert first == "-n -M do -s 8972 -c 5 -i 0.2 -W 1 -I enp1s0f0np0 10.77.123.3"
    document = read_document(done.stdout, "spark2")
    assert document.section("dfping").at("pings", 0, "received").integer() == 4


def test_a_full_node_is_not_loaded(plan: Plan):
    text = program(DEEP_MODULES, {**examine.deep_request(plan.nodes[1]), "gpu_bytes": 1 << 50})
    done = subprocess.run(
        [sys.executable, "-I", "-"], input=text, env={"PATH": "/nonexistent"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    load = read_document(done.stdout, "spark2").section("gpu_load")
    assert "MiB of memory are available" in load.at("errors", "available_bytes").text()
    assert not load.at("device").present


def test_measuring_asks_only_nodes_that_answered(good: Facts, ssh: FakeSsh):
    answers = {name: answer for name, answer in good.answers.items() if name != "spark3"}
    facts = dataclasses.replace(good, answers=answers)
    for node in facts.plan.nodes:
        document = {"probe": 1, "node": node.name, "sections": {}}
        ssh.host(node.ssh, stdout=doctor_ssh.line(document))
    facts = put(facts, "rdma", "devices", {}, node="spark1")
    facts = put(facts, "rdma", "devices", {}, node=NODE)
    steps: list[str] = []
    found = examine.measure(facts, examine.hosts(facts.plan), step=steps.append)
    assert set(found.deep) == {"spark1", "spark2"}
    assert len(found.bandwidth) == 12 and steps[0].startswith("full-size pings")
    assert all(run.gbits is None and run.error for run in found.bandwidth)


def test_on_a_terminal_a_table_shows_every_node(ssh: FakeSsh, good: Facts, tmp_path: Path):
    for node in good.plan.nodes:
        ssh.host(node.ssh, stdout=doctor_ssh.line(good.answers[node.name].document.data))
    parent, child = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    cluster = EXAMPLES / "three-spark-triangle" / "cluster.yaml"
    words = ["doctor", str(cluster), "--runs", str(tmp_path / "runs")]
    process = subprocess.Popen(
        [sys.executable, "-m", "spark_appliance", *words],
        stdout=subprocess.DEVNULL,
        stderr=child,
        env=environ,
    )
    os.close(child)
    seen = b""
    while True:
        try:
            block = os.read(parent, 65536)
        except OSError:  # the other end is closed
            break
        if not block:
            break
        seen += block
    os.close(parent)
    assert process.wait(30) in (0, 1)  # the recorded clocks are old
    assert b"spark1" in seen and b"answered" in seen and b"evidence in" in seen
    assert b"Traceback" not in seen
