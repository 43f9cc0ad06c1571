"""ib_write_bw over one rail: a server on one node, a client on the other, both bounded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from spark_appliance.doctor.checks.rdma import gid_index
from spark_appliance.doctor.document import Missing
from spark_appliance.doctor.registry import Bandwidth, Facts
from spark_appliance.errors import OperationError
from spark_appliance.model.plan import RailPlan
from spark_appliance.ssh import Host
from spark_appliance.topology.hardware import RDMA_PORT

SECONDS: Final = 3
"""Length of one run."""

PORT: Final = 18515
"""TCP port on the rail by which the two ends find each other (perftest's own default)."""

_BOUND = 20
_LISTENING = "spark: listening"
_NO_TOOL = 3

# Both run as root where sudo asks for no password: a login's memlock is often too small.
_HEAD = """\
command -v ib_write_bw >/dev/null || { echo 'ib_write_bw is not installed'; exit 3; }
sudo=
[ "$(id -u)" = 0 ] || { sudo -n true 2>/dev/null && sudo='sudo -n'; }
"""

SERVER: Final = (
    _HEAD
    + f"""\
$sudo timeout -k 2 {_BOUND} ib_write_bw "$@" 2>&1 &
job=$!
hex=$(printf '%04X' {PORT})
tries=0
until grep -qE ":$hex [0-9A-F]+:0000 0A" /proc/net/tcp /proc/net/tcp6 2>/dev/null; do
  kill -0 $job 2>/dev/null || {{ wait $job; exit 4; }}
  tries=$((tries + 1))
  [ $tries -lt 100 ] || exit 5
  sleep 0.1
done
echo '{_LISTENING}'
wait $job
"""
)

CLIENT: Final = _HEAD + f'exec $sudo timeout -k 2 {_BOUND} ib_write_bw "$@" 2>&1\n'


@dataclass(frozen=True, slots=True)
class Pair:
    """A direction over a rail: the client writes to the server."""

    client: str
    server: str
    rail: RailPlan
    other: RailPlan


def quiet(_text: str) -> None:
    """Tell nobody."""


def pairs(facts: Facts) -> Iterator[Pair]:
    """Return every two ends that share a subnet, in both directions."""
    for node in facts.plan.nodes:
        for rail in node.rails:
            for peer in rail.peers:
                there = facts.plan.node(peer.node)
                ends = there.rails if there is not None else []
                for other in ends:
                    if other.address.split("/")[0] == peer.address:
                        yield Pair(node.name, peer.node, rail, other)


def arguments(rail: RailPlan, gid: int) -> list[str]:
    """Return ib_write_bw's arguments for one end."""
    return [
        "-d", rail.rdma, "-i", str(RDMA_PORT), "-x", str(gid), "-p", str(PORT),
        "-D", str(SECONDS), "-F", "--report_gbits",
    ]  # fmt: skip


def parse(text: str) -> float | None:
    """Return the average in Gb/s out of ib_write_bw's table, None when there is none.

    A row has bytes, iterations, peak, average and message rate.
    """
    row = re.findall(r"^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)\s+[\d.]+\s*$", text, re.MULTILINE)
    return float(row[-1]) if row else None


def measure(
    facts: Facts, hosts: Mapping[str, Host], tell: Callable[[str], None] = quiet
) -> tuple[Bandwidth, ...]:
    """Measure every rail in both directions, one after the other: rails share the PCIe links."""
    results = []
    for pair in pairs(facts):
        tell(f"{pair.client} > {pair.server} over {pair.rail.netdev}")
        results.append(_run(facts, hosts, pair))
    return tuple(results)


def _run(facts: Facts, hosts: Mapping[str, Host], pair: Pair) -> Bandwidth:
    def result(gbits: float | None, error: str = "") -> Bandwidth:
        return Bandwidth(pair.client, pair.server, pair.rail.netdev, gbits, error)

    documents = facts.documents()
    if not {pair.client, pair.server} <= documents.keys() & hosts.keys():
        return result(None, "one end gave no answer")
    try:
        gid = gid_index(documents[pair.client], pair.rail)
        other_gid = gid_index(documents[pair.server], pair.other)
    except Missing as missing:
        return result(None, str(missing))
    if gid is None or other_gid is None:
        return result(None, "no usable GID (RDMA.GID)")
    server = hosts[pair.server].stream_script(
        SERVER, *arguments(pair.other, other_gid), timeout=_BOUND + 15
    )
    heard: list[str] = []
    try:
        with server as lines:
            for line in lines:
                heard.append(line)
                if line == _LISTENING:
                    break
            else:
                return result(None, _last(heard))
            address = pair.other.address.split("/")[0]
            done = hosts[pair.client].script(
                CLIENT, *arguments(pair.rail, gid), address, timeout=_BOUND + 15, check=False
            )
    except OperationError as error:
        return result(None, _last(heard) if heard else str(error).splitlines()[0])
    gbits = parse(done.stdout)
    return result(gbits, "" if gbits is not None else _last(done.stdout.splitlines()))


def _last(lines: list[str]) -> str:
    told = [line.strip() for line in lines if line.strip()]
    return told[-1][:200] if told else "ib_write_bw printed nothing"
