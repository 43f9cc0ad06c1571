"""``logs``: the journals of the ranks."""

from __future__ import annotations

from pathlib import Path

import click

from spark_appliance.cli.fleet_options import fleet_run, open_plan


@click.command()
@click.argument("nodes", nargs=-1, metavar="[NODE]...")
@click.option(
    "--cluster",
    type=click.Path(path_type=Path),
    default=Path("cluster.yaml"),
    show_default=True,
    help="Cluster file or plan.",
)
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines until interrupted.")
@click.option("-n", "--lines", type=click.IntRange(0), default=100, show_default=True)
@click.option("-u", "--unit", "units", multiple=True, help="Only this unit; repeat.")
def logs(
    nodes: tuple[str, ...], cluster: Path, follow: bool, lines: int, units: tuple[str, ...]
) -> None:
    """Show the journals of the nodes' units; keys are taken out."""
    from spark_appliance.fleet.logs import logs as read_logs

    plan = open_plan(cluster)
    width = max(len(node.name) for node in plan.nodes)

    def show(node: str, line: str) -> None:
        click.echo(f"{node:<{width}} {line}")

    with fleet_run("logs", plan, None, nodes, live=False) as (crew, _):
        read_logs(crew, show, lines=lines, follow=follow, units=units)
