"""``pack``: every node's Engram rows onto its NVMe."""

from __future__ import annotations

from pathlib import Path

import click

from spark_appliance.cli.fleet_options import (
    cluster_argument,
    dry_run_option,
    fleet_run,
    node_option,
    open_plan,
    print_rehearsal,
    runs_option,
)


@click.command()
@cluster_argument
@node_option
@dry_run_option
@runs_option
def pack(cluster: Path, nodes: tuple[str, ...], dry_run: bool, runs: Path) -> None:
    """Pack the Engram rows of every node; resumes what was cut off, refuses another layout."""
    from spark_appliance.fleet.pack import pack as pack_all
    from spark_appliance.fleet.remote import Rehearsal

    plan = open_plan(cluster)
    rehearsal = Rehearsal() if dry_run else None
    try:
        with fleet_run("pack", plan, runs, nodes, rehearsal=rehearsal) as (crew, _):
            packed = pack_all(crew)
    except KeyboardInterrupt:
        click.echo("the packers go on; the same command watches them again", err=True)
        raise
    if rehearsal is not None:
        print_rehearsal(rehearsal)
        return
    click.echo(f"packed {sum(packed.values()) / 1e9:.1f} GB on {len(packed)} nodes")
