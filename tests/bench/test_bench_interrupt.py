"""Ctrl-C in the middle keeps what is finished."""

from __future__ import annotations

import signal
import subprocess

from bench_helpers import command, environment

from spark_appliance.bench import store


def interrupt_after(words: str, arguments: list[str], cwd) -> tuple[int, str, str]:
    process = subprocess.Popen(
        command(*arguments),
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    seen = ""
    for line in process.stderr:
        seen += line
        if words in line:
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=60)
    return process.returncode, out, seen + err


def test_finished_samples_are_kept(server, tmp_path):
    endpoint = server(rate=100)
    status, out, err = interrupt_after(
        "prose c1 2/5",
        [endpoint.url, "--max-tokens", "100", "--samples", "5", "--out", "r.json"],
        tmp_path,
    )
    assert status == 130
    assert "Traceback" not in err
    assert "--resume r.json" in err
    assert "PARTIAL" in out
    result = store.load(tmp_path / "r.json")
    assert result.status == "partial"
    assert "stopped: interrupted by the user" in result.problems
    assert [r.status for r in result.groups[0].rounds][:2] == ["ok", "ok"]
    assert result.groups[0].summary["decode_tok_s"].n == 2


def test_interrupt_before_the_first_sample(server, tmp_path):
    status, _, err = interrupt_after(
        "warning: this client runs",
        [server(rate=10).url, "--out", "r.json"],
        tmp_path,
    )
    assert status == 130
    assert "nothing was written" in err
    assert not (tmp_path / "r.json").exists()
