"""The table of sections, and the last line of the program that is sent."""

from __future__ import annotations

import json
import sys
from typing import Any, Mapping

from spark_appliance.doctor.probe import engine, gpu, host, network, rdma, storage
from spark_appliance.doctor.probe.core import Machine, Section, answer

SECTIONS: tuple[tuple[str, Section, float], ...] = (
    # the slow ones first, so that they overlap
    ("checkpoint", storage.checkpoint, 20.0),
    ("engine", engine.engine, 30.0),
    ("files", storage.files, 20.0),
    ("gpu", gpu.gpu, 20.0),
    ("reach", network.reach, 10.0),
    ("containers", engine.containers, 15.0),
    ("engram", storage.engram, 10.0),
    ("disks", storage.disks, 10.0),
    ("nfs", storage.nfs, 10.0),
    ("kernel_log", host.kernel_log, 10.0),
    ("services", host.services, 10.0),
    ("system", host.system, 5.0),
    ("memory", host.memory, 10.0),
    ("clock", host.clock, 5.0),
    ("links", network.links, 10.0),
    ("managers", network.managers, 10.0),
    ("firewall", network.firewall, 10.0),
    ("ports", network.ports, 10.0),
    ("rdma", rdma.rdma, 10.0),
    ("pci", rdma.pci, 5.0),
)
"""Name, function and deadline in seconds of every section."""

TOTAL = 60.0
"""Seconds after which no section starts any more; the longest deadline comes on top at most."""


def main(request: Mapping[str, Any]) -> None:
    """Look at the node and print the document on one line."""
    machine = Machine(request.get("root", "/"))
    total = float(request.get("total", TOTAL))
    document = answer(machine, request, SECTIONS, total)
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()
