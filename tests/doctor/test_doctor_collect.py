"""The transport: a fake ssh that answers, refuses, hangs, lies or talks rubbish."""

from __future__ import annotations

import _thread
import os
import subprocess
import time
from pathlib import Path

import doctor_ssh
import pytest
from doctor_ssh import FakeSsh

from spark_appliance.doctor.collect import collect
from spark_appliance.doctor.program import LAUNCHER, PROBE_MODULES, program
from spark_appliance.doctor.registry import Answer
from spark_appliance.doctor.request import request
from spark_appliance.model.plan import Plan
from spark_appliance.process import ProgramMissingError
from spark_appliance.ssh import Host

DOCUMENT = {"probe": 1, "node": "a", "sections": {}}


def ask(*names: str, deadline: float = 20.0) -> dict[str, Answer]:
    hosts = {name: Host(name) for name in names}
    return collect(hosts, dict.fromkeys(names, "the program"), deadline=deadline)


def test_one_session_a_node_and_the_program_on_its_standard_input(ssh: FakeSsh):
    ssh.host("a", stdout=doctor_ssh.line(DOCUMENT))
    before = time.time()
    answer = ask("a")["a"]
    assert answer.document is not None and answer.error == ""
    assert before <= answer.sent <= answer.received <= time.time()
    argv = ssh.argv("a")
    assert argv[-2] == "a" and argv[-3] == "--"
    assert argv[-1].startswith("sh -c ") and "python3" in argv[-1]
    assert "BatchMode=yes" in argv
    assert ssh.stdin("a") == "the program"
    assert "the program" not in " ".join(argv)


def test_what_a_login_script_prints_before_does_not_matter(ssh: FakeSsh):
    ssh.host("a", stdout="Welcome!\n{not json\n[1]\n" + doctor_ssh.line(DOCUMENT))
    assert ask("a")["a"].document is not None


@pytest.mark.parametrize(
    ("stderr", "error", "remedy"),
    [
        (doctor_ssh.TIMED_OUT, "timed out", "is up"),
        (doctor_ssh.REFUSED, "Connection refused", "sshd"),
        (doctor_ssh.CHANGED_KEY, "Host key verification failed", "ssh-keygen -R"),
        ("Host key verification failed.\n", "Host key verification failed", "fingerprint"),
        (doctor_ssh.NO_KEY, "Permission denied", "ssh-copy-id"),
        ("ssh: Could not resolve hostname a: unknown\n", "Could not resolve", "name"),
    ],
)
def test_no_connection(ssh: FakeSsh, stderr: str, error: str, remedy: str):
    ssh.host("a", stderr=stderr, status=255)
    answer = ask("a")["a"]
    assert answer.document is None
    assert error in answer.error and remedy in answer.remedy
    assert "\n" not in answer.error


@pytest.mark.parametrize(
    ("stdout", "error"),
    [
        ("", "it printed nothing"),
        ("hello\n", "'hello'"),
        ('{"probe": 2, "node": "a"}\n', "no probe document"),
        ('{"probe": 1, "node": "b", "sections": {}}\n', "'b', not a"),
        ("[" * 100_000 + "\n", "no probe document"),
        ("{" * 3000 + "\n", "no probe document"),
        ("\x00\xff\n", "no probe document"),
    ],
)
def test_rubbish(ssh: FakeSsh, stdout: str, error: str):
    ssh.host("a", stdout=stdout)
    answer = ask("a")["a"]
    assert answer.document is None
    assert error in answer.error and answer.remedy


def test_no_python_and_a_broken_probe(ssh: FakeSsh):
    ssh.host("a", stderr="python3: not found\n", status=127)
    ssh.host("b", stderr="Traceback\nValueError: x\n", status=1)
    answers = ask("a", "b")
    assert answers["a"].remedy == "install python3 on the node"
    assert "status 1" in answers["b"].error and "ValueError: x" in answers["b"].error


def test_endless_output_is_cut(ssh: FakeSsh, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("spark_appliance.doctor.collect.MAX_BYTES", 1000)
    place = ssh.host("a")
    (place / "stdout").write_text("x" * 80 + "\n")
    ssh_program = ssh.base / "bin" / "ssh"
    ssh_program.write_text("#!/bin/sh\nexec yes\n")
    answer = ask("a")["a"]
    assert answer.document is None and "no probe document" in answer.error


def test_a_node_that_hangs_does_not_hold_up_the_others(ssh: FakeSsh):
    ssh.hangs("a")
    ssh.host("b", stdout=doctor_ssh.line({**DOCUMENT, "node": "b"}))
    told: list[tuple[str, str]] = []
    hosts = {name: Host(name) for name in ("a", "b")}
    answers = collect(
        hosts,
        dict.fromkeys(hosts, ""),
        deadline=3.0,
        tell=lambda node, state, _text: told.append((node, state)),
    )
    assert answers["b"].document is not None
    assert answers["a"].document is None and answers["a"].error == "no answer within 3 s"
    assert told.index(("b", "answered")) < told.index(("a", "failed"))
    assert {("a", "asking"), ("b", "asking")} <= set(told)


def test_an_interrupt_ends_all_sessions_at_once(ssh: FakeSsh):
    ssh.hangs("a")
    ssh.hangs("b")
    asked: list[str] = []

    def tell(node: str, state: str, _text: str) -> None:
        if state == "asking":
            asked.append(node)
            if len(asked) == 2:
                _thread.interrupt_main()

    hosts = {name: Host(name) for name in ("a", "b")}
    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        collect(hosts, dict.fromkeys(hosts, ""), deadline=500.0, tell=tell)
    assert time.monotonic() - before < 60


def test_no_ssh_on_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(ProgramMissingError):
        ask("a")


def test_the_real_probe_over_the_real_launcher(ssh: FakeSsh, plan: Plan):
    """The fake ssh runs the command on this machine, as sshd would."""
    ssh.runs_here("here")
    node = plan.nodes[0]
    text = program(PROBE_MODULES, request(plan, node))
    answers = collect({node.name: Host("here")}, {node.name: text})
    document = answers[node.name].document
    assert document is not None, answers[node.name].error
    assert document.section("memory").at("meminfo", "MemTotal").integer() > 0


def test_the_launcher_is_one_line_of_plain_shell():
    assert "\n" not in LAUNCHER
    assert "-I -" in LAUNCHER


@pytest.mark.parametrize(
    ("uid", "sudo", "how"),
    [
        ("0", "exit 1", "plain"),
        ("1000", "exit 1", "plain"),
        (
            "1000",
            'printf "%s\\n" "$*" >> "$LOG"; [ "$2" = true ] && exit 0; shift; exec "$@"',
            "sudo",
        ),
    ],
)
def test_the_launcher_becomes_root_where_it_may(tmp_path: Path, uid: str, sudo: str, how: str):
    for name, text in (("id", f"echo {uid}"), ("sudo", sudo)):
        program_file = tmp_path / name
        program_file.write_text(f"#!/bin/sh\n{text}\n")
        program_file.chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", LAUNCHER],
        input="import sys; print(sys.flags.isolated)",
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(tmp_path / "log")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "1\n"
    log = tmp_path / "log"
    calls = log.read_text().splitlines() if log.exists() else []
    assert (len(calls) == 2 and calls[0] == "-n true") == (how == "sudo")


def test_without_python_the_launcher_says_so():
    launcher = LAUNCHER.replace("python3", "no-such-python")
    done = subprocess.run(["sh", "-c", launcher], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (127, "no-such-python: not found\n")
