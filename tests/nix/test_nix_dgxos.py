"""The NixOS modules and the DGX OS adapter make the same of a plan, for every example."""

from __future__ import annotations

import json
from typing import Any

import pytest
from differences import DGX_UNITS, SETTINGS, TMPFILES
from machines import Machine, command, of_dgx, of_nixos, rails
from nixplans import cluster_file, plan_of

from spark_appliance import lockfile
from spark_appliance.dgxos.compare import Unit
from spark_appliance.dgxos.render import node_files

Pair = tuple[Machine, Machine]


@pytest.fixture(scope="session")
def pairs(fleet: tuple[str, Any, Any]) -> dict[str, Pair]:
    """Each node twice: as NixOS makes it and as DGX OS makes it."""
    name, plan, hosts = fleet
    dgx = plan_of(cluster_file(name), "dgx-os")
    data = json.loads(lockfile.dump(dgx))
    assert [node.name for node in dgx.nodes] == list(hosts)
    return {
        node.name: (
            of_nixos(hosts[node.name], plan, plan["nodes"][index]),
            of_dgx(node_files(dgx, node, b"program"), data, data["nodes"][index]),
        )
        for index, node in enumerate(dgx.nodes)
    }


def without_reasons(name: str, unit: Unit) -> Unit:
    settings = {key: v for key, v in unit["settings"].items() if (name, key) not in SETTINGS}
    return {**unit, "settings": settings}


@pytest.mark.nix
def test_units_in_both_directions(pairs: dict[str, Pair]) -> None:
    for node, (nixos, dgx) in pairs.items():
        assert set(dgx.units) - set(nixos.units) <= set(DGX_UNITS), node
        assert set(nixos.units) - set(dgx.units) == set(), node
        for name, unit in nixos.units.items():
            assert without_reasons(name, unit) == without_reasons(name, dgx.units[name]), (
                node,
                name,
            )


@pytest.mark.nix
def test_the_list_of_differences_has_nothing_that_is_none(pairs: dict[str, Pair]) -> None:
    """A setting on the list is on NixOS alone; were it on both, it would have to be the same."""
    for node, (nixos, dgx) in pairs.items():
        for name, key in SETTINGS:
            if name in dgx.units:
                assert key not in dgx.units[name]["settings"], (node, name, key)
        engine = {key for name, key in SETTINGS if name == "spark-engine.service"}
        unused = engine - set(nixos.units["spark-engine.service"]["settings"])
        assert unused <= {"BindReadOnlyPaths"}, node  # for a checkpoint in somebody's home


@pytest.mark.nix
@pytest.mark.parametrize(
    "part",
    ["sysctl", "modules", "exports", "nfs", "udev", "limits", "users", "unmanaged", "programs"],
)
def test_part(pairs: dict[str, Pair], part: str) -> None:
    for node, (nixos, dgx) in pairs.items():
        assert getattr(nixos, part) == getattr(dgx, part), node


@pytest.mark.nix
def test_rails(pairs: dict[str, Pair]) -> None:
    for node, (nixos, dgx) in pairs.items():
        assert rails(nixos) == rails(dgx), node


@pytest.mark.nix
def test_folders(pairs: dict[str, Pair]) -> None:
    for node, (nixos, dgx) in pairs.items():
        assert nixos.tmpfiles <= dgx.tmpfiles, node
        assert {line[1] for line in dgx.tmpfiles - nixos.tmpfiles} == set(TMPFILES), node


@pytest.mark.nix
def test_the_same_strangers_are_kept_out_and_the_same_peers_let_in(pairs: dict[str, Pair]) -> None:
    for node, (nixos, dgx) in pairs.items():
        if len(pairs) == 1:
            # DGX OS lets everybody try: with one Spark nothing of ours listens but the API
            assert nixos.accepts.keys() == dgx.accepts.keys()
            continue
        assert nixos.accepts == dgx.accepts, node


@pytest.mark.nix
def test_the_engine_gets_the_same_arguments_and_environment(pairs: dict[str, Pair]) -> None:
    for node, (nixos, dgx) in pairs.items():
        assert nixos.plan == dgx.plan, node
        own = next(entry for entry in nixos.plan["nodes"] if entry["name"] == node)
        assert own["argv"], node


# -- the comparison itself -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nixos", "dgx"),
    [
        (
            ["/nix/store/x/bin/spark-node", "--node", "a", "exec", "--python", "/nix/store/y/py"],
            ["/usr/local/sbin/spark-node", "--node", "a", "exec", "--container", "spark-engine",
             "--container-runtime", "/usr/bin/docker", "--image", "i@sha256:0", "--user", "spark"],
        ),
        (
            ["/nix/store/x/bin/spark-engram", "pack", "--rank", "0"],
            ["/usr/local/sbin/spark-node", "--node", "a", "exec", "--container", "p",
             "--container-runtime", "/usr/bin/docker", "--image", "i", "--writable-engram", "--",
             "spark-engram", "pack", "--rank", "0"],
        ),
        (
            ["+/nix/store/x/bin/spark-node", "prepare", "--user", "spark"],
            ["+/usr/local/sbin/spark-node", "prepare", "--user", "spark"],
        ),
    ],
)  # fmt: skip
def test_the_same_program_is_seen_as_the_same(nixos: list[str], dgx: list[str]) -> None:
    assert command(nixos) == command(dgx) != []


def test_another_program_or_privilege_is_seen() -> None:
    node = "/usr/local/sbin/spark-node"
    assert command([f"+{node}", "prepare"]) != command([node, "prepare"])
    assert command([node, "prepare", "--user", "root"]) != command(
        [node, "prepare", "--user", "spark"]
    )
    assert command(["-/usr/bin/docker", "rm", "--force", "x"]) == []
