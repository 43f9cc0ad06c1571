from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from dgxos_plans import DIGEST, EXAMPLES, dgx_plan, example, node_of
from systemd_here import known_here

from spark_appliance import lockfile, node_zipapp
from spark_appliance.dgxos.compare import expected_units, split_words, written_units
from spark_appliance.dgxos.files import HEADER, NodeFile
from spark_appliance.dgxos.render import ROUTER_PYTHON, actions, bundle, node_files, watches
from spark_appliance.errors import InputError
from spark_appliance.model.plan import NodePlan, Plan
from spark_appliance.model.yamlfile import parse
from spark_appliance.node.generations.bundle import read_bundle
from spark_appliance.render.units import KEY_IN_LOG

PROGRAM = b"program"
PLACEHOLDERS = {
    "@spark-node@": "/usr/local/sbin/spark-node",
    "@image@": f"registry.lan/spark-engine@{DIGEST}",
    "@container-runtime@": "/usr/bin/docker",
    "@router-python@": ROUTER_PYTHON,
}


def files_of(plan: Plan, node: NodePlan) -> dict[str, NodeFile]:
    return {file.path: file for file in node_files(plan, node, PROGRAM)}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.parent.name)
def test_the_written_units_are_the_plan_s_units(path: Path) -> None:
    plan = dgx_plan(path)
    for node in plan.nodes:
        written = written_units(node_files(plan, node, PROGRAM))
        extra = {"spark-recover.service", "spark-firewall.service"}
        assert {name: unit for name, unit in written.items() if name not in extra} == (
            expected_units(node, PLACEHOLDERS)
        )
        assert set(written) - extra == {
            unit.name for unit in node.units if unit.type not in ("mount", "system")
        }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.parent.name)
def test_every_mount_system_unit_export_rail_and_sysctl_of_the_plan_is_written(path: Path) -> None:
    plan = dgx_plan(path)
    for node in plan.nodes:
        files = files_of(plan, node)
        for unit in node.units:
            base = f"/etc/systemd/system/{unit.name}"
            if unit.type == "mount":
                assert files[base].text.count("[Mount]") == 1
            if unit.type == "system":
                assert f"After={' '.join(unit.after)}" in files[f"{base}.d/50-spark.conf"].text
        for rail in node.rails:
            network = files[f"/etc/systemd/network/05-spark-{rail.netdev}.network"].text
            assert f"Address={rail.address}\n" in network
            assert f"MTUBytes={rail.mtu}\n" in network
            link = files[f"/etc/systemd/network/05-spark-{rail.netdev}.link"].text
            assert f"Path=pci-{rail.pci} " in link
        settings = files["/etc/sysctl.d/60-spark.conf"].text.removeprefix(HEADER)
        assert dict(line.split(" = ") for line in settings.splitlines()) == node.sysctl
        if node.weights.export is not None:
            exports = files["/etc/exports.d/spark.exports"].text.splitlines()[1]
            assert exports.split()[0] == node.weights.export.path
            hosts = [word.partition("(")[0] for word in exports.split()[1:]]
            assert hosts == node.weights.export.clients
        else:
            assert "/etc/exports.d/spark.exports" not in files
        assert json.loads(files["/etc/spark/plan.json"].text) == json.loads(
            lockfile.dump_own(plan, node.name)
        )


def test_a_change_of_one_node_writes_nothing_new_on_the_others() -> None:
    path = example("three-spark-triangle")
    nodes = parse(str(path), path.read_bytes()).data["nodes"]
    for node in nodes:
        node["system"] = "dgx-os"
    nodes[1]["engram"] = {"device": "/dev/disk/by-id/nvme-new"}
    plan = dgx_plan(path)
    newer = dgx_plan(path, nodes=nodes)
    assert newer.source != plan.source
    same = [
        node_files(plan, old, PROGRAM) == node_files(newer, new, PROGRAM)
        for old, new in zip(plan.nodes, newer.nodes, strict=True)
    ]
    assert same == [True, False, True]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.parent.name)
def test_files_are_plain_unique_owned_by_root_and_byte_stable(path: Path) -> None:
    plan = dgx_plan(path)
    for node in plan.nodes:
        files = node_files(plan, node, PROGRAM)
        assert len({file.path for file in files}) == len(files)
        assert {(file.owner, file.group) for file in files} == {("root", "root")}
        assert all(file.mode in (0o644, 0o755) for file in files if file.kind == "file")
        assert files == node_files(plan, node, PROGRAM)
        # what brings a node back is written before anything else changes
        assert files[0].path == "/etc/systemd/system/spark-recover.service"


