"""``serve``, ``stop``, ``restart``: all ranks together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from spark_appliance.fleet.crew import Crew
    from spark_appliance.fleet.evidence import RunFolder

_NO_DOCTOR = click.option("--no-doctor", is_flag=True, help="Start without asking doctor first.")
_FAIL_FAST = click.option(
    "--fail-fast", is_flag=True, help="End at the first failed rank; the nodes' own retries go on."
)
_ANY_PLAN = click.option(
    "--any-plan", is_flag=True, help="Start although nodes have another plan than CLUSTER."
)
_DRAIN = click.option(
    "--drain",
    type=click.FloatRange(0, 3600),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Let running requests finish for at most this long; 0 cuts them off.",
)


@click.command()
@cluster_argument
@_NO_DOCTOR
@_FAIL_FAST
@_ANY_PLAN
@dry_run_option
@runs_option
def serve(
    cluster: Path, no_doctor: bool, fail_fast: bool, any_plan: bool, dry_run: bool, runs: Path
) -> None:
    """Start every rank and wait until the endpoint gives a right answer."""
    from spark_appliance.fleet.remote import Rehearsal

    plan = open_plan(cluster)
    rehearsal = Rehearsal() if dry_run else None
    with fleet_run("serve", plan, runs, rehearsal=rehearsal) as (crew, folder):
        seconds = _start(crew, folder, no_doctor=no_doctor, fail_fast=fail_fast, any_plan=any_plan)
    if rehearsal is not None:
        print_rehearsal(rehearsal)
        return
    click.echo(f"serving after {seconds:.0f} s: {plan.api.url}")


@click.command()
@cluster_argument
@_DRAIN
@dry_run_option
@runs_option
def stop(cluster: Path, drain: float, dry_run: bool, runs: Path) -> None:
    """Let requests finish, then stop the head and the workers. The export stays up."""
    from spark_appliance.fleet.remote import Rehearsal

    plan = open_plan(cluster)
    rehearsal = Rehearsal() if dry_run else None
    with fleet_run("stop", plan, runs, rehearsal=rehearsal) as (crew, _):
        _stop(crew, drain)
    if rehearsal is not None:
        print_rehearsal(rehearsal)


@click.command()
@cluster_argument
@_DRAIN
@_NO_DOCTOR
@_FAIL_FAST
@_ANY_PLAN
@dry_run_option
@runs_option
def restart(
    cluster: Path,
    drain: float,
    no_doctor: bool,
    fail_fast: bool,
    any_plan: bool,
    dry_run: bool,
    runs: Path,
) -> None:
    """Stop and start all ranks: one rank alone never rejoins a running group."""
    from spark_appliance.fleet.remote import Rehearsal

    plan = open_plan(cluster)
    rehearsal = Rehearsal() if dry_run else None
    with fleet_run("restart", plan, runs, rehearsal=rehearsal) as (crew, folder):
        _stop(crew, drain)
        seconds = _start(crew, folder, no_doctor=no_doctor, fail_fast=fail_fast, any_plan=any_plan)
    if rehearsal is not None:
        print_rehearsal(rehearsal)
        return
    click.echo(f"serving after {seconds:.0f} s: {plan.api.url}")


def _start(
    crew: Crew, folder: RunFolder | None, *, no_doctor: bool, fail_fast: bool, any_plan: bool
) -> float:
    from spark_appliance.fleet.serve import Start

    skip = no_doctor or crew.rehearsal is not None
    preflight = None if skip else doctor_preflight(crew.plan, folder)
    try:
        return Start(crew, folder, fail_fast=fail_fast, any_plan=any_plan).run(preflight)
    except KeyboardInterrupt:
        click.echo(
            "the nodes go on by themselves; see spark-appliance status, or spark-appliance stop",
            err=True,
        )
        raise


def _stop(crew: Crew, drain: float) -> None:
    from spark_appliance.fleet.stop import stop

    result = stop(crew, drain_limit=drain)
    if result.left:
        click.echo(f"warning: {result.left} requests were cut off after {drain:g} s", err=True)
    if drain > 0 and not result.closed and crew.rehearsal is None:
        click.echo("warning: the head has no nft: new requests were let in meanwhile", err=True)
