"""The plan and the NixOS configuration made of it say the same, for every example."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from nixplans import EXAMPLES, nixos_plan
from nixtool import Nix
from nixunits import sections, words

from spark_appliance.node.projection import node_plan

pytestmark = pytest.mark.nix


def nodes(fleet: tuple[str, Any, Any]) -> list[tuple[Any, Any]]:
    _, plan, hosts = fleet
    assert [node["name"] for node in plan["nodes"]] == sorted(hosts)
    return [(node, hosts[node["name"]]) for node in plan["nodes"]]


def as_list(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value]


def test_units_are_the_plans_units(fleet: tuple[str, Any, Any]) -> None:
    for node, host in nodes(fleet):
        ours = {unit["name"] for unit in node["units"]}
        made = {name for name in host["units"] if name.startswith("spark")}
        assert made - {"spark-authorized-keys.service"} == {
            name for name in ours if name.startswith("spark")
        }
        for unit in node["units"]:
            text = sections(host["units"][unit["name"]]["text"])
            for key, field in [
                ("After", "after"),
                ("Requires", "requires"),
                ("Wants", "wants"),
                ("PartOf", "part_of"),
                ("Conflicts", "conflicts"),
            ]:
                found = " ".join(text["Unit"].get(key, [])).split()
                if unit["type"] == "system":  # the system's own unit, plus our order
                    assert set(unit[field]) <= set(found) or not unit[field]
                else:
                    assert found == unit[field], (unit["name"], key)
            if unit["type"] in ("target", "mount", "system"):
                continue
            service = text["Service"]
            assert text["Unit"]["Description"] == [unit["description"]]
            for key, value in unit["unit_settings"].items():
                assert text["Unit"][key] == [value]
            assert service["Type"] == [unit["type"]]
            for key, value in unit["settings"].items():
                assert service[key] == as_list(value), (unit["name"], key)
            assert [words(line) for line in service["ExecStart"]] == [unit["exec_start"]]
            assert [words(line) for line in service["ExecStartPre"]] == unit["exec_start_pre"]
            assert [words(line) for line in service["ExecStopPost"]] == unit["exec_stop_post"]


def test_a_rebuild_restarts_nothing_of_the_cluster(fleet: tuple[str, Any, Any]) -> None:
    for node, host in nodes(fleet):
        for unit in node["units"]:
            if unit["type"] in ("oneshot", "notify", "exec"):
                text = host["units"][unit["name"]]["text"]
                assert "X-RestartIfChanged=false\n" in text
                assert "X-StopIfChanged=false\n" in text


def test_target_is_started_at_boot(fleet: tuple[str, Any, Any]) -> None:
    for node, host in nodes(fleet):
        target = next(unit for unit in node["units"] if unit["name"] == "spark.target")
        assert host["units"]["spark.target"]["wantedBy"] == target["wanted_by"]


def test_rails_are_links_and_networks(fleet: tuple[str, Any, Any]) -> None:
    for node, host in nodes(fleet):
        assert set(host["links"]) == {f"10-spark-{rail['netdev']}" for rail in node["rails"]}
        for rail in node["rails"]:
            link = host["links"][f"10-spark-{rail['netdev']}"]
            path = f"pci-{rail['pci']} platform-*-pci-{rail['pci']}"
            assert link["matchConfig"] == {"Path": path}
            assert link["linkConfig"] == {"MTUBytes": str(rail["mtu"]), "Name": rail["netdev"]}
            network = sections(host["network"][f"10-spark-{rail['netdev']}.network"])
            assert network["Match"] == {"Name": [rail["netdev"]]}
            assert network["Network"]["Address"] == [rail["address"]]
            assert network["Network"]["LinkLocalAddressing"] == ["no"]
            assert network["Network"]["DHCP"] == ["no"]
            assert network["Network"]["ConfigureWithoutCarrier"] == ["true"]
            assert network["Link"] == {
                "MTUBytes": [str(rail["mtu"])],
                "RequiredForOnline": ["no"],
            }


def test_firewall_trusts_the_rails_and_nothing_else(fleet: tuple[str, Any, Any]) -> None:
    _, whole, _ = fleet
    for node, host in nodes(fleet):
        firewall = host["firewall"]
        plan = node["firewall"]
        assert firewall["enable"] is True
        assert sorted(firewall["trustedInterfaces"]) == sorted(["lo", *plan["trusted_interfaces"]])
        ports = {22} | ({plan["api_port"]} if plan["api_port"] else set())
        if whole["router"] is not None and node["rank"] == 0:
            ports.add(whole["router"]["port"])
        assert set(firewall["allowedTCPPorts"]) == ports
        addresses = set(re.findall(r"[0-9.]{7,}", firewall["extraInputRules"]))
        assert addresses == set(plan["peer_addresses"])
        loose = any(
            value == "2" for key, value in node["sysctl"].items() if key.endswith("rp_filter")
        )
        assert firewall["checkReversePath"] == ("loose" if loose else True)


def test_kernel_settings(fleet: tuple[str, Any, Any]) -> None:
    for node, host in nodes(fleet):
        assert node["sysctl"].items() <= host["sysctl"].items()
        assert set(node["kernel_modules"]) <= set(host["kernelModules"])
        # the engine may not load modules itself, and CUDA needs this one (docs/node.md)
        assert "nvidia_uvm" in host["kernelModules"]
        # the firmware hangs near 209 MB of kernel and initrd
        assert not set(node["kernel_modules"]) & set(host["initrdModules"])
        assert {"kho=off", "transparent_hugepage=never", "cppc_cpufreq.auto_sel_mode=1"} <= set(
            host["kernelParams"]
        )
        assert host["swap"] == []
        assert host["defaultUnit"] == "multi-user.target"
        assert host["watchdog"]["RuntimeWatchdogSec"] == "30s"
        assert host["driver"].startswith("580.")
        assert host["openModules"] is True


def test_export_allows_exactly_the_plans_clients(fleet: tuple[str, Any, Any]) -> None:
    _, plan, _ = fleet
    for node, host in nodes(fleet):
        export = node["weights"]["export"]
        assert host["nfsServer"] is (export is not None)
        if export is None:
            assert host["exports"] == ""
            continue
        options = ",".join(export["options"])
        clients = " ".join(f"{client}({options})" for client in export["clients"])
        assert host["exports"] == f"{export['path']} {clients}\n"
        assert host["nfs"]["nfsd"]["vers4.2"] is True
        assert host["nfs"]["nfsd"]["vers3"] is False
        assert plan["model"]["path"] == export["path"]


def test_mounts_are_the_plans_and_never_hold_up_the_boot(fleet: tuple[str, Any, Any]) -> None:
    for node, host in nodes(fleet):
        mount = node["weights"]["mount"]
        if mount is not None:
            unit = sections(host["units"][mount["unit"]]["text"])
            assert unit["Mount"]["What"] == [mount["what"]]
            assert unit["Mount"]["Where"] == [mount["where"]]
            assert unit["Mount"]["Type"] == [mount["type"]]
            assert unit["Mount"]["Options"] == [",".join(mount["options"])]
            assert host["units"][mount["unit"]]["wantedBy"] == []
            automount = host["units"][mount["unit"].replace(".mount", ".automount")]
            assert automount["wantedBy"] == ["multi-user.target"]
            assert host["nfs"]["nfsrahead"] == {"default": 16384}
        else:
            assert "nfsrahead" not in host["nfs"]
        engram = node["engram"]
        if engram is not None and engram["mount_unit"] is not None:
            unit = sections(host["units"][engram["mount_unit"]]["text"])
            assert unit["Mount"]["What"] == [engram["device"]]
            assert unit["Mount"]["Where"] == [engram["directory"]]
            assert "nofail" in unit["Mount"]["Options"][0].split(",")


def test_the_node_s_own_plan_lies_on_the_node(fleet: tuple[str, Any, Any]) -> None:
    _, plan, hosts = fleet
    for name, host in hosts.items():
        assert host["plan"] == node_plan(plan, name)


def test_the_machine_is_sealed(fleet: tuple[str, Any, Any]) -> None:
    for node, host in nodes(fleet):
        assert host["hostName"] == node["name"]
        assert host["substituters"] == []
        assert host["podman"] is False
        assert host["dashboard"] is False
        assert host["user"] == {"isSystemUser": True, "group": "spark"}
        assert host["sshd"] == {"MemoryMin": "64M", "OOMScoreAdjust": -1000}
        assert host["warnings"] == []


def test_a_key_reaches_the_unit_only_as_a_credential(nix: Nix) -> None:
    example = EXAMPLES / "three-spark-triangle"

    def with_key(data: Any) -> None:
        data.setdefault("api", {})["key_file"] = "/etc/spark/api-key"

    folder = nix.source.parent / "plans" / "with-key"
    folder.mkdir(parents=True, exist_ok=True)
    text = nixos_plan(example, with_key)
    (folder / "cluster.lock.json").write_text(text, encoding="utf-8")
    hosts = nix.evaluate("hosts.nix", {"lock": nix.inside(folder / "cluster.lock.json")})
    plan = json.loads(text)
    for node in plan["nodes"]:
        host = hosts[node["name"]]
        service = sections(host["units"]["spark-engine.service"]["text"])["Service"]
        head = node["rank"] == 0
        assert service["LoadCredential"] == (["api-key:/etc/spark/api-key"] if head else [])
        for unit in host["units"].values():
            assert "api-key:/nix/store" not in unit["text"]


def test_a_change_of_one_node_leaves_the_others_alone(nix: Nix, plans: dict[str, str]) -> None:
    """Nothing differs on the others: no unit, file or package, no system and no image."""
    name = "three-spark-triangle"

    def change(data: Any) -> None:
        data["nodes"][1].setdefault("engine", {})["env"] = {"NCCL_DEBUG": "INFO"}

    folder = nix.source.parent / "plans" / "changed"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cluster.lock.json").write_text(nixos_plan(EXAMPLES / name, change), encoding="utf-8")
    before = nix.evaluate("hosts.nix", {"lock": plans[name]})
    after = nix.evaluate("hosts.nix", {"lock": nix.inside(folder / "cluster.lock.json")})
    for node in ("spark1", "spark3"):
        assert after[node] == before[node]
    changed = after["spark2"]["plan"]["nodes"][1]["env"]
    assert changed["NCCL_DEBUG"] == "INFO"
    assert after["spark2"]["toplevel"] != before["spark2"]["toplevel"]

    # the same plan evaluates to the same derivations, whole systems and images included
    assert nix.evaluate("hosts.nix", {"lock": plans[name]}) == before
