"""``share``: the checkpoint readable on every node."""

from __future__ import annotations

from pathlib import Path

import click

from spark_appliance.cli.fleet_options import (
    cluster_argument,
    dry_run_option,
    fleet_run,
    open_plan,
    print_rehearsal,
    runs_option,
)


@click.command()
@cluster_argument
@click.option("--verify", is_flag=True, help="Copies only: compare every byte (reads everything).")
@dry_run_option
@runs_option
def share(cluster: Path, verify: bool, dry_run: bool, runs: Path) -> None:
    """Export and mount the checkpoint, or copy it, and check index and sizes on every node."""
    from spark_appliance.fleet.remote import Rehearsal
    from spark_appliance.fleet.share import share as share_all

    plan = open_plan(cluster)
    rehearsal = Rehearsal() if dry_run else None
    with fleet_run("share", plan, runs, rehearsal=rehearsal) as (crew, _):
        share_all(crew, verify=verify)
    if rehearsal is not None:
        print_rehearsal(rehearsal)
