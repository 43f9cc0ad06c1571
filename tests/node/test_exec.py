from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spark_appliance.node.container import SECCOMP, Container
from spark_appliance.node.errors import NodeError
from spark_appliance.node.execute import engine_command, engine_environment
from spark_appliance.node.plan import NodeContext
from spark_appliance.node.prepare import Owner

from .conftest import write

ENV_FILE = "run/spark/fabric.env"


def test_environment_is_the_plans_and_the_fabrics(
    root: Path, plan: dict[str, Any], context_of: Callable[..., NodeContext]
) -> None:
    write(root / ENV_FILE, "# comment\nNCCL_IB_GID_INDEX=3\n")
    inherited = {"PATH": "/bin", "HOME": "/root", "NOTIFY_SOCKET": "/x", "NCCL_DEBUG": "TRACE"}
    found = engine_environment(context_of(plan), inherited)
    expected = {
        **plan["nodes"][0]["env"],
        "PATH": "/bin",
        "HOME": "/var/cache/spark-engine",
        "NCCL_IB_GID_INDEX": "3",
    }
    assert found == expected


def test_a_stale_or_empty_index_never_reaches_nccl(
    root: Path, plan: dict[str, Any], context_of: Callable[..., NodeContext]
) -> None:
    write(root / ENV_FILE, "NCCL_IB_GID_INDEX=\n")
    found = engine_environment(context_of(plan), {"NCCL_IB_GID_INDEX": "0"})
    assert "NCCL_IB_GID_INDEX" not in found


def test_no_fabric_no_engine(plan: dict[str, Any], context_of: Callable[..., NodeContext]) -> None:
    with pytest.raises(NodeError, match=r"fabric\.env"):
        engine_environment(context_of(plan), {})
    plan["nodes"][0]["rails"] = []
    assert engine_environment(context_of(plan), {})["HOME"] == "/var/cache/spark-engine"


def test_the_packer_needs_no_fabric(
    dgx_plan: dict[str, Any], context_of: Callable[..., NodeContext]
) -> None:
    context = context_of(dgx_plan)
    assert "NCCL_IB_GID_INDEX" not in engine_environment(context, {}, fabric=False)
    packer = Container("spark-engine-pack", "docker", "i@sha256:0", None, writable_engram=True)
    assert packer.argv(context, ["spark-engram", "pack"])[-2:] == ["spark-engram", "pack"]


def test_argv_is_the_plans_with_its_interpreter_replaced(
    plan: dict[str, Any], context_of: Callable[..., NodeContext]
) -> None:
    context = context_of(plan)
    argv = plan["nodes"][0]["argv"]
    assert engine_command(context, None) == argv
    assert engine_command(context, "/nix/python") == ["/nix/python", *argv[1:]]
    assert engine_command(context, None, ["/bin/tool", "-x"]) == ["/bin/tool", "-x"]


CONTAINER = Container(
    name="spark-engine",
    runtime="/usr/bin/docker",
    image="engine@sha256:0",
    owner=Owner("spark", 991, 992),
)


