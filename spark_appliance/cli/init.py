"""``init``: print a cluster file to start from."""

from __future__ import annotations

import re
from typing import get_args

import click

from spark_appliance.model.cluster import System, TopologyKind
from spark_appliance.starter import Start, starter
from spark_appliance.topology.cabling import NODE_COUNTS


def _name(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", value):
        raise click.BadParameter("use lower-case letters, digits and '-', a letter first")
    return value


@click.command()
@click.option(
    "--topology", type=click.Choice(get_args(TopologyKind)), default="triangle", show_default=True
)
@click.option("--nodes", type=click.IntRange(1, 8), help="Default: what the topology takes.")
@click.option(
    "--name", default="sparks", show_default=True, callback=_name, help="Name of the cluster."
)
@click.option("--system", type=click.Choice(get_args(System)), default="dgx-os", show_default=True)
def init(topology: TopologyKind, nodes: int | None, name: str, system: System) -> None:
    """Print a commented cluster file: spark-appliance init > cluster.yaml."""
    count = nodes if nodes is not None else NODE_COUNTS[topology][-1 if topology != "switch" else 2]
    click.echo(starter(Start(topology, count, name, system)), nl=False)
