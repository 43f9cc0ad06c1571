"""The command: exit status, report, evidence, and what is printed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import doctor_ssh
import pytest
from click.testing import CliRunner, Result
from doctor_mutations import measured, mtu_back_to_1500, sshd_not_protected, unit
from doctor_nodes import EXAMPLES
from doctor_ssh import FakeSsh

from spark_appliance.cli.doctor import doctor
from spark_appliance.doctor.registry import CHECKS, Facts
from spark_appliance.doctor.report import Report
from spark_appliance.names import ENGINE

TRIANGLE = EXAMPLES / "three-spark-triangle"


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    folder = tmp_path / "cluster"
    shutil.copytree(TRIANGLE, folder)
    return folder / "cluster.yaml"


def serve(ssh: FakeSsh, facts: Facts) -> None:
    """Let the fake ssh give the documents of the facts; clocks are made to agree."""
    for node in facts.plan.nodes:
        data = dict(facts.answers[node.name].document.data)
        data |= {"started": time.time() + 1, "ended": time.time() - 1}
        ssh.host(node.ssh, stdout=doctor_ssh.line(data))


def run(*words: object, **kwargs: object) -> Result:
    return CliRunner().invoke(
        doctor, [str(word) for word in words], standalone_mode=False, **kwargs
    )


def status(result: Result) -> int:
    error = result.exception
    if error is None:
        return int(result.return_value or 0) if isinstance(result.return_value, int) else 0
    if isinstance(error, SystemExit):
        return int(error.code or 0)
    return int(getattr(error, "exit_status", getattr(error, "exit_code", 99)))


def test_healthy_nodes(cluster: Path, ssh: FakeSsh, good: Facts, tmp_path: Path):
    serve(ssh, good)
    result = run(cluster, "--runs", tmp_path / "runs")
    assert status(result) == 0
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert sorted(line.split(":")[0] for line in lines[:3]) == ["spark1", "spark2", "spark3"]
    assert re.fullmatch(
        r"triangle: 0 failed, 0 warnings, \d+ ok, 0 not judged; evidence in .*-doctor", lines[-1]
    )


def test_a_failure_says_what_was_seen_what_it_means_and_what_to_do(
    cluster: Path, ssh: FakeSsh, good: Facts, tmp_path: Path
):
    serve(ssh, sshd_not_protected(mtu_back_to_1500(good)))
    result = run(cluster, "--runs", tmp_path / "runs")
    assert status(result) == 1
    check = CHECKS.get("NET.MTU")
    assert check is not None
    lines = result.stdout.splitlines()
    at = lines.index("fail NET.MTU spark2 [enp1s0f0np0]: 1500, 9000 planned")
    assert lines[at + 1 :][:2] == [f"     means: {check.means}", f"     do:    {check.do}"]
    assert lines[0].startswith("warn HOST.WATCHDOG spark2 [sshd]: ")
    assert "1 failed, 1 warnings" in result.stderr


def test_json_follows_the_schema_and_stdout_holds_nothing_else(
    cluster: Path, ssh: FakeSsh, good: Facts, tmp_path: Path
):
    serve(ssh, mtu_back_to_1500(good))
    result = run(cluster, "--json", "--runs", tmp_path / "runs")
    assert status(result) == 1
    report = Report.model_validate_json(result.stdout)
    assert report.verdict == "fail" and report.counts["fail"] == 1
    failed = [entry for entry in report.results if entry.status == "fail"]
    assert [(e.check, e.node, e.subject, e.seen) for e in failed] == [
        ("NET.MTU", "spark2", "enp1s0f0np0", "1500, 9000 planned")
    ]
    assert failed[0].problems == ["P08", "P09"]
    assert [node.name for node in report.nodes if node.answered] == ["spark1", "spark2", "spark3"]
    assert report.levels == ["config", "probe"]
    schema = json.loads(run("--schema").stdout)
    assert set(json.loads(result.stdout)) == set(schema["properties"])
    assert schema["required"] and schema["additionalProperties"] is False


def test_a_node_that_is_gone_is_named_and_the_others_are_judged(
    cluster: Path, ssh: FakeSsh, good: Facts, tmp_path: Path
):
    serve(ssh, good)
    ssh.host("192.168.1.12", stderr=doctor_ssh.REFUSED, status=255)
    result = run(cluster, "--runs", tmp_path / "runs")
    assert status(result) == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith("fail ACCESS.SSH spark2: 192.168.1.12: ")
    assert "Connection refused" in lines[0]
    assert lines[2] == "     do:    start sshd on the node, or correct the port"
    assert re.fullmatch(r"fail \d+ further checks of spark2: it gave no answer", lines[-1])
    assert not [line for line in lines if " spark1" in line or " spark3" in line]


def test_evidence_is_kept_and_can_be_judged_again(
    cluster: Path, ssh: FakeSsh, good: Facts, tmp_path: Path
):
    serve(ssh, mtu_back_to_1500(good))
    ssh.host("192.168.1.13", stderr=doctor_ssh.NO_KEY, status=255)
    runs = tmp_path / "runs"
    first = run(cluster, "--json", "--runs", runs)
    (folder,) = runs.iterdir()
    assert re.fullmatch(r"\d{8}T\d{6}Z-doctor", folder.name)
    assert sorted(path.name for path in folder.iterdir()) == [
        "plan.json", "probe-spark1.json", "probe-spark2.json", "probe-spark3.json", "results.json",
    ]  # fmt: skip
    assert json.loads((folder / "results.json").read_text()) == json.loads(first.stdout)
    again = run("--replay", folder, "--json")
    assert status(again) == 1

    def probe_level(text: str) -> list[object]:
        return [entry for entry in json.loads(text)["results"] if entry["level"] == "probe"]

    assert probe_level(again.stdout) == probe_level(first.stdout)
    assert list(runs.iterdir()) == [folder]


def test_two_runs_in_one_second_get_two_folders(
    cluster: Path, ssh: FakeSsh, good: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    serve(ssh, good)
    monkeypatch.setattr(
        "spark_appliance.doctor.evidence.utc", lambda _seconds: "2026-11-30T00:00:00Z"
    )
    for _ in range(2):
        run(cluster, "--runs", tmp_path / "runs")
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == ["20261130T000000Z-doctor", "20261130T000000Z-doctor-2"]


def test_no_evidence(cluster: Path, ssh: FakeSsh, good: Facts, tmp_path: Path):
    serve(ssh, good)
    result = run(cluster, "--no-evidence", "--runs", tmp_path / "runs")
    assert status(result) == 0 and "evidence" not in result.stderr
    assert not (tmp_path / "runs").exists()


def test_evidence_that_cannot_be_written(cluster: Path, ssh: FakeSsh, good: Facts, tmp_path: Path):
    serve(ssh, good)
    (tmp_path / "file").write_text("")
    result = run(cluster, "--runs", tmp_path / "file")
    assert status(result) == 1
    assert "cannot keep the evidence" in str(result.exception)


def test_one_node_only(cluster: Path, ssh: FakeSsh, good: Facts):
    serve(ssh, good)
    result = run(cluster, "--node", "spark2", "--json", "--no-evidence")
    report = Report.model_validate_json(result.stdout)
    assert status(result) == 0
    assert [node.answered for node in report.nodes] == [False, True, False]
    assert not (ssh.base / "hosts" / "192.168.1.11" / "argv").exists()


def test_config_level_asks_nobody(cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = run(cluster, "--config", "--json", "--runs", tmp_path / "runs")
    assert status(result) == 0
    report = Report.model_validate_json(result.stdout)
    assert {entry.level for entry in report.results} == {"config"}
    assert not (tmp_path / "runs").exists()


def test_a_stale_plan_fails(cluster: Path):
    lock = cluster.parent / "cluster.lock.json"
    lock.write_text(lock.read_text().replace('"rendezvous": 20000', '"rendezvous": 20001'))
    result = run(cluster, "--config")
    assert status(result) == 1
    assert "fail CFG.LOCK" in result.stdout


def test_a_plan_alone_will_do(cluster: Path, ssh: FakeSsh, good: Facts):
    serve(ssh, good)
    assert status(run(cluster.parent / "cluster.lock.json", "--no-evidence")) == 0


@pytest.mark.parametrize(
    "words",
    [
        ["--node", "spark9"],
        ["--config", "--deep"],
        ["--config", "--node", "spark1"],
        ["--deep"],
        ["--replay", "nowhere"],
        ["--no-such-option"],
    ],
)
def test_a_bad_command_line_is_status_2(cluster: Path, words: list[str]):
    assert status(run(cluster, *words)) == 2


def test_a_bad_file_is_status_2(cluster: Path, tmp_path: Path):
    assert status(run(tmp_path / "none.yaml")) == 2
    cluster.write_text(cluster.read_text().replace("kind: triangle", "kind: ring"))
    assert status(run(cluster)) == 2
    (tmp_path / "x.json").write_text("{}")
    assert status(run(tmp_path / "x.json")) == 2


def _run_folder(tmp_path: Path, plan_text: str, text: str) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "plan.json").write_text(plan_text)
    (folder / "probe-spark1.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"sent": 1, "received": 2, "document": 3}', "[" * 100_000]
)
def test_bad_evidence_is_status_2(tmp_path: Path, text: str):
    folder = _run_folder(tmp_path, (TRIANGLE / "cluster.lock.json").read_text(), text)
    assert status(run("--replay", folder)) == 2


def test_deep_measures_and_keeps_it(
    cluster: Path, ssh: FakeSsh, good: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The measuring itself is shown elsewhere; here: it is asked for, judged and kept."""
    serve(ssh, good)
    asked = []

    def measure(facts: Facts, where: object, **_kwargs: object) -> Facts:
        asked.append(sorted(where))
        return measured(facts)

    monkeypatch.setattr("spark_appliance.doctor.examine.measure", measure)
    result = run(cluster, "--deep", "--yes", "--json", "--runs", tmp_path / "runs")
    assert status(result) == 0
    assert asked == [["spark1", "spark2", "spark3"]]
    deep = [e for e in json.loads(result.stdout)["results"] if e["level"] == "deep"]
    assert {entry["status"] for entry in deep} == {"ok"}
    (folder,) = (tmp_path / "runs").iterdir()
    assert {"bandwidth.json", "deep-spark1.json"} <= {path.name for path in folder.iterdir()}
    again = [
        e
        for e in json.loads(run("--replay", folder, "--json").stdout)["results"]
        if e["level"] == "deep"
    ]
    assert again == deep