def test_the_exact_network_files_of_a_rail() -> None:
    plan = dgx_plan(example("three-spark-triangle"))
    files = files_of(plan, plan.nodes[0])
    base = "/etc/systemd/network/05-spark-enp1s0f0np0"
    assert files[f"{base}.link"].text == (
        HEADER + "[Match]\nPath=pci-0000:01:00.0 platform-*-pci-0000:01:00.0\n\n"
        "[Link]\nName=enp1s0f0np0\nMTUBytes=9000\n"
    )
    assert files[f"{base}.network"].text == (
        HEADER + "[Match]\nName=enp1s0f0np0\n\n"
        "[Link]\nMTUBytes=9000\nRequiredForOnline=no\n\n"
        "[Network]\nAddress=10.77.112.1/24\nDHCP=no\nIPv6AcceptRA=no\n"
        "LinkLocalAddressing=no\nConfigureWithoutCarrier=yes\nIgnoreCarrierLoss=yes\n"
    )
    assert files["/etc/NetworkManager/conf.d/50-spark.conf"].text == (
        HEADER + "[keyfile]\nunmanaged-devices+=interface-name:enp1s0f0np0;"
        "interface-name:enP2p1s0f0np0;interface-name:enp1s0f1np1;interface-name:enP2p1s0f1np1\n"
    )


def test_the_exact_mount_of_a_worker() -> None:
    plan = dgx_plan(example("three-spark-triangle"))
    files = files_of(plan, plan.nodes[1])
    base = "/etc/systemd/system/models-DeepSeek\\x2dV4.1\\x2dFlash"
    assert files[f"{base}.mount"].text == (
        HEADER + "[Unit]\nDescription=Checkpoint of the head\nAfter=spark-fabric.service\n"
        "Requires=spark-fabric.service\n\n"
        "[Mount]\nWhat=10.77.112.1:/\nWhere=/models/DeepSeek-V4.1-Flash\nType=nfs4\n"
        "Options=ro,vers=4.2,rsize=1048576,wsize=1048576,hard,timeo=600,noatime,_netdev,nofail,"
        "proto=tcp,nconnect=8\nTimeoutSec=90\n"
    )
    wants = "/etc/systemd/system/multi-user.target.wants/models-DeepSeek\\x2dV4.1\\x2dFlash"
    link = files[f"{wants}.automount"]
    assert (link.kind, link.text) == (
        "link",
        "../models-DeepSeek\\x2dV4.1\\x2dFlash.automount",
    )


def test_only_the_head_shares_and_only_to_the_plan_s_addresses() -> None:
    plan = dgx_plan(example("three-spark-triangle"))
    head = files_of(plan, plan.nodes[0])
    options = "(ro,sync,no_subtree_check,root_squash,fsid=0)"
    clients = ["10.77.112.2", "10.77.113.3", "10.77.212.2", "10.77.213.3"]
    assert head["/etc/exports.d/spark.exports"].text == (
        HEADER
        + "/models/DeepSeek-V4.1-Flash "
        + " ".join(f"{client}{options}" for client in clients)
        + "\n"
    )
    assert head["/etc/nfs.conf.d/spark.conf"].text == (
        HEADER + "[nfsd]\nthreads=32\nvers3=n\nvers4.0=n\nvers4.1=n\nvers4.2=y\n"
    )


def test_the_queue_of_nvme_disks_is_set_where_rows_are_packed() -> None:
    plan = dgx_plan(example("three-spark-triangle"))
    files = files_of(plan, plan.nodes[0])
    assert files["/etc/udev/rules.d/60-spark-nvme.rules"].text == (
        HEADER + 'ACTION=="add|change", SUBSYSTEM=="block", ENV{DEVTYPE}=="disk", '
        'KERNEL=="nvme*n*", ATTR{queue/scheduler}="none", ATTR{queue/read_ahead_kb}="128"\n'
    )
    single = dgx_plan(example("single-spark"))
    assert "/etc/udev/rules.d/60-spark-nvme.rules" not in files_of(single, single.nodes[0])


