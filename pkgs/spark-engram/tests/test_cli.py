import json
import os
import signal
import subprocess
import sys

import pytest
from spark_engram import bench, cli, receipt
from spark_engram.progress import JsonReporter, Meter, TextReporter


def run(*argv, **more):
    return subprocess.run(
        [sys.executable, "-m", "spark_engram", *map(str, argv)],
        capture_output=True, text=True, check=False, **more,
    )  # fmt: skip


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def pack_argv(model, out, *more):
    return ["pack", "--checkpoint", model.folder, "--output", out, *more]


def test_tp_and_rank_are_never_guessed(model, out):
    done = run(*pack_argv(model, out))
    assert done.returncode == 2
    assert "--tp, --rank" in done.stderr


def test_pack_then_verify_then_info(model, out):
    done = run(*pack_argv(model, out, "--tp", 4, "--rank", 3, "--revision", "r9", "--verify"))
    assert (done.returncode, done.stdout) == (0, "")
    assert "pages verified" in done.stderr
    path = out / "engram-l14-r3of4.bin"
    done = run("verify", path, "--checkpoint", model.folder)
    assert done.returncode == 0
    assert "rows equal the source" in done.stderr
    facts = json.loads(run("info", path, "--json").stdout)
    assert (facts["layer"], facts["tp"], facts["rank"]) == (14, 4, 3)
    assert (facts["layout"], facts["revision"], facts["receipt"]) == ("columns", "r9", True)
    assert facts["file_bytes"] == path.stat().st_size
    assert "columns        24" in run("info", path).stdout


def test_json_progress_is_one_object_a_line(model, out):
    argv = pack_argv(model, out, "--tp", 1, "--rank", 0, "--layer", 14, "--json-progress")
    events = [json.loads(line) for line in run(*argv).stdout.splitlines()]
    assert [event["event"] for event in events] == ["plan", "file", "progress", "file", "done"]
    plan, start, progress, complete, done = events
    size = (out / "engram-l14-r0of1.bin").stat().st_size
    rows = model.tables[1].total_rows
    assert plan["files"][0] == {
        "file": "engram-l14-r0of1.bin", "layer": 14, "bytes": size, "rows": rows,
        "row_start": 0, "row_end": rows, "layout": "columns",
    }  # fmt: skip
    assert plan["bytes"] == size
    assert plan["needed_bytes"] == size + 2**20
    assert (start["state"], start["done_bytes"], start["bytes"]) == ("start", 4096, size)
    assert progress["done_bytes"] == progress["bytes"] == size
    assert (complete["state"], complete["done_bytes"]) == ("complete", size)
    assert (done["files"], done["bytes"]) == (1, size)
    again = [json.loads(line) for line in run(*argv).stdout.splitlines()]
    assert [event.get("state") for event in again] == [None, "kept", None]


def test_an_error_is_one_line_and_one_event(model, out):
    argv = pack_argv(model, out, "--tp", 3, "--rank", 3, "--json-progress")
    done = run(*argv)
    assert done.returncode == 2
    message = "rank 3 of 3 does not exist; ranks are 0 to 2"
    assert done.stderr == f"spark-engram: error: {message}\n"
    assert json.loads(done.stdout) == {
        "event": "error", "error": "UsageError", "message": message,
        "exit_status": 2, "resumable": False,
    }  # fmt: skip


def test_a_layer_without_a_table_is_named(model, out):
    done = run(*pack_argv(model, out, "--tp", 1, "--rank", 0, "--layer", 2))
    assert done.returncode == 2
    assert "layer 2 has no Engram table; this model has layers 1, 14" in done.stderr


