"""The table of units, as systemd itself reads it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from systemd_here import known_here

from spark_appliance.errors import OperationError
from spark_appliance.fleet.redact import redact
from spark_appliance.model.plan import NodePlan, UnitPlan
from spark_appliance.node import cli
from spark_appliance.node.errors import PlanError
from spark_appliance.render.units import KEY_IN_LOG
from spark_appliance.unitfile import command_line, unit_text

from .conftest import rendered

PATHS = {
    "@spark-node@": "/bin/true",
    "@python@": "/bin/true",
    "@spark-engram@": "/bin/true",
    "@container-runtime@": "/bin/true",
    "@image@": "engine@sha256:00",
}

TWO = """
version: 1
name: home
profile: stable-tp3
topology: {kind: triangle}
model: {path: "/home/me/my~models,v=4+home"}
api: {key_file: "/home/me/the+key"}
nodes:
  - {name: a, address: 192.168.1.1, system: nixos, engram: {directory: "/home/me/eng-ram"}}
  - {name: b, address: 192.168.1.2, system: nixos, engram: {directory: "/home/me/eng-ram"}}
  - {name: c, address: 192.168.1.3, system: dgx-os, engram: {directory: "/home/me/eng-ram"}}
"""


def nodes(plan: dict[str, Any]) -> list[NodePlan]:
    return [NodePlan.model_validate(node) for node in plan["nodes"]]


@pytest.fixture(params=["nixos", "dgx", "odd"])
def plan_of(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    if request.param == "odd":
        return rendered(tmp_path, TWO)
    plan: dict[str, Any] = request.getfixturevalue(f"{request.param}_plan")
    return plan


def services(node: NodePlan) -> list[UnitPlan]:
    return [unit for unit in node.units if unit.type not in ("mount", "system")]


def test_systemd_accepts_every_unit(plan_of: dict[str, Any], tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed (package systemd)")
    for node in nodes(plan_of):
        folder = tmp_path / node.name
        folder.mkdir()
        for unit in services(node):
            (folder / unit.name).write_text(known_here(unit_text(unit, PATHS)))
        for unit in node.units:
            if unit.type == "mount" and node.weights.mount is not None:
                where = node.weights.mount.where
                text = f"[Mount]\nWhat=x:/\nWhere={where.replace('%', '%%')}\nType=nfs4\n"
                (folder / unit.name).write_text(text)
        done = subprocess.run(
            [analyze, "verify", "--man=no", "--recursive-errors=no"]
            + [str(folder / unit.name) for unit in services(node)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        ours = [line for line in done.stderr.splitlines() if "spark" in line]
        assert (done.returncode, ours) == (0, [])


@pytest.mark.parametrize(
    ("line", "dropped"),
    [
        # as sglang 0.5.23 prints its resolved arguments, and its router its own
        ("server_args={'model_path': '/models/x', 'api_key': 'k-1', 'tp_size': 3}", True),
        ("ServerArgs(host='0.0.0.0', api_key=\"k'1\")", True),
        ("server_args={'api_key': None, 'admin_api_key': 'k-2'}", True),
        ('RouterConfig { api_key: Some("k-1"), port: 30000 }', True),
        ("api_key = 'k-1'", True),
        ('"api_key":  "k-1"', True),
        ("argv: ['--api-key', 'k-1']", True),
        ('RouterConfig { api_keys: ["k-1"], port: 30000 }', True),
        ('RouterConfig { api_keys: Some(["k-1"]), port: 30000 }', True),
        ("apikey='k-1'", True),
        ("{'api_key': 'it\\'s\"k-1'}", True),
        ("server_args={'model_path': '/models/x', 'api_key': None}", False),
        ("argv: ['--api-key', None]", False),
        ("RouterConfig { api_key: None, port: 30000 }", False),
        ("Load weight begin. avail mem=106.31 GB", False),
        ("the API key is read from /run/credentials/spark-engine.service/api-key", False),
    ],
)
def test_the_key_does_not_reach_the_journal(line: str, *, dropped: bool) -> None:
    assert KEY_IN_LOG.startswith("~")
    assert "\\" not in KEY_IN_LOG
    assert bool(re.search(KEY_IN_LOG[1:], line)) == dropped
    # what an older systemd keeps, the fleet's commands take out
    secrets = re.findall(r"k-[12]|k'1", line)
    assert bool(secrets) == dropped
    clean = redact(line)
    assert not [secret for secret in secrets if secret in clean]
    assert dropped or clean == line


def test_who_gets_the_key_filters_its_log(plan_of: dict[str, Any]) -> None:
    for node in nodes(plan_of):
        for unit in services(node):
            filtered = unit.settings.get("LogFilterPatterns") == KEY_IN_LOG
            assert filtered == ("LoadCredential" in unit.settings), unit.name


def test_spark_node_understands_its_own_command_lines(plan_of: dict[str, Any]) -> None:
    parser = cli._parser()
    seen = set()
    for node in nodes(plan_of):
        for unit in node.units:
            for argv in [*unit.exec_start_pre, unit.exec_start, *unit.exec_stop_post]:
                if argv and argv[0].lstrip("+-") == "@spark-node@":
                    arguments = parser.parse_args(argv[1:])
                    assert arguments.node == node.name
                    assert arguments.plan == "/etc/spark/plan.json"
                    seen.add(argv[5])
    assert {"fabric", "guard", "prepare", "exec", "ready", "supervise"} <= seen


def test_placeholders_fit_the_system(plan_of: dict[str, Any]) -> None:
    for node in nodes(plan_of):
        words = {
            word.lstrip("+-")
            for unit in node.units
            for argv in [*unit.exec_start_pre, unit.exec_start, *unit.exec_stop_post]
            for word in argv
            if "@" in word
        }
        engine = {"@python@", "@spark-engram@"}
        container = {"@container-runtime@", "@image@"}
        assert words == {"@spark-node@"} | (engine if node.system == "nixos" else container)


def test_order_and_who_starts_what(plan_of: dict[str, Any]) -> None:
    for node in nodes(plan_of):
        names = [unit.name for unit in node.units]
        assert names[-1] == "spark.target"
        for position, unit in enumerate(node.units[:-1]):
            earlier = {*names[:position], "network-online.target"}
            assert {*unit.after, *unit.requires} <= earlier
        target = node.units[-1]
        assert target.wanted_by == ["multi-user.target"]
        assert target.wants == [u.name for u in node.units if u.started_by == "target"]
        by_name = {unit.name: unit for unit in node.units}
        assert by_name["spark-engine.service"].wants == ["spark-guard.service"]
        assert "spark-guard.service" not in by_name["spark-engine.service"].requires
        assert "spark-guard.service" in by_name["spark-engine.service"].after
        assert by_name["spark-supervisor.service"].requires == []
        assert by_name["spark-engine.service"].settings["Restart"] == "no"
        assert by_name["spark-supervisor.service"].settings["KillMode"] == "mixed"
        assert ("spark-ready.service" in by_name) == (node.rank == 0)
        for unit in node.units:
            assert unit.part_of == ([] if unit.started_by == "boot" else ["spark.target"])


def test_secrets_come_as_credentials_only(nixos_plan: dict[str, Any]) -> None:
    for node in nodes(nixos_plan):
        for unit in services(node):
            wants_key = node.rank == 0 and unit.name in (
                "spark-engine.service",
                "spark-ready.service",
            )
            expected = "api-key:/etc/spark/api-key" if wants_key else None
            assert unit.settings.get("LoadCredential") == expected


def test_every_service_drops_rights(plan_of: dict[str, Any]) -> None:
    for node in nodes(plan_of):
        for unit in services(node):
            client = node.system == "dgx-os" and unit.name in (
                "spark-engine.service",
                "spark-engram-pack.service",
            )
            if unit.type == "target" or client:
                continue
            assert unit.settings["NoNewPrivileges"] == "yes"
            assert unit.settings["ProtectSystem"] == "strict"
            assert unit.settings["CapabilityBoundingSet"] in ("", "CAP_NET_RAW", "CAP_DAC_OVERRIDE")


def test_the_guard_can_write_where_it_must(nixos_plan: dict[str, Any]) -> None:
    guard = next(u for u in nodes(nixos_plan)[0].units if u.name == "spark-guard.service")
    assert "ProtectControlGroups" not in guard.settings
    assert "ProtectKernelTunables" not in guard.settings


def test_the_engine_of_nixos_has_what_cuda_and_rdma_need(nixos_plan: dict[str, Any]) -> None:
    engine = next(u for u in nodes(nixos_plan)[0].units if u.name == "spark-engine.service")
    settings = engine.settings
    assert settings["User"] == "spark"
    assert settings["LimitMEMLOCK"] == "infinity"
    assert settings["DeviceAllow"] == [
        *["char-nvidia* rw", "char-infiniband* rw", "/dev/infiniband/rdma_cm rw"]
    ]
    forbidden = {"PrivateDevices", "MemoryDenyWriteExecute", "PrivateUsers", "PrivateNetwork"}
    assert not forbidden & set(settings)


def test_text_is_exact(nixos_plan: dict[str, Any]) -> None:
    unit = next(u for u in nodes(nixos_plan)[0].units if u.name == "spark.target")
    assert unit_text(unit, PATHS) == (
        "[Unit]\n"
        "Description=One endpoint out of several Sparks: this node's part\n"
        "Wants=spark-fabric.service spark-engram-pack.service spark-guard.service "
        "spark-supervisor.service\n"
        "\n[Install]\n"
        "WantedBy=multi-user.target\n"
    )


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("plain", "plain"),
        ("a b", '"a b"'),
        ("100%", "100%%"),
        ("$HOME", "$$HOME"),
        ('say "x"', '"say \\"x\\""'),
        ("back\\slash", '"back\\\\slash"'),
        ("", '""'),
        (";", '";"'),
        ("+@spark-node@", "+/bin/true"),
    ],
)
def test_words_arrive_as_they_are(word: str, written: str) -> None:
    assert command_line([word], PATHS) == written


def test_what_cannot_be_written(nixos_plan: dict[str, Any]) -> None:
    node = nodes(nixos_plan)[1]
    mount = next(unit for unit in node.units if unit.type == "mount")
    with pytest.raises(OperationError, match=re.escape(mount.name)):
        unit_text(mount, PATHS)
    with pytest.raises(OperationError, match="no path is known for @python@"):
        command_line(["@python@"], {})
    assert issubclass(PlanError, Exception)
