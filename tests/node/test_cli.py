from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spark_appliance.node.cli import main
from spark_appliance.node.errors import NodeError
from spark_appliance.node.files import write_atomic
from spark_appliance.node.journal import Journal
from spark_appliance.node.notify import Notifier
from spark_appliance.node.plan import NodeContext
from spark_appliance.node.process import run, run_async
from spark_appliance.node.systemctl import Systemctl, parse_show

from .conftest import write

SHOWN = (
    "Id,LoadState,ActiveState,SubState,Result,ExecMainStatus,StatusText,ControlGroup,"
    "InvocationID,NRestarts"
)

COMMANDS = ["fabric", "guard", "prepare", "exec", "ready", "supervise", "status"]


def spark_node(root: Path, command: str) -> list[str]:
    program = [sys.executable, "-m", "spark_appliance.node"]
    return [*program, "--root", str(root), "--node", "spark1", command]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(f"\n    {command} " in text for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_plan_is_one_line(command: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--user", "root"] if command == "prepare" else []
    with pytest.raises(SystemExit) as caught:
        main(["--root", str(root), "--node", "spark1", command, *words])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith(f"<3>{root}/etc/spark/plan.json: cannot read the plan")


@pytest.mark.parametrize("deadline", ["0", "-1", "nan", "1e9", "x"])
def test_deadlines_are_numbers_of_seconds(deadline: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--node", "spark1", "fabric", "--deadline", deadline])
    assert caught.value.code == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_guard_runs_until_it_is_told_to_stop(
    number: signal.Signals,
    root: Path,
    plan: dict[str, Any],
    context_of: Callable[..., NodeContext],
    tmp_path: Path,
) -> None:
    context_of(plan)
    write(root / "proc/meminfo", "MemAvailable: 20000000 kB\n")
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(address))
        listener.settimeout(30)
        guard = subprocess.Popen(
            spark_node(root, "guard"),
            env={**os.environ, "NOTIFY_SOCKET": str(address), "WATCHDOG_USEC": "15000000"},
            stderr=subprocess.PIPE,
        )
        try:
            assert listener.recv(4096).decode().startswith("READY=1\nSTATUS=armed: MemAvailable 19")
            assert listener.recv(4096) == b"WATCHDOG=1"
            guard.send_signal(number)
            _, errors = guard.communicate(timeout=30)
        finally:
            guard.kill()
            guard.wait()
    assert guard.returncode == 0
    assert b"Traceback" not in errors


def test_ready_leaves_in_the_middle_of_a_probe(
    root: Path, plan: dict[str, Any], context_of: Callable[..., NodeContext]
) -> None:
    with socket.socket() as engine:  # accepts and never answers
        engine.bind(("127.0.0.1", 0))
        engine.listen()
        engine.settimeout(30)
        plan["health"]["live_url"] = f"http://127.0.0.1:{engine.getsockname()[1]}/health"
        plan["api"]["key_file"] = None
        context_of(plan)
        ready = subprocess.Popen(
            spark_node(root, "ready"),
            stderr=subprocess.PIPE,
        )
        try:
            connection, _ = engine.accept()
            connection.recv(16)
            ready.send_signal(signal.SIGTERM)
            _, errors = ready.communicate(timeout=30)
            connection.close()
        finally:
            ready.kill()
            ready.wait()
    assert (ready.returncode, errors) == (0, b"")


def test_journal_lines_carry_a_priority_and_stay_one_line() -> None:
    stream = io.StringIO()
    journal = Journal(stream)
    journal.error("a\nb")
    journal.warning("c")
    Journal(stream, prefix=False).info("plain")
    assert stream.getvalue() == "<3>a b\n<4>c\nplain\n"


def test_notify_is_silent_outside_of_systemd() -> None:
    notifier = Notifier({})
    notifier.ready("x")
    assert notifier.watchdog_seconds == 0
    assert Notifier({"WATCHDOG_USEC": "30000000"}).watchdog_seconds == 15
    assert Notifier({"WATCHDOG_USEC": "x"}).watchdog_seconds == 0


def test_notify_never_waits_for_a_reader(tmp_path: Path) -> None:
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(address))
        notifier = Notifier({"NOTIFY_SOCKET": str(address)})
        for _ in range(5000):
            notifier.alive()


def test_notify_uses_abstract_sockets() -> None:
    name = f"spark-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}")
        Notifier({"NOTIFY_SOCKET": f"@{name}"}).status("hello")
        assert listener.recv(100) == b"STATUS=hello"