def test_a_foreign_file_has_status_3(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(b"\x45\x44" * 4096)
    done = run("info", path)
    assert done.returncode == 3
    assert "not a spark-engram file" in done.stderr
    assert "Traceback" not in done.stderr


def test_verify_refuses_another_checkpoint(model, packed_file, tmp_path):
    (tmp_path / "config.json").write_bytes((model.folder / "config.json").read_bytes() + b"\n")
    done = run("verify", packed_file, "--checkpoint", tmp_path)
    assert done.returncode == 2
    assert "SHA-256" in done.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_cleanly(monkeypatch, capsys, model, out, number, status):
    monkeypatch.setattr(cli.pack, "pack", lambda *_: os.kill(os.getpid(), number))
    before = signal.getsignal(signal.SIGTERM)
    try:
        argv = [str(part) for part in pack_argv(model, out, "--tp", 1, "--rank", 0)]
        assert cli.main(argv) == status
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "nothing is lost" in capsys.readouterr().err


def test_fake_checkpoint(tmp_path):
    done = run("fake-checkpoint", tmp_path / "m", "--rows-per-column", 10, "--layer", 3)
    assert done.returncode == 0
    assert done.stdout.startswith("layer 3: ")
    assert {path.name for path in (tmp_path / "m").iterdir()} == {
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }


def test_bench_prints_every_batch_size(packed_file):
    argv = ("bench", packed_file, "--seconds", "0.05", "--ids", 48, "--ids", 1152, "--no-fio")
    facts = json.loads(run(*argv, "--json").stdout)
    assert [row["ids"] for row in facts["batches"]] == [48, 1152]
    assert all(row["p50_us"] <= row["p99_us"] for row in facts["batches"])
    assert facts["fio_iops"] is None
    text = run(*argv).stdout
    assert "fio is not installed or was not asked for" in text


def test_bench_without_rows_is_refused(tmp_path):
    run("fake-checkpoint", tmp_path / "m", "--rows-per-column", 2, "--layer", 1)
    run(*("pack", "--checkpoint", tmp_path / "m", "--output", tmp_path),
        *("--tp", 5000, "--rank", 0, "--layout", "rows"))  # fmt: skip
    done = run("bench", tmp_path / "engram-l1-r0of5000.bin")
    assert done.returncode == 2
    assert "owns no rows" in done.stderr


def test_fio_is_asked_for_the_same_work(monkeypatch, packed_file):
    seen = {}

    def fake_run(argv, **_):
        seen["argv"] = argv
        report = {"jobs": [{"read": {"iops": 1234.5}}]}
        return subprocess.CompletedProcess(argv, 0, "note\n" + json.dumps(report), "")

    monkeypatch.setattr(bench.shutil, "which", lambda _: "/usr/bin/fio")
    monkeypatch.setattr(bench.subprocess, "run", fake_run)
    assert bench.fio_randread(packed_file, 64, 2) == 1234.5
    assert seen["argv"] == [
        "/usr/bin/fio", "--name=randread", f"--filename={packed_file}", "--readonly",
        "--rw=randread", "--bs=4k", "--direct=1", "--ioengine=io_uring", "--iodepth=64",
        "--numjobs=1", "--thread", "--group_reporting", "--time_based", "--runtime=2",
        "--norandommap", "--randrepeat=0", "--output-format=json", "--registerfiles=1",
        "--fixedbufs=1",
    ]  # fmt: skip


def check(environment, *more):
    kept = {"PATH": os.environ["PATH"], **environment}
    return run("plugin-check", *more, env=kept)


@pytest.fixture
def served(model, out):
    model.pack(out, tp=3, rank=1)
    return out


def test_plugin_check_passes_when_all_fits(model, served):
    more = ("--tp", 3, "--rank", 1, "--checkpoint", model.folder)
    done = check({"SPARK_ENGRAM_DIR": str(served)}, *more)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fits, read with") == 2
    facts = json.loads(check({"SPARK_ENGRAM_DIR": str(served)}, *more, "--json").stdout)
    assert [item["ok"] for item in facts["files"]] == [True, True]


@pytest.mark.parametrize(
    ("environment", "status", "message"),
    [
        ({}, 2, "SPARK_ENGRAM_DIR is not set"),
        ({"SPARK_ENGRAM_DIR": "/nowhere"}, 2, "no such folder"),
        ({"SPARK_ENGRAM_DIR": "@", "SGLANG_PLUGINS": "other"}, 2, "leaves spark_engram out"),
        ({"SPARK_ENGRAM_DIR": "@", "SPARK_ENGRAM_REVISION": "r7"}, 3, "needed 'r7'"),
        ({"SPARK_ENGRAM_DIR": "@", "SPARK_ENGRAM_DEPTH": "x"}, 2, "must be a whole number"),
    ],
)
def test_plugin_check_explains(model, served, environment, status, message):
    environment = {name: value.replace("@", str(served)) for name, value in environment.items()}
    done = check(environment, "--tp", 3, "--rank", 1, "--checkpoint", model.folder)
    assert done.returncode == status
    assert message in done.stderr


@pytest.mark.parametrize(("tp", "rank"), [(3, 0), (4, 1)])
def test_plugin_check_names_what_the_folder_holds(model, served, tp, rank):
    done = check(
        {"SPARK_ENGRAM_DIR": str(served)},
        "--tp", tp, "--rank", rank, "--checkpoint", model.folder,
    )  # fmt: skip
    assert done.returncode == 3
    assert f"engram-l1-r{rank}of{tp}.bin: missing; the folder holds engram-l1-r1of3" in done.stderr
    assert f"spark-engram pack --tp {tp} --rank {rank}" in done.stderr


def test_plugin_check_sees_an_unfinished_pack(model, served):
    path = served / "engram-l1-r1of3.bin"
    receipt.path_for(path).unlink()
    more = ("--tp", 3, "--rank", 1, "--checkpoint", model.folder)
    done = check({"SPARK_ENGRAM_DIR": str(served)}, *more)
    assert (done.returncode, "packing was not finished" in done.stderr) == (3, True)
    path.rename(path.with_name(path.name + ".partial"))
    done = check({"SPARK_ENGRAM_DIR": str(served)}, *more)
    assert (done.returncode, "packing is unfinished" in done.stderr) == (3, True)


class Stream:
    def __init__(self, tty):
        self.text, self.tty = "", tty

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return self.tty


def meter_run(reporter, times):
    ticks = iter(times)
    meter = Meter(reporter, "f", 100, 0, clock=lambda: next(ticks))
    for done in (10, 11, 50, 100):
        meter.update(done)


def test_the_meter_reports_rate_and_time_left_at_most_once_a_second():
    stream = Stream(tty=False)
    meter_run(JsonReporter(stream), [0.0, 1.0, 1.5, 2.5, 4.0])
    events = [json.loads(line) for line in stream.text.splitlines()]
    assert [event["done_bytes"] for event in events] == [10, 50, 100]
    assert [event["bytes_per_second"] for event in events] == [10, 20, 25]
    assert [event["eta_seconds"] for event in events] == [9.0, 2.5, 0.0]


def test_a_terminal_gets_a_bar():
    stream = Stream(tty=True)
    meter_run(TextReporter(stream, clock=lambda: 0.0), [0.0, 1.0, 1.5, 2.5, 4.0])
    assert stream.text.count("\r") == 3
    assert "f [###...........................]  10.0 % 10 B of 100 B, 10 B/s, 9 s left" in (
        stream.text
    )
