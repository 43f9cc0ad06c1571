"""The stand-in engine refuses what the units must never hand to a rank."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nixtool import REPOSITORY

FOLDER = REPOSITORY / "pkgs" / "stand-in-engine"
KEY = "a-key"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Cluster:
    """Starts ranks and ends them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = folder / "checkpoint"
        self.checkpoint.mkdir()
        subprocess.run([sys.executable, FOLDER / "checkpoint.py", self.checkpoint, "2"], check=True)
        (folder / "devices" / "roce0").mkdir(parents=True)
        self.port, self.rendezvous = free_port(), free_port()
        self.processes: list[subprocess.Popen[str]] = []

    def config(self, mode: int = 0o600) -> Path:
        path = self.folder / "config.yaml"
        path.write_text(f'api-key: "{KEY}"\n')
        path.chmod(mode)
        return path

    def start(self, *more: str, ranks: int = 1, rank: int = 0, **env: str) -> subprocess.Popen[str]:
        words = ["--model-path", str(self.checkpoint), "--served-model-name", "m"]
        words += ["--tp", str(ranks), "--nnodes", str(ranks), "--node-rank", str(rank)]
        port = self.port if rank == 0 else free_port()
        words += ["--dist-init-addr", f"127.0.0.1:{self.rendezvous}", "--port", str(port)]
        fabric = {
            "NCCL_IB_HCA": "=roce0:1",
            "NCCL_SOCKET_IFNAME": "lo",
            "GLOO_SOCKET_IFNAME": "lo",
            "STAND_IN_DEVICES": str(self.folder / "devices"),
        }
        script = FOLDER / "stand_in_engine.py"
        process = subprocess.Popen(
            [sys.executable, script, "-m", "sglang.launch_server", *words, "--unknown", *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PATH": os.environ["PATH"], **fabric, **env},
        )
        self.processes.append(process)
        return process

    def ask(self, path: str, body: Any = None, key: str | None = KEY) -> int:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
        )
        if key is not None:
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - local
                self.answer = answer.read().decode()
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    result = Cluster(tmp_path)
    yield result
    for process in result.processes:
        process.kill()
        process.communicate()


def wait_until_up(process: subprocess.Popen[str], cluster: Cluster) -> None:
    assert process.stdout is not None
    assert "is up" in process.stdout.readline()
    while True:
        try:
            cluster.ask("/health")
            return
        except (urllib.error.URLError, ConnectionError):
            assert process.poll() is None


def test_it_answers_with_the_key_alone(cluster: Cluster) -> None:
    process = cluster.start("--config", str(cluster.config()))
    wait_until_up(process, cluster)
    body = {"model": "m", "messages": []}
    assert cluster.ask("/v1/chat/completions", body) == 200
    assert json.loads(cluster.answer)["choices"][0]["message"]["content"] == "42"
    assert cluster.ask("/v1/chat/completions", body, key="wrong") == 401
    assert cluster.ask("/v1/models", key=None) == 401
    assert cluster.ask("/v1/chat/completions", {"model": "other"}) == 404
    assert cluster.ask("/metrics", key=None) == 200
    assert "sglang:generation_tokens_total 1" in cluster.answer


def test_ranks_meet_and_die_together(cluster: Cluster) -> None:
    head = cluster.start(ranks=3, rank=0)
    workers = [cluster.start(ranks=3, rank=rank) for rank in (1, 2)]
    wait_until_up(head, cluster)
    workers[0].kill()
    assert head.wait(timeout=60) == 65
    assert workers[1].wait(timeout=60) == 65


@pytest.mark.parametrize(
    ("more", "env", "reason"),
    [
        ([], {"NCCL_IB_GID_INDEX": ""}, "empty variables: NCCL_IB_GID_INDEX"),
        ([], {"NCCL_IB_HCA": "=roce9:1"}, "no such RDMA devices: roce9:1"),
        ([], {"STAND_IN_FAIL": "1"}, "told to fail"),
        (["--model-path", "/nowhere"], {}, "/nowhere/model.safetensors.index.json"),
        (["--tp", "2"], {}, "--tp 2, --nnodes 3"),
    ],
)
def test_wrong_settings_are_refused(
    cluster: Cluster, more: list[str], env: dict[str, str], reason: str
) -> None:
    process = cluster.start(*more, ranks=3, rank=0, **env)
    assert reason in process.communicate(timeout=60)[1]
    assert process.returncode == 64


def test_a_leaked_or_readable_key_is_refused(cluster: Cluster) -> None:
    process = cluster.start("--config", str(cluster.config(0o644)))
    assert "has mode 644" in process.communicate(timeout=60)[1]
    process = cluster.start("--config", str(cluster.config()), "--api-key", KEY)
    assert "on the command line" in process.communicate(timeout=60)[1]
    process = cluster.start("--config", str(cluster.config()), LEAK=KEY)
    assert "in the environment" in process.communicate(timeout=60)[1]
