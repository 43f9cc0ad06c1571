"""Everything this project renders for an engine, found by looking and not by listing.

A new example or profile is judged from the moment its file exists.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from judge import split_options

from spark_appliance.model.cluster import Cluster, Scalar, TopologyKind
from spark_appliance.profiles import bundled_names, load_profile
from spark_appliance.render import render
from spark_appliance.render.arguments import PROGRAM, arguments, argv
from spark_appliance.workspace import open_cluster

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@dataclass(frozen=True, slots=True)
class Rendered:
    """What one node will run.

    ``argv`` begins after ``python -m sglang.launch_server``; ``stated`` is what it was made of;
    ``refused`` means that the rules allow no plan, so there is no environment either.
    """

    argv: tuple[str, ...]
    stated: Mapping[str, Scalar]
    env: Mapping[str, str]
    refused: bool


def published_command() -> dict[str, Any]:
    """Return the published four-Spark command: ``argv`` and, by hand, the ``values`` it means."""
    document: dict[str, Any] = json.loads((HERE / "published_command.json").read_text("utf-8"))
    return document


def split_stated(argv: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the (flag, value) pairs that an argv states, without knowing the engine's types.

    A flag with no value states True, or False for ``--no-...``; with one, that text; with
    several, their list.
    """
    stated: list[tuple[str, Any]] = []
    for flag, values in split_options(argv):
        name, equals, value = flag.partition("=")
        values = [value, *values] if equals else values
        match values:
            case []:
                stated.append((name, not name.startswith("--no-")))
            case [single]:
                stated.append((name, single))
            case several:
                stated.append((name, several))
    return stated


def same_value(stated: Any, parsed: Any) -> bool:
    """Tell whether the engine understood a stated value as it reads.

    Text and numbers compare by what they mean: "600" is 600.0, "0.78" is 0.78, and no text that
    is not a number equals one.
    """
    if isinstance(stated, list):
        return (
            isinstance(parsed, list)
            and len(stated) == len(parsed)
            and all(map(same_value, stated, parsed))
        )
    if isinstance(stated, bool) or isinstance(parsed, bool):
        return stated is parsed
    if isinstance(parsed, int | float):
        try:
            return float(stated) == float(parsed)
        except ValueError:
            return False
    return bool(stated == parsed)


def rendered() -> dict[str, Rendered]:
    """Return name -> what runs there, for every node of every example and bundled profile.

    A name is ``examples/FOLDER/NODE``, or ``profiles/PROFILE/TOPOLOGY-NODES/NODE`` for each
    topology and number of nodes that the profile is for. A profile that the rules refuse (the
    pair) has no plan, but its flags must still be real ones: its command line is judged too.
    """
    found: dict[str, Rendered] = {}
    for path in sorted((ROOT / "examples").glob("*/cluster.yaml")):
        opened = open_cluster(path)
        opened.require_plan()
        found |= _nodes(
            f"examples/{path.parent.name}", opened.cluster, opened.cluster.profile, path.parent
        )
    for profile in bundled_names():
        for kind, count in _shapes():
            if count in load_profile(profile, ROOT).profile.nodes:
                cluster = _cluster(profile, kind, count)
                found |= _nodes(f"profiles/{profile}/{kind}-{count}", cluster, profile, ROOT)
    return found


def rendered_argvs() -> dict[str, list[str]]:
    """Return the argv of `rendered`, without the values it is made of."""
    return {name: list(node.argv) for name, node in rendered().items()}


def _shapes() -> list[tuple[TopologyKind, int]]:
    shapes: list[tuple[TopologyKind, int]] = [("single", 1), ("pair", 2), ("triangle", 3)]
    shapes += [("switch", count) for count in range(2, 9)]
    return [*shapes, ("ring", 4)]


def _cluster(profile: str, kind: TopologyKind, count: int) -> Cluster:
    document: dict[str, Any] = {
        "version": 1,
        "name": "judged",
        "profile": profile,
        "topology": {"kind": kind},
        "api": {"key_file": "/etc/spark/api-key"},
        "nodes": [
            {
                "name": f"spark{number}",
                "address": f"192.168.1.{10 + number}",
                "engram": {"directory": "/var/lib/spark/engram"},
            }
            for number in range(1, count + 1)
        ],
    }
    if kind == "ring":
        document["topology"] |= {
            "nccl_library": "/opt/nccl/libnccl.so.2",
            "nccl_library_sha256": "0" * 64,
        }
    return Cluster.model_validate(document)


def _nodes(prefix: str, cluster: Cluster, profile: str, base: Path) -> dict[str, Rendered]:
    loaded = load_profile(profile, base)
    plan = render(cluster, loaded).plan
    found = {}
    for rank, node in enumerate(cluster.nodes):
        stated = arguments(loaded.profile, cluster, rank)
        # What is judged is what the lock file will hold, wherever there is one.
        line = argv(stated) if plan is None else plan.nodes[rank].argv
        if tuple(line[: len(PROGRAM)]) != PROGRAM:
            raise AssertionError(f"{prefix}: the command does not start with {PROGRAM}: {line}")
        found[f"{prefix}/{node.name}"] = Rendered(
            argv=tuple(line[len(PROGRAM) :]),
            stated={f"--{name}": value for name, value in stated.items()},
            env={} if plan is None else plan.nodes[rank].env,
            refused=plan is None,
        )
    return found
