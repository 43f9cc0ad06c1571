"""``fabric``: wait until every rail works, resolve the GID index, warm ARP, write fabric.env."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spark_appliance.node.clock import Clock
from spark_appliance.node.errors import NodeError
from spark_appliance.node.files import remove, write_atomic
from spark_appliance.node.journal import Journal
from spark_appliance.node.plan import NodeContext
from spark_appliance.node.process import Runner
from spark_appliance.node.rails import Peer, Rail, Seen, addresses, look, rails_of

ENV_FILE: Final = "/run/spark/fabric.env"

GID_INDEX: Final = "NCCL_IB_GID_INDEX"

HOST_IP: Final = "SGLANG_HOST_IP"
"""In the plan when the cluster file gives an address; with a host name the node knows it best."""

POLL_SECONDS: Final = 1.0

ICMP_OVERHEAD: Final = 28
"""IPv4 header (20) and ICMP header (8): a ping of MTU - 28 bytes fills a packet."""


@dataclass(frozen=True, slots=True)
class Fabric:
    """Waits for the fabric of one node. ``deadline`` is in seconds, for everything together."""

    context: NodeContext
    runner: Runner
    clock: Clock
    journal: Journal
    deadline: float

    def run(self) -> None:
        """Bring up and write the environment file.

        Raises:
            NodeError: with everything that is missing, once the deadline has passed. The
                environment file is gone then: an engine never starts with a stale one.
        """
        env_file = self.context.path(ENV_FILE)
        remove(env_file)
        rails = rails_of(self.context)
        end = self.clock.now() + self.deadline
        seen = self._wait_for_rails(rails, end)
        self._warm(rails, end)
        write_atomic(env_file, self._environment(seen))
        self.journal.notice(f"fabric ready: {len(rails)} rails, every peer answers")

    def _wait_for_rails(self, rails: list[Rail], end: float) -> list[Seen]:
        last = ""
        while True:
            by_netdev = addresses(self.runner)
            seen = [look(self.context, rail, by_netdev) for rail in rails]
            missing = [f"{item.rail}: {text}" for item in seen for text in item.missing]
            if not missing:
                return seen
            if self.clock.now() >= end:
                raise NodeError(
                    f"{self.context.name}: the fabric is not up after {self.deadline:g} s: "
                    + "; ".join(missing)
                )
            if (text := "; ".join(missing)) != last:
                self.journal.info(f"waiting: {text}")
                last = text
            self.clock.sleep(POLL_SECONDS)

    def _warm(self, rails: list[Rail], end: float) -> None:
        """Ping every peer over its own rail: RoCE does not wait for ARP (field notes 1.3).

        Each node does so, which warms both directions.
        """
        waiting = [(rail, peer) for rail in rails for peer in rail.peers]
        full: dict[tuple[Rail, Peer], str] = {}
        while waiting:
            waiting = [pair for pair in waiting if not self._answers(*pair, full)]
            if not waiting:
                return
            if self.clock.now() >= end:
                raise NodeError("; ".join(self._silent(rail, peer, full) for rail, peer in waiting))
            self.clock.sleep(POLL_SECONDS)

    def _answers(self, rail: Rail, peer: Peer, small_only: dict[tuple[Rail, Peer], str]) -> bool:
        target = str(peer.address)
        base = ["ping", "-n", "-q", "-I", rail.netdev, "-W", "1"]
        if self.runner([*base, "-c", "1", target], seconds=10).status:
            small_only.pop((rail, peer), None)
            return False
        size = str(rail.mtu - ICMP_OVERHEAD)
        jumbo = [*base, "-c", "3", "-i", "0.2", "-M", "do", "-s", size, target]
        if self.runner(jumbo, seconds=15).status:
            small_only[rail, peer] = size
            return False
        return True

    def _silent(self, rail: Rail, peer: Peer, small_only: dict[tuple[Rail, Peer], str]) -> str:
        way = f"{self.context.name} {rail.address.ip} -> {peer.node} {peer.address} on {rail}"
        size = small_only.get((rail, peer))
        if size is not None:
            return (
                f"{way}: small packets pass, unfragmented ones of {size} bytes do not: "
                f"set MTU {rail.mtu} on both ends and on the switch"
            )
        return (
            f"{way}: no answer within {self.deadline:g} s: check that {peer.node} is up, its "
            "address, and the cable"
        )

    def _environment(self, seen: list[Seen]) -> str:
        lines = ["# written by spark-node fabric; valid for the next start of the engine only"]
        if HOST_IP not in self.context.node.mapping("env"):
            lan = self.context.node.optional_text("lan_interface")
            if lan is not None:  # null in hand-written plans of one rank, which needs none
                lines.append(f"{HOST_IP}={self._own_address(lan)}")
        indices = {item.rail.rdma: item.gid_index for item in seen if item.gid_index is not None}
        if len(set(indices.values())) == 1:
            index = next(iter(indices.values()))
            lines.append(f"{GID_INDEX}={index}")
            self.journal.info(f"GID index {index} on {', '.join(indices)}")
        elif indices:
            # one variable for all devices: with different indices NCCL has to choose itself
            text = ", ".join(f"{name}: {index}" for name, index in indices.items())
            self.journal.warning(
                f"the RDMA devices have different GID indices ({text}): {GID_INDEX} stays unset; "
                "taking the links down and up in the same order usually makes them equal"
            )
        return "\n".join(lines) + "\n"

    def _own_address(self, lan: str) -> str:
        """Return the first IPv4 address of the LAN interface: what the ranks' sockets go over."""
        found = addresses(self.runner).get(lan, ())
        if not found:
            raise NodeError(
                f"{self.context.name}: {lan} has no IPv4 address, so {HOST_IP} cannot be set: give "
                "it one, or correct nodes[].lan_interface in the cluster file "
                "(services.spark.fabric.lanInterface in hand-written options)"
            )
        return found[0].partition("/")[0]


def read_environment(path: Path) -> dict[str, str]:
    """Return the variables of an environment file.

    Raises:
        NodeError: when it is not there: the fabric was not brought up.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise NodeError(
            f"cannot read {path}: {error.strerror}; is spark-fabric.service up? "
            "(journalctl -u spark-fabric)"
        ) from None
    pairs = (line.partition("=") for line in text.splitlines() if not line.startswith("#"))
    return {name: value for name, _, value in pairs if name and value}