def test_strangers_are_kept_from_the_cluster_s_own_ports() -> None:
    plan = dgx_plan(example("three-spark-triangle"))
    rules = [files_of(plan, node)["/etc/spark/firewall.nft"].text for node in plan.nodes]
    assert "tcp dport { 2049, 20000, 20010, 20049 } drop" in rules[0]
    # ranks above 0 listen on the API's port without a key
    assert "tcp dport { 2049, 8888, 20000, 20010, 20049 } drop" in rules[1]
    assert "ip saddr { 192.168.1.12, 192.168.1.13 } accept" in rules[0]
    single = dgx_plan(example("single-spark"))
    assert "/etc/spark/firewall.nft" not in files_of(single, single.nodes[0])


def test_a_node_without_an_image_cannot_be_installed() -> None:
    plan = dgx_plan(example("single-spark")).model_copy(update={"image": None})
    with pytest.raises(InputError, match=r"image: \{reference, digest\}"):
        node_files(plan, plan.nodes[0], PROGRAM)


def test_a_nixos_node_is_not_ours() -> None:
    plan = lockfile.load(example("three-spark-triangle").with_name("cluster.lock.json"))
    with pytest.raises(InputError, match="spark-appliance build"):
        node_files(plan, plan.nodes[0], PROGRAM)


def test_only_the_path_of_the_key_is_written() -> None:
    plan = dgx_plan(example("three-spark-triangle"))
    lines = [
        line
        for node in plan.nodes
        for file in node_files(plan, node, PROGRAM)
        if file.kind == "file" and file.path != "/etc/spark/plan.json"
        for line in file.text.splitlines()
        if "key" in line and "keyfile" not in line
    ]
    assert set(lines) == {
        "LoadCredential=api-key:/etc/spark/api-key",
        f"LogFilterPatterns={KEY_IN_LOG}",
    }


def test_the_bundle_reads_back_as_the_same_files() -> None:
    plan = dgx_plan(example("four-spark-switch"))
    node = node_of(plan, "spark2")
    program = node_zipapp.build()
    data = bundle(plan, node, program)
    read = read_bundle(json.dumps(data))
    files = node_files(plan, node, program)
    assert [e.path for e in read.manifest.entries] == [f.path for f in files]
    assert all(
        read.contents[entry.sha256] == file.content
        for entry, file in zip(read.manifest.entries, files, strict=True)
    )
    assert [a.argv for a in read.manifest.actions] == [a.argv for a in actions(node)]
    assert read.manifest.watches == tuple(watches(node))


def test_words_survive_systemd_s_quoting() -> None:
    assert split_words('"a b" c%%d "$$HOME"') == ["a b", "c%d", "$HOME"]


def test_systemd_accepts_every_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    for name in ("three-spark-triangle", "four-spark-ring"):
        plan = dgx_plan(example(name))
        for node in plan.nodes[:2]:
            root = tmp_path / name / node.name
            paths = []
            for file in node_files(plan, node, PROGRAM):
                if file.kind == "link" or not file.path.startswith("/etc/systemd/system/"):
                    continue
                if "/" in file.path.removeprefix("/etc/systemd/system/"):
                    continue
                # the programs of the node are not here: /bin/true stands for them
                text = file.text.replace("/usr/local/sbin/spark-node", "/bin/true")
                for program in ("/usr/bin/docker", "/usr/sbin/nft", "/usr/bin/env"):
                    text = text.replace(program, "/bin/true")
                path = root / file.path.rsplit("/", 1)[1]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(known_here(text))
                paths.append(str(path))
            done = subprocess.run(
                ["systemd-analyze", "verify", "--man=no", "--recursive-errors=one", *paths],
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
            complaints = [
                line for line in done.stderr.splitlines() if str(root) in line or "spark" in line
            ]
            assert complaints == []


def test_nft_accepts_the_firewall(tmp_path: Path) -> None:
    nft = shutil.which("nft", path="/usr/sbin:/usr/bin:/sbin")
    if nft is None:
        pytest.skip("needs nft (package nftables)")
    plan = dgx_plan(example("three-spark-triangle"))
    path = tmp_path / "firewall.nft"
    path.write_text(files_of(plan, plan.nodes[0])["/etc/spark/firewall.nft"].text)
    done = subprocess.run(
        [nft, "--check", "--file", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    if "Operation not permitted" in done.stderr:
        pytest.skip("nft may not use netlink here")
    assert done.returncode == 0, done.stderr
