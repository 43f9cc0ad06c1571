"""Which node a machine is: by the ESP's file, by serial number, by MAC address, or an error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_appliance.node.cli import main
from spark_appliance.node.errors import NodeError, PlanError
from spark_appliance.node.identity import (
    LONGEST_WAIT,
    NETWORK,
    Identity,
    Machine,
    choose,
    look,
    network_file,
)
from spark_appliance.node.plan import View
from spark_appliance.node.process import Completed

from .conftest import Log, rendered, write

CLUSTER = """
version: 1
name: triangle
profile: stable-tp3
topology: {kind: triangle}
management_network: 192.168.1.0/24
api: {key_file: /etc/spark/api-key}
nodes:
  - {name: spark1, address: 192.168.1.11, serial: S-1, engram: {directory: /srv/engram}}
  - {name: spark2, address: 192.168.1.12, mac: "4C-BB-47-00-00-02",
     engram: {directory: /srv/engram}}
  - {name: spark3, address: spark3.lan, serial: S-3, mac: "4c:bb:47:00:00:03",
     engram: {directory: /srv/engram}}
"""


@pytest.fixture(scope="module")
def named_plan(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return rendered(tmp_path_factory.mktemp("plan"), CLUSTER)


def machine_of(root: Path, serial: str | None, *macs: str) -> None:
    if serial is not None:
        write(root / "sys/class/dmi/id/product_serial", serial + "\n")
    write(root / "sys/class/net/lo/address", "00:00:00:00:00:00\n")
    for number, mac in enumerate(macs):
        write(root / f"sys/class/net/eth{number}/address", mac + "\n")


@dataclass
class World:
    """A machine with an ESP, and what the program did to it."""

    root: Path
    log: Log = field(default_factory=Log)
    status: int = 0
    names: list[str] = field(default_factory=list)
    commands: list[tuple[str, ...]] = field(default_factory=list)
    time: float = 0.0
    late: dict[float, str] = field(default_factory=dict)

    @property
    def esp(self) -> Path:
        return self.root / "boot"

    @property
    def text(self) -> str:
        return "\n".join(self.log.lines)

    def run(self, argv: Sequence[str], *, seconds: float) -> Completed:
        assert seconds > 0
        self.commands.append(tuple(argv))
        return Completed(tuple(argv), self.status, "", "no such unit")

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        for moment, mac in self.late.items():
            if moment <= self.time:
                write(self.root / "sys/class/net/enP7s7/address", mac)

    def take(self) -> None:
        journal = self.log.journal
        Identity(self.root, self.esp, self.run, self, journal, self.names.append).take()


@pytest.fixture
def world(root: Path) -> World:
    (root / "boot").mkdir()
    return World(root)


@pytest.fixture
def with_plan(world: World, named_plan: dict[str, Any]) -> World:
    write(world.esp / "spark/cluster.lock.json", json.dumps(named_plan))
    return world


def network(world: World) -> str | None:
    path = world.root / NETWORK
    return path.read_text() if path.exists() else None


def test_by_serial(with_plan: World) -> None:
    machine_of(with_plan.root, "s-1", "02:00:00:00:00:01")
    with_plan.take()
    assert with_plan.names == ["spark1"]
    assert network(with_plan) == network_file("enP7s7", "192.168.1.11/24")
    assert with_plan.commands == [("networkctl", "reload")]
    assert "this is spark1 of triangle at 192.168.1.11/24" in with_plan.text
    assert "--flake .#spark1 --target-host root@192.168.1.11" in with_plan.text


def test_the_address_stands_beside_dhcp_and_is_not_taken_from_others() -> None:
    assert network_file("enP7s7", "192.168.1.11/24") == (
        "[Match]\nName=enP7s7\n\n[Network]\nDHCP=yes\n\n"
        "[Address]\nAddress=192.168.1.11/24\nDuplicateAddressDetection=ipv4\n"
    )


def test_by_mac_of_a_card_that_comes_late(with_plan: World) -> None:
    machine_of(with_plan.root, "Default string", "02:00:00:00:00:01")
    with_plan.late = {5.0: "4C:BB:47:00:00:02\n"}
    with_plan.take()
    assert with_plan.names == ["spark2"]
    assert with_plan.time == 5.0


def test_a_node_by_host_name_keeps_what_dhcp_gives(with_plan: World) -> None:
    machine_of(with_plan.root, "S-3")
    with_plan.take()
    assert with_plan.names == ["spark3"]
    assert network(with_plan) is None
    assert with_plan.commands == []
    assert "no management_network" in with_plan.text


@pytest.mark.parametrize("text", ["spark2", " spark2\r\n", "\ufeffspark2\n"])
def test_the_file_on_the_esp_comes_first(with_plan: World, text: str) -> None:
    machine_of(with_plan.root, "S-1")
    write(with_plan.esp / "spark/node", text)
    with_plan.take()
    assert with_plan.names == ["spark2"]


@pytest.mark.parametrize(
    ("name", "serial", "mac", "said"),
    [
        ("spark2", "S-1", "02:00:00:00:00:01", "is spark1 by the plan"),
        ("spark1", "S-9", "4c:bb:47:00:00:02", "is spark2 by the plan"),
        ("spark1", "S-9", "02:00:00:00:00:01", "is not spark1 by the plan: serial s-1"),
        ("spark3", "S-9", "4c:bb:47:00:00:03", "spark3 by its MAC address, but the plan says"),
        ("spark2", "S-9", "02:00:00:00:00:01", "no card of spark2 by the plan: MAC address 4c:bb"),
    ],
)
def test_a_file_on_the_esp_that_the_machine_contradicts(
    with_plan: World, name: str, serial: str, mac: str, said: str
) -> None:
    machine_of(with_plan.root, serial, mac)
    write(with_plan.esp / "spark/node", name)
    with_plan.take()
    assert with_plan.names == [name]
    assert f"spark/node says {name}, and {name} it becomes, but this machine" in with_plan.text
    assert said in with_plan.text


@pytest.mark.parametrize(
    ("name", "serial", "mac"),
    [
        ("spark1", "S-1", "02:00:00:00:00:01"),
        ("spark1", "Default string", "02:00:00:00:00:01"),
        ("spark2", "S-9", "4c:bb:47:00:00:02"),
        ("spark3", "S-3", "02:00:00:00:00:01"),
    ],
)
def test_a_file_on_the_esp_that_agrees_is_taken_in_silence(
    with_plan: World, name: str, serial: str, mac: str
) -> None:
    machine_of(with_plan.root, serial, mac)
    write(with_plan.esp / "spark/node", name)
    with_plan.take()
    assert with_plan.names == [name]
    assert "it becomes" not in with_plan.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("spark9\n", "has no node 'spark9'; it has spark1, spark2, spark3"),
        ("", "'' is no node name; write the name alone"),
        ("spark1\nspark2\n", "is no node name"),
        ("Spark1", "is no node name"),
    ],
)
def test_a_wrong_file_on_the_esp(with_plan: World, text: str, message: str) -> None:
    write(with_plan.esp / "spark/node", text)
    with pytest.raises(NodeError, match=message):
        with_plan.take()
    assert with_plan.names == []


def test_a_machine_that_is_none_of_them(with_plan: World) -> None:
    machine_of(with_plan.root, "S-9", "02:00:00:00:00:01")
    with pytest.raises(NodeError, match="serial s-9, MAC addresses 02:00:00:00:00:01") as caught:
        with_plan.take()
    assert "write serial or mac into the cluster file" in str(caught.value)
    assert LONGEST_WAIT <= with_plan.time < LONGEST_WAIT + 2


def test_two_nodes_that_fit(with_plan: World) -> None:
    machine_of(with_plan.root, "S-1", "4c:bb:47:00:00:02")
    with pytest.raises(NodeError, match="is spark1 as well as spark2 by the plan"):
        with_plan.take()


def test_another_mainboard(with_plan: World) -> None:
    machine_of(with_plan.root, "S-9", "4c:bb:47:00:00:03")
    with pytest.raises(NodeError, match="is spark3 by its MAC address, but the plan says serial"):
        with_plan.take()


def test_no_plan_is_no_failure(world: World) -> None:
    machine_of(world.root, "S-1")
    world.take()
    assert world.names == []
    assert "no plan on the ESP" in world.text
    assert "serial s-1" in world.text
    write(world.esp / "spark/node", "spark1\n")
    world.take()
    assert world.names == ["spark1"]


@pytest.mark.parametrize("content", ["", "{", '{"version": 9}', "[1]"])
def test_a_plan_that_is_none(world: World, content: str) -> None:
    write(world.esp / "spark/cluster.lock.json", content)
    with pytest.raises(PlanError, match=r"cluster\.lock\.json"):
        world.take()


def test_networkd_that_fails(with_plan: World) -> None:
    machine_of(with_plan.root, "S-1")
    with_plan.status = 1
    with pytest.raises(NodeError, match="networkctl reload: no such unit"):
        with_plan.take()


def test_a_name_that_the_kernel_refuses(with_plan: World) -> None:
    machine_of(with_plan.root, "S-1")

    def refuse(_: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    identity = Identity(
        with_plan.root, with_plan.esp, with_plan.run, with_plan, with_plan.log.journal, refuse
    )
    with pytest.raises(NodeError, match="cannot set the host name to spark1: Operation not"):
        identity.take()


def test_the_command_ends_with_one_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    esp = root / "boot"
    write(esp / "spark/cluster.lock.json", "{")
    with pytest.raises(SystemExit) as caught:
        main(["--root", str(root), "identity", "--esp", str(esp)])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_other_commands_still_need_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["status"])
    assert caught.value.code == 2
    assert "--node is missing" in capsys.readouterr().err


def test_a_machine_without_dmi_or_cards(root: Path) -> None:
    assert look(root) == Machine("", frozenset())
    assert "serial unknown, MAC addresses none" in str(look(root))


def node_of(name: str, serial: str | None, mac: str | None) -> View:
    return View({"name": name, "serial": serial, "mac": mac}, name)


def test_the_only_node_needs_no_number_but_a_wrong_one_counts() -> None:
    machine = Machine("s-1", frozenset())
    alone = choose([node_of("spark1", None, None)], machine)
    assert alone is not None
    assert alone.text("name") == "spark1"
    assert choose([node_of("spark1", "S-2", None)], machine) is None
    assert choose([View({"name": "spark1"}, "")], machine) is not None
    assert choose([node_of("a", None, None), node_of("b", None, None)], machine) is None


@given(
    st.lists(st.sampled_from([None, "A", "b", "C"]), min_size=2, max_size=4),
    st.sampled_from(["", "a", "b", "c", "d"]),
)
def test_a_node_without_numbers_is_never_guessed(serials: list[str | None], serial: str) -> None:
    nodes = [node_of(f"n{i}", value, None) for i, value in enumerate(serials)]
    fits = [i for i, value in enumerate(serials) if value is not None and value.lower() == serial]
    if len(fits) > 1:
        with pytest.raises(NodeError):
            choose(nodes, Machine(serial, frozenset()))
        return
    node = choose(nodes, Machine(serial, frozenset()))
    assert (None if node is None else node.text("name")) == (f"n{fits[0]}" if fits else None)
