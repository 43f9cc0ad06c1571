"""The streaming test server as its own process, and ``spark-appliance bench`` as a command."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SERVER = Path(__file__).with_name("bench_server.py")
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Server:
    url: str
    truth_file: Path

    def truth(self) -> list[dict]:
        """What was really sent, in the order of the requests' arrival."""
        if not self.truth_file.exists():
            return []
        records = [json.loads(line) for line in self.truth_file.read_text().splitlines()]
        return sorted(records, key=lambda r: r["received"])


@contextlib.contextmanager
def start_server(folder: Path, **options: object) -> Iterator[Server]:
    truth = folder / f"truth-{len(list(folder.glob('truth-*')))}.jsonl"
    truth.touch()
    argv = [sys.executable, str(SERVER), "--truth", str(truth)]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        argv += [flag] if value is True else [flag, str(value)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        word, port = process.stdout.readline().split()
        assert word == "listening"
        yield Server(f"http://127.0.0.1:{port}", truth)
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "spark_appliance", "bench", *arguments]


def environment(**more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if k != "SPARK_API_KEY"}
    return {**clean, "PYTHONPATH": str(ROOT), **more}
