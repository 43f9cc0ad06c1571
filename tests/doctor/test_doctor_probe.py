"""The probe program itself: over fake trees, and on this machine."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
from doctor_nodes import run_probe
from doctor_root import IMAGE, FakeSpark, fatbin

from spark_appliance import lockfile
from spark_appliance.doctor.document import read_document
from spark_appliance.doctor.probe import engine
from spark_appliance.doctor.probe.core import COMMANDS, Facts, Machine, ProbeError, answer
from spark_appliance.doctor.probe.main import SECTIONS, TOTAL
from spark_appliance.doctor.program import DEEP_MODULES, PROBE_MODULES, program
from spark_appliance.doctor.request import request
from spark_appliance.model.plan import Plan

READ_ONLY = {
    "docker", "dmesg", "ibv_devinfo", "ip", "iptables", "nft", "nmcli", "nvidia-smi", "nvme",
    "ping", "rpcinfo", "systemctl", "timedatectl",
}  # fmt: skip


def sources() -> list[tuple[str, str]]:
    folder = resources.files("spark_appliance.doctor.probe")
    names = dict.fromkeys([*PROBE_MODULES, *DEEP_MODULES])
    return [(name, folder.joinpath(f"{name}.py").read_text()) for name in names]


@pytest.mark.parametrize(("name", "text"), sources(), ids=lambda value: value[:12])
def test_python_3_8_and_the_standard_library_are_enough(name: str, text: str):
    tree = ast.parse(text, name, feature_version=(3, 8))
    for statement in ast.walk(tree):
        modules = []
        if isinstance(statement, ast.Import):
            modules = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            modules = [statement.module or ""]
        for module in modules:
            own = module.startswith("spark_appliance.doctor.probe")
            assert own or module.split(".")[0] in sys.stdlib_module_names


def old_python() -> str | None:
    """Return the oldest Python from 3.8 on that runs here."""
    for minor in range(8, 11):
        found = shutil.which(f"python3.{minor}")
        for path in [
            found,
            *map(str, Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3")),
        ]:
            if path is None:
                continue
            check = f"import sys; assert sys.version_info[:2] == (3, {minor})"
            done = subprocess.run([path, "-c", check], capture_output=True, check=False)
            if done.returncode == 0:
                return path
    return None


def test_runs_on_an_old_python(spark: FakeSpark):
    python = old_python()
    if python is None:
        pytest.skip("no Python 3.8, 3.9 or 3.10 on this machine")
    document = read_document(run_probe(spark, python), "spark2")
    assert document.data["python"].startswith("3.")
    assert document.section("rdma").at("active_mtu", "rocep1s0f0").integer() == 4096
    assert [
        section["errors"] for section in document.data["sections"].values() if section["errors"]
    ] == []


def test_on_this_machine_it_answers_in_time_whatever_is_missing(plan: Plan):
    text = program(PROBE_MODULES, request(plan, plan.nodes[0]))
    done = subprocess.run(
        [sys.executable, "-I", "-"],
        input=text,
        capture_output=True,
        text=True,
        timeout=TOTAL + 10,
        check=False,
    )
    assert done.returncode == 0 and done.stderr == ""
    document = read_document(done.stdout, "spark1")
    assert set(document.data["sections"]) == {name for name, _, _ in SECTIONS}
    assert document.data["ended"] - document.data["started"] < TOTAL
    assert document.section("system").at("machine").text() == os.uname().machine
    # files below /proc/sys are particular about how they are read
    assert document.section("system").at("kernel").text() == os.uname().release
    assert document.section("system").at("hostname").text() == os.uname().nodename
    assert document.section("memory").at("sysctl", "vm.min_free_kbytes").text().isdigit()


def test_an_empty_tree_gives_reasons_not_failures(spark: FakeSpark):
    shutil.rmtree(spark.root)
    shutil.rmtree(spark.base / "answers")
    spark.root.mkdir()
    document = read_document(run_probe(spark), "spark2")
    errors = {name: section["errors"] for name, section in document.data["sections"].items()}
    assert errors["system"]["kernel"].endswith("No such file or directory")
    assert "the NVIDIA driver is not loaded" in errors["gpu"]["gpus"]
    assert "*" not in {key for found in errors.values() for key in found}


def test_a_dead_mount_costs_one_fact_and_no_time(spark: FakeSpark):
    """A FIFO without a writer blocks its reader as a dead NFS server does."""
    path = spark.root / spark.plan.model.path.lstrip("/") / "config.json"
    path.unlink()
    os.mkfifo(path)
    document = read_document(run_probe(spark, total=3), "spark2")
    checkpoint = document.data["sections"]["checkpoint"]
    assert checkpoint["directory"] is True
    assert checkpoint["errors"]["config"].startswith("no answer within")
    assert "memory" in document.data["sections"]
    assert document.data["ended"] - document.data["started"] < 10


def test_a_program_that_hangs_costs_one_fact(spark: FakeSpark):
    slow = spark.base / "bin" / "nvidia-smi"
    slow.write_text("#!/bin/sh\nexec sleep 1000\n")
    document = read_document(run_probe(spark, total=4), "spark2")
    gpu = document.data["sections"]["gpu"]
    assert gpu["driver"] == {"version": "580.173.02", "open": True}
    assert "no answer within" in gpu["errors"]["gpus"]


def test_sections_that_cannot_start_in_time_are_named(spark: FakeSpark):
    document = read_document(run_probe(spark, total=0), "spark2")
    for section in document.data["sections"].values():
        assert section["errors"] == {"*": "not started within 0 s"}


def test_nothing_of_the_probe_holds_the_channel_open(spark: FakeSpark):
    """What hangs must have let go of stdout, else sshd keeps the session."""
    path = spark.root / spark.plan.model.path.lstrip("/") / "config.json"
    path.unlink()
    os.mkfifo(path)
    asked = {**request(spark.plan, spark.node), "root": str(spark.root), "total": 2}
    done = subprocess.run(
        [sys.executable, "-I", "-"], input=program(PROBE_MODULES, asked), env=spark.environ,
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert json.loads(done.stdout)["probe"] == 1


_GUARD = """\
import os, sys
CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.chmod", "os.chown", "os.link",
           "os.symlink", "os.truncate", "shutil.rmtree", "os.utime", "os.setxattr")
