"""``check``: every problem of a cluster file at once, and the memory budget."""

from __future__ import annotations

from pathlib import Path

import click

from spark_appliance.cli.output import print_budget, print_problems, summary
from spark_appliance.errors import InputError
from spark_appliance.workspace import open_cluster


@click.command()
@click.argument("cluster", type=click.Path(path_type=Path), default=Path("cluster.yaml"))
@click.option("--strict", is_flag=True, help="Fail on warnings too.")
@click.option("-q", "--quiet", is_flag=True, help="Print problems only, no budget.")
def check(cluster: Path, strict: bool, quiet: bool) -> None:
    """Report every problem of CLUSTER with its line and a remedy.

    Exit status: 0 when a plan can be rendered, 2 otherwise.
    """
    try:
        opened = open_cluster(cluster)
    except InputError as error:
        print_problems(error.problems)
        click.echo(f"{cluster}: {summary(error.problems)}", err=True)
        raise click.exceptions.Exit(2) from None
    if not quiet:
        print_budget([node.name for node in opened.cluster.nodes], opened.budgets)
    print_problems(opened.problems)
    click.echo(f"{cluster}: {summary(opened.problems)}", err=True)
    warned = strict and any(problem.severity == "warning" for problem in opened.problems)
    if opened.errors or warned:
        raise click.exceptions.Exit(2)
