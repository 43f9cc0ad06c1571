"""Fake Sparks looked at by the real probe: where the recorded documents of the tests come from."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

from doctor_root import FakeSpark

from spark_appliance.doctor.document import Document, read_document
from spark_appliance.doctor.examine import base
from spark_appliance.doctor.program import PROBE_MODULES, program
from spark_appliance.doctor.registry import Answer, Facts
from spark_appliance.doctor.request import request
from spark_appliance.model.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
GIB = 1 << 30


def run_probe(spark: FakeSpark, python: str = sys.executable, **extra: Any) -> str:
    """Run the real probe over a fake node and return what it prints."""
    asked = {**request(spark.plan, spark.node), "root": str(spark.root), **extra}
    environ = {**spark.environ, "LC_ALL": "C"}
    done = subprocess.run(
        [python, "-I", "-"],
        input=program(PROBE_MODULES, asked),
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def on_a_spark(document: Document) -> Document:
    """Put in what a fake tree cannot show: the machine, its user, its disks."""
    data = copy.deepcopy(document.data)
    sections = data["sections"]
    data["uid"] = 0
    sections["system"]["machine"] = "aarch64"
    sections["system"]["page_size"] = 4096
    for space in sections["disks"]["free"].values():
        space |= {"total": 3700 * GIB, "free": 900 * GIB}
    if "direct" in sections["engram"]:
        sections["engram"]["direct"] = "ok"
        sections["engram"]["errors"].pop("direct", None)
    # sparse files have no extents; ext4 writes large files in extents of 128 MiB
    sections["checkpoint"]["extents"] = {
        name: 1 + size // (128 << 20) for name, size in sections["checkpoint"]["files"].items()
    }
    sections["checkpoint"]["errors"].pop("extents", None)
    return Document(data)


def facts_of(plan: Plan, sparks: dict[str, FakeSpark]) -> Facts:
    answers = {}
    for name, spark in sparks.items():
        document = on_a_spark(read_document(run_probe(spark), name))
        started = document.data["started"]
        answers[name] = Answer(document, started - 0.3, document.data["ended"] + 0.1)
    return dataclasses.replace(base(plan), answers=answers)


def sparks_of(plan: Plan, folder: Path) -> dict[str, FakeSpark]:
    return {node.name: FakeSpark(folder / node.name, plan, node) for node in plan.nodes}
