"""What this project writes itself is really built, with the tools of the machine."""

from __future__ import annotations

import configparser
import json
import subprocess
from pathlib import Path

import pytest
from nixtool import REPOSITORY, Nix

from spark_appliance.node.projection import node_plan

pytestmark = [pytest.mark.nix, pytest.mark.slow]

BUILDS = "hosttools/builds.nix"
PLAN = REPOSITORY / "examples" / "three-spark-triangle" / "cluster.lock.json"


def output_of(host: Nix, path: Path, *arguments: str) -> str:
    words = [*host.prefix, host.inside(path), *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def read(host: Nix, path: Path) -> str:
    """Read a file whose links may lead into the store that only Nix's root has."""
    words = [*host.prefix, "cat", host.inside(path)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def test_command_line(host: Nix) -> None:
    built = host.build(BUILDS, "programs.spark-appliance")
    assert "spark-appliance" in output_of(host, built / "bin" / "spark-appliance", "--version")
    assert "spark-node" in output_of(host, built / "bin" / "spark-node", "--version")
    assert (built / "share/bash-completion/completions/spark-appliance.bash").is_file()
    schema = json.loads(output_of(host, built / "bin" / "spark-appliance", "schema"))
    assert schema["properties"]["nodes"]


def test_engram_with_its_native_library(host: Nix) -> None:
    built = host.build(BUILDS, "programs.spark-engram")
    assert "pack" in output_of(host, built / "bin" / "spark-engram", "--help")
    assert list(built.rglob("libspark_engram.so"))


def test_padding_plugin(host: Nix) -> None:
    built = host.build(BUILDS, "programs.spark-tp-pad")
    (entry_points,) = built.rglob("entry_points.txt")
    assert "spark_tp_pad = spark_tp_pad.plugin:register" in entry_points.read_text()


def test_options_reference(host: Nix) -> None:
    built = host.build(BUILDS, "programs.options-doc")
    options = json.loads((built / "options.json").read_text())
    for name in (
        "hardware.spark.driver",
        "services.spark.fabric.rails",
        "services.spark.fleet.plan",
    ):
        assert options[name]["description"]
        (declaration,) = options[name]["declarations"]
        assert (REPOSITORY / declaration["name"]).is_file()
    assert "services.spark.master.enable" not in options
    assert "/nix/store" not in (built / "options.md").read_text()


def test_committed_plan_is_current_inside_nix(host: Nix) -> None:
    host.build(BUILDS, "checks.render-three-spark-triangle")


def test_unit_files_of_a_node(host: Nix) -> None:
    built = host.build(BUILDS, "units")
    node = json.loads(PLAN.read_text())["nodes"][0]
    names = {unit["name"] for unit in node["units"] if unit["type"] != "system"}
    assert {path.name for path in built.iterdir()} == names
    assert "LimitMEMLOCK=infinity\n" in read(host, built / "spark-engine.service")


def test_files_below_etc(host: Nix) -> None:
    built = host.build(BUILDS, "etc")
    plan = json.loads(PLAN.read_text())
    assert json.loads(read(host, built / "spark/plan.json")) == node_plan(plan, "spark1")
    export = plan["nodes"][0]["weights"]["export"]
    assert read(host, built / "exports").split()[0] == export["path"]
    conf = configparser.ConfigParser()
    conf.read_string(read(host, built / "nfs.conf"))
    assert conf["nfsd"]["threads"] == str(export["threads"])
    for rail in plan["nodes"][0]["rails"]:
        link = read(host, built / f"systemd/network/10-spark-{rail['netdev']}.link")
        assert f"Name={rail['netdev']}\n" in link
        assert f"Address={rail['address']}\n" in read(
            host, built / f"systemd/network/10-spark-{rail['netdev']}.network"
        )