def guard(event, args):
    if event == "open" and str(args[0]) != "/dev/null":
        flags = args[2] or 0
        if set(args[1] or "") & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            os._exit(77)
    if event in CHANGES:
        os._exit(78)
    if event == "os.system" or event == "subprocess.Popen" and args[1][0] not in {programs!r}:
        os._exit(79)
sys.addaudithook(guard)
"""


@pytest.mark.parametrize("docker", [False, True])
def test_it_writes_nothing_and_starts_only_known_programs(spark: FakeSpark, docker: bool):
    """Every open, change of the file system and start of a program is watched."""
    if docker:
        spark.docker()
    asked = {**request(spark.plan, spark.node), "root": str(spark.root)}
    guard = _GUARD.replace("{programs!r}", repr(sorted(READ_ONLY)))
    done = subprocess.run(
        [sys.executable, "-I", "-"], input=guard + program(PROBE_MODULES, asked),
        env=spark.environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    early = {
        name: section["errors"]
        for name, section in document["sections"].items()
        if any("ended early" in text for text in section["errors"].values())
    }
    assert early == {}


def test_the_guard_of_that_test_sees_a_write(tmp_path: Path):
    guard = _GUARD.replace("{programs!r}", "[]")
    for statement, status in (
        (f"open({str(tmp_path / 'x')!r}, 'w')", 77),
        (f"os.mkdir({str(tmp_path / 'y')!r})", 78),
        ("import subprocess; subprocess.run(['touch', 'z'])", 79),
    ):
        done = subprocess.run([sys.executable, "-c", guard + statement], check=False)
        assert done.returncode == status


def test_the_table_of_programs_holds_only_commands_that_read():
    assert {command[0] for command in COMMANDS} == READ_ONLY
    verbs = {word for command in COMMANDS for word in command[1:]}
    assert not verbs & {
        "start", "stop", "restart", "enable", "set-default", "set-ntp", "rm", "run", "pull", "add",
        "delete", "flush", "set-feature", "up", "down", "reset", "-A", "-D", "-F", "-c",
    }  # fmt: skip


@pytest.mark.parametrize(
    "argv",
    [
        ("docker", "run", "x"), ("systemctl", "stop", "x"), ("rm", "-rf", "/"), ("ip", "link"),
        ("nvidia-smi", "--gpu-reset"), ("nvidia-smi", "--query-gpux"), ("docker",),
        ("nft", "-f", "x"),
    ],
)  # fmt: skip
def test_other_programs_are_refused(argv: tuple[str, ...]):
    with pytest.raises(ProbeError, match="not a command of the probe"):
        Machine().run(*argv)


def test_an_error_in_a_section_stays_there():
    def broken(_machine: Machine, _request: object, facts: Facts) -> None:
        facts.put("first", lambda: 1)
        facts.put("second", lambda: 1 / 0)
        facts.put("third", lambda: object())
        raise RuntimeError("x")

    def dies(_machine: Machine, _request: object, facts: Facts) -> None:
        facts.put("it", lambda: os._exit(3))

    document = answer(Machine(), {"node": "a"}, [("one", broken, 5.0), ("two", dies, 5.0)], 10.0)
    one = document["sections"]["one"]
    assert one["first"] == 1
    assert one["errors"]["second"].startswith("ZeroDivisionError")
    assert one["errors"]["third"].startswith("TypeError")
    assert one["errors"]["*"] == "RuntimeError: x"
    assert document["sections"]["two"]["errors"] == {"it": "the section ended early"}


def test_no_secret_of_a_network_file_leaves_the_node(spark: FakeSpark):
    secret = "hunter2-psk"
    spark.file("/etc/netplan/50-wifi.yaml", f"wifis:\n  enP9s9:\n    password: {secret}\n")
    spark.file(
        "/etc/NetworkManager/system-connections/home.nmconnection",
        f"[connection]\ninterface-name=enp1s0f0np0\n[wifi-security]\npsk={secret}\n",
    )
    text = run_probe(spark)
    assert secret not in text
    managers = read_document(text, "spark2").section("managers")
    assert managers.at("networkmanager_files", 0, "netdevs").texts() == ["enp1s0f0np0"]


def test_only_nfs_volumes_are_told(spark: FakeSpark):
    spark.docker()
    spark.says("weights\nshare\n", "docker", "volume", "ls", "-q")
    volumes = [
        {"Name": "weights", "Options": {"type": "nfs", "device": ":/export", "o": "addr=10.0.0.1"}},
        {"Name": "share", "Options": {"type": "cifs", "o": "password=hunter2"}},
    ]
    spark.says(
        "\n".join(map(json.dumps, volumes)),
        "docker", "volume", "inspect", "--format", "{{json .}}", "weights", "share",
    )  # fmt: skip
    text = run_probe(spark)
    assert "hunter2" not in text
    found = read_document(text, "spark2").section("containers").at("volumes")
    assert found.data == [{"name": "weights", "device": ":/export", "options": "addr=10.0.0.1"}]


def test_who_listens_is_found_through_proc(spark: FakeSpark):
    spark.file(
        "/proc/net/tcp",
        "  sl  local_address\n"
        "   0: 0B01A8C0:22B8 00000000:0000 0A 0:0 0:0 0 0 0 4711 1\n"
        "   1: 0B01A8C0:22B8 0C01A8C0:9999 01 0:0 0:0 0 0 0 4712 1\n",
    )
    spark.file(
        "/proc/net/tcp6",
        "  sl\n   0: 00000000000000000000000000000000:4E20 0:0 0A 0 0 0 0 0 4713 1\n",
    )
    spark.file("/proc/42/comm", "python3\n")
    spark.file("/proc/42/cgroup", "0::/system.slice/other.service\n")
    spark.link("/proc/42/fd/3", "socket:[4711]")
    listening = read_document(run_probe(spark), "spark2").section("ports").at("listening").data
    assert sorted(listening, key=lambda entry: entry["port"]) == [
        {
            "port": 8888,
            "address": "192.168.1.11",
            "process": {"pid": 42, "name": "python3", "unit": "other.service"},
        },
        {"port": 20000, "address": "::", "process": None},
    ]


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (fatbin(90, 121), [90, 121]),
        (fatbin(120) + fatbin(80), [80, 120]),
        (b"\x7fELF no device code", []),
        (b"", []),
        (fatbin(121)[:-20], [121]),
        (b"\x50\xed\x55\xba", []),
    ],
)
def test_architectures_of_device_code(tmp_path: Path, raw: bytes, found: list[int]):
    library = tmp_path / "x.so"
    library.write_bytes(raw)
    assert engine.fatbin_architectures(str(library)) == found


def test_architectures_of_a_library_of_nvcc(tmp_path: Path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on this machine")
    source = tmp_path / "a.cu"
    source.write_text("__global__ void f(float *x) { x[0] = 1; }\n")
    command = [nvcc, "-shared", "-Xcompiler", "-fPIC", "-o", str(tmp_path / "a.so"), str(source)]
    command += [
        "-gencode",
        "arch=compute_90,code=sm_90",
        "-gencode",
        "arch=compute_121,code=sm_121",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"nvcc cannot compile for sm_121 here: {done.stderr[-200:]}")
    assert engine.fatbin_architectures(str(tmp_path / "a.so")) == [90, 121]


@pytest.mark.parametrize(
    ("start", "image"),
    [
        ("docker run --rm r.example:5000/a/b:1@sha256:" + "a" * 64 + " python3",
         "r.example:5000/a/b:1@sha256:" + "a" * 64),
        ("podman run sha256:" + "b" * 64 + " python3", "sha256:" + "b" * 64),
        ("docker run sglang:latest python3", None),
        ("docker run x@sha256:" + "a" * 63, None),
    ],
)  # fmt: skip
def test_the_image_of_a_unit(spark: FakeSpark, start: str, image: str | None):
    spark.says(
        f"LoadState=loaded\nActiveState=inactive\nExecStart={{ argv[]={start} ; }}\n",
        "systemctl", "show", f"--property={spark.unit_properties}", "--", "spark-engine.service",
    )  # fmt: skip
    unit = read_document(run_probe(spark), "spark2").section("engine").at("unit")
    assert unit.at("image").optional() == image


def test_a_plan_is_the_same_in_any_writing(spark: FakeSpark):
    text = lockfile.dump_own(spark.plan, "spark2")
    spark.file("/etc/spark/plan.json", json.dumps(json.loads(text), indent=7))
    files = read_document(run_probe(spark), "spark2").section("files")
    assert files.at("/etc/spark/plan.json", "canonical_sha256").text() == lockfile.own_sha256(
        spark.plan, "spark2"
    )


def test_an_engine_that_cannot_be_seen_is_not_judged(spark: FakeSpark):
    """With docker's newer image store the layers have no known place."""
    spark.docker()
    spark.says("null", "docker", "image", "inspect", "--format", "{{json .GraphDriver}}", IMAGE)
    engine_section = read_document(run_probe(spark), "spark2").section("engine")
    assert not engine_section.at("nccl").present
    assert "without starting it" in engine_section.at("errors", "nccl").text()