def test_programs_have_deadlines() -> None:
    import asyncio

    with pytest.raises(NodeError, match=r"'sleep 60' did not end within 0\.1 s"):
        run(["sleep", "60"], seconds=0.1)
    with pytest.raises(NodeError, match=r"'sleep 60' did not end within 0\.1 s"):
        asyncio.run(run_async(["sleep", "60"], seconds=0.1))
    with pytest.raises(NodeError, match="no-such-program: no such program in PATH="):
        run(["no-such-program"], seconds=1)
    with pytest.raises(NodeError, match="no-such-program: no such program in PATH="):
        asyncio.run(run_async(["no-such-program"], seconds=1))


def test_programs_answer_in_english_and_without_our_notify_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/x")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    done = run(["env"], seconds=30)
    assert "LC_ALL=C" in done.stdout.splitlines()
    assert "NOTIFY_SOCKET" not in done.stdout
    failed = run(["sh", "-c", "echo one >&2; echo two >&2; exit 5"], seconds=30)
    assert (failed.status, failed.reason) == (5, "one")


def test_systemctl_calls_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    calls = tmp_path / "calls"
    write(tmp_path / "bin/systemctl", f'#!/bin/sh\necho "$@" >> {calls}\n')
    (tmp_path / "bin/systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")

    async def body() -> None:
        units = Systemctl()
        await units.start("a.service", seconds=30)
        await units.start("b.service", seconds=30, wait=False)
        await units.stop("a.service", seconds=30)
        await units.kill("a.service")
        await units.show(["a.service", "b.service"])

    asyncio.run(body())
    assert calls.read_text().splitlines() == [
        "reset-failed -- a.service",
        "start -- a.service",
        "reset-failed -- b.service",
        "start --no-block -- b.service",
        "stop -- a.service",
        "kill --signal=SIGKILL -- a.service",
        f"show --property={SHOWN} -- a.service b.service",
    ]


def test_show_is_read_block_by_block() -> None:
    states = parse_show("Id=a\nActiveState=active\nStatusText=x=y\n\n\nId=b\n\nnonsense\n")
    assert (states["a"].running, states["a"].text) == (True, "x=y")
    assert (states["b"].active, states["b"].running) == ("unknown", False)
    assert set(states) == {"a", "b"}


def test_atomic_files_leave_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(NodeError, match=f"cannot write {tmp_path}/file"):
        write_atomic(tmp_path / "file", "x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_failed_start_says_the_units_own_last_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    calls = tmp_path / "calls"
    write(
        tmp_path / "bin/systemctl",
        "#!/bin/sh\n"
        'case $1 in show) echo 0123abcd ;; start) echo "Job failed." >&2; exit 1 ;; esac\n',
    )
    write(tmp_path / "bin/journalctl", f'#!/bin/sh\necho "$@" >> {calls}\necho "no such shard"\n')
    for tool in ("systemctl", "journalctl"):
        (tmp_path / "bin" / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    message = r"^a\.service did not start: no such shard \(journalctl -u a\.service\)$"
    with pytest.raises(NodeError, match=message):
        asyncio.run(Systemctl().start("a.service", seconds=30))
    assert calls.read_text() == (
        "--priority=err --lines=1 --output=cat --no-pager --quiet _SYSTEMD_INVOCATION_ID=0123abcd\n"
    )
    (tmp_path / "bin/journalctl").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(NodeError, match=r"did not start: Job failed\. \("):
        asyncio.run(Systemctl().start("a.service", seconds=30))