def test_container_argv_is_exact(
    root: Path, dgx_plan: dict[str, Any], context_of: Callable[..., NodeContext]
) -> None:
    write(root / ENV_FILE, "NCCL_IB_GID_INDEX=3\n")
    context = context_of(dgx_plan)
    node = dgx_plan["nodes"][0]
    argv = CONTAINER.argv(context, [])
    names = sorted({*node["env"], "NCCL_IB_GID_INDEX", "HOME"})
    env = [word for name in names for word in ("--env", name)]
    assert argv == [
        *["/usr/bin/docker", "run", "--rm", "--init", "--name", "spark-engine"],
        *["--log-driver", "none"],
        *["--network", "host", "--ipc", "host", "--cgroup-parent", "sparkengine.slice"],
        *["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "991:992"],
        *["--security-opt", f"seccomp={root}/run/spark/seccomp.json"],
        *["--pids-limit", "-1"],
        *["--ulimit", "memlock=-1:-1", "--ulimit", "stack=67108864:67108864"],
        *["--ulimit", "nofile=1048576:1048576"],
        *["--gpus", "all", "--device", "/dev/infiniband"],
        "--mount",
        "type=bind,src=/models/DeepSeek-V4.1-Flash,dst=/models/DeepSeek-V4.1-Flash,readonly",
        *["--mount", "type=bind,src=/var/cache/spark-engine,dst=/var/cache/spark-engine"],
        *["--mount", "type=bind,src=/srv/engram,dst=/srv/engram,readonly"],
        "--mount",
        "type=bind,src=/run/spark-engine/config.yaml,dst=/run/spark-engine/config.yaml,readonly",
        *["--workdir", "/var/cache/spark-engine"],
        *env,
        "engine@sha256:0",
        *node["argv"],
    ]
    values = {value for value in node["env"].values() if len(value) > 6}
    assert not [word for word in env if word in values]


def test_a_tool_gets_no_key_and_a_packer_may_write(
    root: Path, dgx_plan: dict[str, Any], context_of: Callable[..., NodeContext]
) -> None:
    write(root / ENV_FILE, "")
    packer = Container("spark-engine-pack", "podman", "i", None, writable_engram=True)
    argv = packer.argv(context_of(dgx_plan), ["spark-engram", "pack"])
    assert argv[-3:] == ["i", "spark-engram", "pack"]
    assert "type=bind,src=/srv/engram,dst=/srv/engram" in argv
    assert not any("config.yaml" in word for word in argv)
    assert argv[argv.index("--user") : argv.index("--user") + 4] == [
        *["--user", "0:0", "--cap-add", "DAC_OVERRIDE"]
    ]
    assert argv[argv.index("--device") + 1] == "nvidia.com/gpu=all"


def test_a_single_node_gets_no_rdma_devices(
    dgx_plan: dict[str, Any], context_of: Callable[..., NodeContext]
) -> None:
    plan = json.loads(json.dumps(dgx_plan))
    plan["nodes"][0]["rails"] = []
    assert "/dev/infiniband" not in CONTAINER.argv(context_of(plan), [])


def test_seccomp_lets_io_uring_pass() -> None:
    refused = {name for rule in SECCOMP["syscalls"] for name in rule["names"]}
    assert not [name for name in refused if name.startswith("io_uring")]
    assert {"mount", "bpf", "init_module", "kexec_load", "ptrace"} - refused == {"ptrace"}


def spark_node(root: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spark_appliance.node", "--root", str(root)]
    return subprocess.run(
        [*command, "--node", "spark1", "exec", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **env},
    )


def test_the_program_becomes_the_engine(
    root: Path, plan: dict[str, Any], context_of: Callable[..., NodeContext]
) -> None:
    write(root / ENV_FILE, "NCCL_IB_GID_INDEX=5\n")
    context_of(plan)
    show = "import os, sys; print(sys.argv[1:], os.environ['NCCL_IB_GID_INDEX'])"
    done = spark_node(root, "--", sys.executable, "-c", show, "--tp", "3", "--", "x")
    assert done.stderr == ""
    assert done.stdout == "['--tp', '3', '--', 'x'] 5\n"


def test_the_program_runs_the_container_client(
    root: Path, plan: dict[str, Any], context_of: Callable[..., NodeContext], tmp_path: Path
) -> None:
    write(root / ENV_FILE, "NCCL_IB_GID_INDEX=5\n")
    context_of(plan)
    client = tmp_path / "docker"
    client.write_text('#!/bin/sh\necho "$NCCL_IB_GID_INDEX $1 $2"\n')
    client.chmod(0o755)
    words = ["--container", "c", "--container-runtime", str(client), "--image", "i"]
    done = spark_node(root, *words)
    assert (done.stdout, done.stderr) == ("5 run --rm\n", "")
    assert json.loads((root / "run/spark/seccomp.json").read_text()) == SECCOMP


def test_a_replaced_nccl_is_for_the_engine_and_not_for_the_client(
    root: Path, plan: dict[str, Any], context_of: Callable[..., NodeContext], tmp_path: Path
) -> None:
    write(root / ENV_FILE, "NCCL_IB_GID_INDEX=5\n")
    plan["nodes"][0]["env"]["LD_PRELOAD"] = "/opt/nccl/libnccl.so.2"
    context_of(plan)
    client = tmp_path / "docker"
    client.write_text('#!/bin/sh\necho "preload:${LD_PRELOAD-none}"\necho "$*"\n')
    client.chmod(0o755)
    words = ["--container", "c", "--container-runtime", str(client), "--image", "i"]
    preload, line = spark_node(root, *words).stdout.splitlines()
    assert preload == "preload:none"
    assert "--env LD_PRELOAD=/opt/nccl/libnccl.so.2 " in line


def test_a_program_that_is_not_there(
    root: Path, plan: dict[str, Any], context_of: Callable[..., NodeContext]
) -> None:
    write(root / ENV_FILE, "")
    context_of(plan)
    done = spark_node(root, "--python", "/no/such/python")
    assert done.returncode == 1
    assert done.stderr == "<3>cannot execute /no/such/python: No such file or directory\n"
    done = spark_node(root, "--container", "c")
    assert (done.returncode, done.stderr) == (2, "<3>exec --container needs --image\n")
