"""The network hardware of a DGX Spark, as facts.

Source: NVIDIA dgx-spark-playbooks, connect-three-sparks (names and positions of the ports); a
QSFP cage exposes two 100 Gb/s MACs, each on its own PCIe Gen5 x4 link, so a cable shows as two
netdevs ("twins") with an RDMA device each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from spark_appliance.model.cluster import CageName


@dataclass(frozen=True, slots=True)
class Twin:
    """One of the two netdevs of a cage. ``pci`` is the PCI function as lspci prints it."""

    netdev: str
    rdma: str
    pci: str


@dataclass(frozen=True, slots=True)
class Cage:
    """A QSFP cage. ``twins`` are in PCI domain order: 0000 first, then 0002."""

    name: CageName
    position: str
    twins: tuple[Twin, Twin]


CAGES: Final[dict[CageName, Cage]] = {
    "p0": Cage(
        "p0",
        "next to the RJ45 socket",
        (
            Twin("enp1s0f0np0", "rocep1s0f0", "0000:01:00.0"),
            Twin("enP2p1s0f0np0", "roceP2p1s0f0", "0002:01:00.0"),
        ),
    ),
    "p1": Cage(
        "p1",
        "outer socket",
        (
            Twin("enp1s0f1np1", "rocep1s0f1", "0000:01:00.1"),
            Twin("enP2p1s0f1np1", "roceP2p1s0f1", "0002:01:00.1"),
        ),
    ),
}

NETDEVS: Final[dict[str, tuple[CageName, int]]] = {
    twin.netdev: (cage.name, index)
    for cage in CAGES.values()
    for index, twin in enumerate(cage.twins)
}
"""Netdev -> (cage, twin index)."""

RDMA_PORT: Final = 1
"""Every ConnectX-7 function has one RDMA port, numbered 1."""

TWIN_GBPS: Final = 100
"""Line rate of one twin, Gb/s; a node has about 200 Gb/s in all, whatever is cabled."""
