"""ib_write_bw: arguments, order, output, and both scripts run for real against a stand-in."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest
from doctor_mutations import put
from doctor_ssh import FakeSsh

from spark_appliance.doctor import bandwidth
from spark_appliance.doctor.bandwidth import arguments, measure, pairs, parse
from spark_appliance.doctor.registry import Facts
from spark_appliance.ssh import Host

TABLE = """\
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 65536      557421           0.00               97.41              0.185789
---------------------------------------------------------------------------------------
"""

# Listens like perftest's server and answers one client; the client prints the table.
_TOOL = """\
#!{python}
import os, socket, sys
arguments = sys.argv[1:]
with open(os.environ["BW_LOG"], "a") as log:
    log.write(" ".join(arguments) + "\\n")
port = int(arguments[arguments.index("-p") + 1])
if arguments[-1] == "--report_gbits":
    with socket.create_server(("127.0.0.1", port)) as server:
        server.settimeout(10)
        server.accept()[0].close()
else:
    socket.create_connection(("127.0.0.1", port), 10).close()
    print({table!r})
"""


def tool(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder.mkdir()
    program = folder / "ib_write_bw"
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("BW_LOG", str(folder / "log"))
    return folder / "log"


def one_rail(facts: Facts) -> Facts:
    """Return the facts with only the first rail between spark1 and spark2 left."""
    first, second, third = facts.plan.nodes
    wire = [rail for rail in first.rails if rail.netdev == "enp1s0f0np0"]
    other = [rail for rail in second.rails if rail.netdev == "enp1s0f1np1"]
    nodes = [
        first.model_copy(update={"rails": wire}),
        second.model_copy(update={"rails": other}),
        third.model_copy(update={"rails": []}),
    ]
    return dataclasses.replace(facts, plan=facts.plan.model_copy(update={"nodes": nodes}))


def test_every_rail_in_both_directions(good: Facts):
    found = {
        (pair.client, pair.server, pair.rail.netdev, pair.other.netdev) for pair in pairs(good)
    }
    assert len(found) == 12
    assert ("spark1", "spark2", "enp1s0f0np0", "enp1s0f1np1") in found
    assert ("spark2", "spark1", "enp1s0f1np1", "enp1s0f0np0") in found


def test_arguments(good: Facts):
    rail = good.plan.nodes[0].rails[0]
    assert arguments(rail, 3) == [
        "-d", "rocep1s0f0", "-i", "1", "-x", "3", "-p", "18515", "-D", "3", "-F", "--report_gbits",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "gbits"), [(TABLE, 97.41), ("", None), ("Couldn't connect to 10.77.112.2:18515", None)]
)
def test_output(text: str, gbits: float | None):
    assert parse(text) == gbits


def test_server_first_then_client(
    good: Facts, ssh: FakeSsh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    log = tool(tmp_path / "tools", _TOOL.format(python=sys.executable, table=TABLE), monkeypatch)
    hosts = {}
    for name in ("spark1", "spark2"):
        ssh.runs_here(name)
        hosts[name] = Host(name)
    steps: list[str] = []
    runs = measure(one_rail(good), hosts, steps.append)
    assert [(run.client, run.server, run.gbits, run.error) for run in runs] == [
        ("spark1", "spark2", 97.41, ""),
        ("spark2", "spark1", 97.41, ""),
    ]
    assert steps == ["spark1 > spark2 over enp1s0f0np0", "spark2 > spark1 over enp1s0f1np1"]
    server, client, *_ = log.read_text().splitlines()
    assert server == "-d rocep1s0f1 -i 1 -x 3 -p 18515 -D 3 -F --report_gbits"
    assert client == "-d rocep1s0f0 -i 1 -x 3 -p 18515 -D 3 -F --report_gbits 10.77.112.2"


def test_a_server_that_fails_is_told(
    good: Facts, ssh: FakeSsh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text = "#!/bin/sh\necho 'Couldn'\\''t get context for the device'\nexit 1\n"
    tool(tmp_path / "tools", text, monkeypatch)
    hosts = {}
    for name in ("spark1", "spark2"):
        ssh.runs_here(name)
        hosts[name] = Host(name)
    run = measure(one_rail(good), hosts)[0]
    assert run.gbits is None and run.error == "Couldn't get context for the device"


def test_without_perftest(good: Facts, ssh: FakeSsh, monkeypatch: pytest.MonkeyPatch):
    for name in ("spark1", "spark2"):
        ssh.runs_here(name)
    monkeypatch.setattr(
        bandwidth, "SERVER", bandwidth.SERVER.replace("ib_write_bw", "no_such_tool")
    )
    hosts = {name: Host(name) for name in ("spark1", "spark2")}
    assert measure(one_rail(good), hosts)[0].error == "no_such_tool is not installed"


def test_an_end_without_a_gid_is_not_tried(good: Facts):
    facts = one_rail(put(good, "rdma", "devices", "rocep1s0f1", "ports", "1", "gids", []))
    hosts = {name: Host(name) for name in ("spark1", "spark2")}
    assert {run.error for run in measure(facts, hosts)} == {"no usable GID (RDMA.GID)"}


def test_an_end_that_gave_no_answer_is_not_tried(good: Facts):
    hosts = {"spark1": Host("spark1")}
    assert {run.error for run in measure(one_rail(good), hosts)} == {"one end gave no answer"}