def test_deep_measures_nothing_while_the_engine_runs(
    cluster: Path, ssh: FakeSsh, good: Facts, monkeypatch: pytest.MonkeyPatch
):
    facts = good
    for node in good.plan.nodes:
        facts = unit(facts, ENGINE, node=node.name)
    serve(ssh, facts)

    def measure(*_args: object, **_kwargs: object) -> Facts:
        raise AssertionError("measured")

    monkeypatch.setattr("spark_appliance.doctor.examine.measure", measure)
    result = run(cluster, "--deep", "--yes", "--no-evidence", "-v")
    assert status(result) == 0
    assert "not measured: the engine runs on spark1, spark2, spark3" in result.stderr
    assert "skip GPU.CLOCK spark1: was not measured" in result.stdout


def test_the_whole_program_ends_on_an_interrupt(cluster: Path, ssh: FakeSsh):
    for address in ("192.168.1.11", "192.168.1.12", "192.168.1.13"):
        ssh.hangs(address)
        os.mkfifo(ssh.base / "hosts" / address / "argv")
    process = subprocess.Popen(
        [sys.executable, "-m", "spark_appliance", "doctor", str(cluster), "--no-evidence"],
        stderr=subprocess.PIPE,
        text=True,
    )
    # each fake ssh opens its argv file to write: reading it waits until it runs
    for address in ("192.168.1.11", "192.168.1.12", "192.168.1.13"):
        assert "BatchMode=yes" in ssh.argv(address)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in stderr
