"""Programs: output, deadlines, typed errors, and nothing left running."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from spark_appliance import process

PYTHON = sys.executable


def alive(pid: int) -> bool:
    """Whether a process still runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_output_and_input():
    done = process.run(["cat"], timeout=20, input="grüße\n")
    assert done == process.Completed(("cat",), 0, "grüße\n", "")


def test_environment_is_added():
    code = "import os; print(os.environ['EXTRA'], 'PATH' in os.environ)"
    assert process.run([PYTHON, "-c", code], timeout=20, env={"EXTRA": "1"}).stdout == "1 True\n"


def test_nonzero_status():
    argv = [PYTHON, "-c", "import sys; print('out'); sys.stderr.write('why\\n'); sys.exit(3)"]
    with pytest.raises(process.FailedError) as caught:
        process.run(argv, timeout=20)
    assert caught.value.completed.returncode == 3
    assert caught.value.completed.stdout == "out\n"
    assert "exit status 3" in str(caught.value)
    assert "why" in str(caught.value)
    assert process.run(argv, timeout=20, check=False).returncode == 3


def test_errors_never_repeat_input_or_environment():
    with pytest.raises(process.FailedError) as caught:
        process.run([PYTHON, "-c", "raise SystemExit(1)"], timeout=20, input="s3cret",
                    env={"KEY": "s3cret"})  # fmt: skip
    assert "s3cret" not in str(caught.value)


def test_missing_program():
    with pytest.raises(process.ProgramMissingError, match="no-such-program"):
        process.run(["no-such-program"], timeout=20)


def test_deadline_kills_the_whole_group(tmp_path):
    pid_file = tmp_path / "pid"
    script = f"sleep 1000 & echo $! > {pid_file}; wait"
    with pytest.raises(process.TimedOutError) as caught:
        process.run(["sh", "-c", script], timeout=2.0)
    assert caught.value.timeout == 2.0
    assert not alive(int(pid_file.read_text()))


def test_undecodable_output_is_replaced():
    code = "import sys; sys.stdout.buffer.write(b'a\\xff\\n')"
    assert process.run([PYTHON, "-c", code], timeout=20).stdout == "a\ufffd\n"


def test_stream_gives_lines_while_the_program_runs():
    # The program only goes on when it is answered, so a line must come before its end.
    with process.stream(["sh", "-c", "echo one; echo $$; exec sleep 1000"], timeout=60) as lines:
        reader = iter(lines)
        assert next(reader) == "one"
        pid = int(next(reader))
        assert alive(pid)
        lines.stop()
        assert list(reader) == []
    assert not alive(pid)


def test_stream_reports_failure():
    with (
        pytest.raises(process.FailedError, match="exit status 4"),
        process.stream(["sh", "-c", "echo x; exit 4"], timeout=20) as lines,
    ):
        assert list(lines) == ["x"]


def test_stream_deadline():
    with (
        pytest.raises(process.TimedOutError),
        process.stream(["sleep", "1000"], timeout=0.5) as lines,
    ):
        list(lines)


def test_stream_input_and_leaving_early():
    with process.stream(["cat"], timeout=20, input="a\nb\n") as lines:
        assert next(iter(lines)) == "a"


def test_a_line_that_is_redrawn_is_read_at_each_carriage_return():
    script = r"printf 'names\r\n\r  1%%\r  25%%\r  26%%'; exec sleep 1000"
    with process.stream(["sh", "-c", script], timeout=60) as lines:
        reader = iter(lines)
        assert [next(reader) for _ in range(4)] == ["names", "", "  1%", "  25%"]
        lines.stop()
        assert list(reader) == ["  26%"]
