"""What the numbers were measured on, put together for the result."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from spark_appliance.bench.client import HTTP_LIBRARY
from spark_appliance.bench.corpus import Corpus
from spark_appliance.bench.engine import Engine
from spark_appliance.bench.nodes import use
from spark_appliance.bench.result import Client, Evidence, Group, LoadReading, Node
from spark_appliance.bench.settings import Settings


def windows(groups: Sequence[Group]) -> list[tuple[float, float]]:
    """Return (start, end) of every timed round that counts, in seconds of the run's clock."""
    return [(r.started_s, r.ended_s) for g in groups for r in g.rounds if r.status == "ok"]


def collect(
    settings: Settings,
    engine: Engine,
    groups: Sequence[Group],
    *,
    nodes: Sequence[Node],
    loads: Sequence[LoadReading],
    corpus: Corpus | None,
    on_serving_machine: bool,
) -> Evidence:
    """Return the evidence of a run, joined with that of the run it resumes."""
    earlier = settings.resume.evidence if settings.resume else None
    merged = merge_nodes(earlier.nodes if earlier else [], nodes, windows(groups))
    running = next((n.facts["image.digest"] for n in merged if "image.digest" in n.facts), None)
    return Evidence(
        client=Client(
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
            python=platform.python_version(),
            http_library=HTTP_LIBRARY,
            cpus=os.cpu_count(),
            on_serving_machine=on_serving_machine,
        ),
        engine=engine.name,
        server_info=engine.server_info,
        models=engine.card,
        engine_load=[*(earlier.engine_load if earlier else []), *loads],
        plan_sha256=settings.plan_sha256,
        image_digest=running or settings.image_digest,
        text_source={
            "folders": list(corpus.folders),
            "files": corpus.files,
            "characters": len(corpus.text),
            "sha256": corpus.sha256,
        }
        if corpus
        else None,
        nodes=merged,
    )


def merge_nodes(
    earlier: Sequence[Node], now: Sequence[Node], timed: Sequence[tuple[float, float]]
) -> list[Node]:
    """Join the readings of two sessions by node name; the later facts win."""
    before = {node.name: node for node in earlier}
    merged = []
    for node in now:
        old = before.pop(node.name, None)
        samples = [*(old.samples if old else []), *node.samples]
        merged.append(node.model_copy(update={"samples": samples, "use": use(samples, timed)}))
    return [*before.values(), *merged]
