"""``rollout`` and ``rollback``: a new plan on all nodes, or the old one again."""

from __future__ import annotations

from pathlib import Path

import click

from spark_appliance.cli.fleet_options import (
    cluster_argument,
    doctor_preflight,
    dry_run_option,
    fleet_run,
    open_plan,
    print_rehearsal,
    runs_option,
)

STATE_NAME = "rollout.json"

_FLAKE = click.option(
    "--flake", default=".", show_default=True, help="Flake with the NixOS nodes' systems."
)


@click.command()
@cluster_argument
@click.option("--canary", metavar="NODE", help="First node; the last rank by default.")
@click.option("--resume", is_flag=True, help="Go on with a rollout that was interrupted.")
@_FLAKE
@click.option(
    "--drain",
    type=click.FloatRange(0, 3600),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Let running requests finish for at most this long.",
)
@click.option(
    "--hold",
    type=click.IntRange(120, 7200),
    default=600,
    show_default=True,
    metavar="SECONDS",
    help="A node without contact for this long returns to the old version by itself.",
)
@click.option("--adopt", is_flag=True, help="DGX OS: replace files of others, kept aside.")
@click.option("--no-doctor", is_flag=True, help="Start the new version without asking doctor.")
@dry_run_option
@runs_option
def rollout(
    cluster: Path,
    canary: str | None,
    resume: bool,
    flake: str,
    drain: float,
    hold: int,
    adopt: bool,
    no_doctor: bool,
    dry_run: bool,
    runs: Path,
) -> None:
    """Bring the plan to all nodes: build, drain, canary, the rest, serve, then keep it.

    Whatever goes wrong, every node returns to what it had, by itself if need be.
    """
    from spark_appliance.fleet.remote import Rehearsal
    from spark_appliance.fleet.rollout import Rollout

    plan = open_plan(cluster)
    rehearsal = Rehearsal() if dry_run else None
    with fleet_run("rollout", plan, runs, rehearsal=rehearsal) as (crew, folder):
        work = Rollout(
            crew,
            runs / STATE_NAME,
            flake=flake,
            evidence=folder,
            hold=hold,
            drain_limit=drain,
            adopt=adopt,
            preflight=None if no_doctor or dry_run else doctor_preflight(plan, folder),
        )
        try:
            work.run(canary=canary, resume=resume)
        except KeyboardInterrupt:
            click.echo(
                f"interrupted: changed nodes return by themselves within {hold} s; go on with "
                "rollout --resume, or take it back with rollback",
                err=True,
            )
            raise
    if rehearsal is not None:
        print_rehearsal(rehearsal)
        return
    click.echo(f"rolled out and serving: {plan.api.url}")


@click.command()
@cluster_argument
@_FLAKE
@dry_run_option
@runs_option
def rollback(cluster: Path, flake: str, dry_run: bool, runs: Path) -> None:
    """Take the last rollout back, finished or interrupted, and start the old version."""
    from spark_appliance.fleet.remote import Rehearsal
    from spark_appliance.fleet.rollout import Rollout

    plan = open_plan(cluster)
    rehearsal = Rehearsal() if dry_run else None
    with fleet_run("rollback", plan, runs, rehearsal=rehearsal) as (crew, folder):
        Rollout(crew, runs / STATE_NAME, flake=flake, evidence=folder).rollback()
    if rehearsal is not None:
        print_rehearsal(rehearsal)
        return
    click.echo("every node has its old version and starts it; see spark-appliance status")
