"""Plans, fake system trees and recorders for the node programs."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Interface, IPv6Address
from pathlib import Path
from typing import Any

import pytest

from spark_appliance.node.journal import Journal
from spark_appliance.node.plan import NodeContext, read_context
from spark_appliance.node.process import Completed
from spark_appliance.node.projection import node_plan
from spark_appliance.workspace import open_cluster

CLUSTER = """
version: 1
name: triangle
profile: stable-tp3
topology:
  kind: triangle
api: {{key_file: /etc/spark/api-key}}
nodes:
  - {{name: spark1, address: 127.0.0.11, system: {system}, engram: {{directory: /srv/engram}}}}
  - {{name: spark2, address: 127.0.0.12, system: {system}, engram: {{directory: /srv/engram}}}}
  - {{name: spark3, address: 127.0.0.13, system: {system}, engram: {{directory: /srv/engram}}}}
"""


def rendered(folder: Path, text: str) -> dict[str, Any]:
    file = folder / "cluster.yaml"
    file.write_text(text)
    plan: dict[str, Any] = open_cluster(file).require_plan().model_dump(mode="json")
    return plan


@pytest.fixture(scope="session")
def nixos_plan(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return rendered(tmp_path_factory.mktemp("plan"), CLUSTER.format(system="nixos"))


@pytest.fixture(scope="session")
def dgx_plan(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return rendered(tmp_path_factory.mktemp("plan"), CLUSTER.format(system="dgx-os"))


@pytest.fixture
def plan(nixos_plan: dict[str, Any]) -> dict[str, Any]:
    """A plan of three nodes that a test may change."""
    return copy.deepcopy(nixos_plan)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture(params=["whole", "own"])
def context_of(root: Path, request: pytest.FixtureRequest) -> Callable[..., NodeContext]:
    """Each program reads a whole plan and the node's own."""

    def make(plan: dict[str, Any], node: str = "spark1") -> NodeContext:
        file = root / "etc/spark/plan.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        data = plan if request.param == "whole" else node_plan(plan, node)
        file.write_text(json.dumps(data))
        return read_context(file, node, root)

    return make


@dataclass
class Log:
    stream: io.StringIO = field(default_factory=io.StringIO)

    @property
    def journal(self) -> Journal:
        return Journal(self.stream, prefix=True)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


@pytest.fixture
def log() -> Log:
    return Log()


@dataclass
class FakeClock:
    """Time passes only when somebody sleeps; ``events`` run when their moment comes."""

    time: float = 0.0
    events: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    slept: list[float] = field(default_factory=list)

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds
        for moment, action in list(self.events):
            if moment <= self.time:
                self.events.remove((moment, action))
                action()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


Answer = Completed | Exception


@dataclass
class FakeRunner:
    """Answers programs from a function and keeps what was asked."""

    answer: Callable[[Sequence[str]], tuple[int, str]]
    calls: list[list[str]] = field(default_factory=list)

    def __call__(self, argv: Sequence[str], *, seconds: float) -> Completed:
        assert seconds > 0
        self.calls.append(list(argv))
        status, output = self.answer(argv)
        return Completed(tuple(argv), status, output, "")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def mapped_gid(address: str) -> str:
    """An IPv4 address as sysfs writes the GID that maps it."""
    value = IPv6Address("::ffff:" + str(IPv4Interface(address).ip))
    return value.exploded


@dataclass
class Sysfs:
    """The rails of a plan's node in /sys, all in order until a test changes something."""

    root: Path
    node: dict[str, Any]
    index: int = 3

    def build(self) -> None:
        for rail in self.node["rails"]:
            self.net(rail, "operstate", "up")
            self.net(rail, "mtu", str(rail["mtu"]))
            self.net(rail, "speed", "200000")
            port = self.port(rail)
            write(port / "state", "4: ACTIVE\n")
            write(port / "phys_state", "5: LinkUp\n")
            gids = port / "gids"
            gids.mkdir(parents=True, exist_ok=True)
            for unused in range(16):
                (gids / str(unused)).write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")
            self.gid(rail, 0, "fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1")
            self.gid(rail, 1, "fe80:0000:0000:0000:0000:0000:0000:0001", "RoCE v2")
            self.gid(rail, 2, mapped_gid(rail["address"]), "IB/RoCE v1")
            self.gid(rail, self.index, mapped_gid(rail["address"]), "RoCE v2")

    def net(self, rail: dict[str, Any], name: str, value: str) -> None:
        write(self.root / f"sys/class/net/{rail['netdev']}/{name}", value + "\n")

    def port(self, rail: dict[str, Any]) -> Path:
        return self.root / f"sys/class/infiniband/{rail['rdma']}/ports/1"

    def gid(
        self, rail: dict[str, Any], index: int, gid: str, kind: str, netdev: str | None = None
    ) -> None:
        port = self.port(rail)
        write(port / f"gids/{index}", gid + "\n")
        write(port / f"gid_attrs/types/{index}", kind + "\n")
        write(port / f"gid_attrs/ndevs/{index}", (netdev or rail["netdev"]) + "\n")

    def drop_gid(self, rail: dict[str, Any], index: int) -> None:
        # as the kernel: the files are there, reading type and netdev of an unused entry fails
        port = self.port(rail)
        write(port / f"gids/{index}", "0000:0000:0000:0000:0000:0000:0000:0000\n")
        (port / f"gid_attrs/types/{index}").unlink()
        (port / f"gid_attrs/ndevs/{index}").unlink()

    def ip_json(self) -> str:
        links = [
            {
                "ifname": rail["netdev"],
                "addr_info": [
                    {
                        "family": "inet",
                        "local": rail["address"].split("/")[0],
                        "prefixlen": int(rail["address"].split("/")[1]),
                    }
                ],
            }
            for rail in self.node["rails"]
        ]
        return json.dumps([{"ifname": "lo", "addr_info": []}, {}, *links])
