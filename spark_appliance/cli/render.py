"""``render``: write the plan, or say that the one on disk is stale."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal

import click

from spark_appliance import lockfile
from spark_appliance.errors import InputError, OperationError
from spark_appliance.files import read_bounded
from spark_appliance.model.plan import Plan
from spark_appliance.workspace import open_cluster


@click.command()
@click.argument("cluster", type=click.Path(path_type=Path), default=Path("cluster.yaml"))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help=f"Where the plan goes; {lockfile.LOCK_NAME} beside CLUSTER by default, '-' for stdout.",
)
@click.option(
    "--system",
    type=click.Choice(["nixos", "dgx-os"]),
    help="As if all nodes ran it; the plan then goes to cluster.SYSTEM.lock.json by default.",
)
@click.option("--check", "check_only", is_flag=True, help="Write nothing; fail when it is stale.")
@click.option("-q", "--quiet", is_flag=True, help="Print no tables.")
def render(
    cluster: Path,
    output: Path | None,
    system: Literal["nixos", "dgx-os"] | None,
    check_only: bool,
    quiet: bool,
) -> None:
    """Render CLUSTER into the plan that every other command works from."""
    from spark_appliance.cli.output import print_budget, print_problems

    opened = open_cluster(cluster, system)
    if opened.plan is None:
        print_problems(opened.problems)
        raise InputError(opened.errors) if not opened.problems else click.exceptions.Exit(2)
    name = lockfile.SYSTEM_LOCK_NAME.format(system=system) if system else lockfile.LOCK_NAME
    target = output or cluster.parent / name
    text = lockfile.dump(opened.plan)
    if str(target) == "-":
        if check_only:
            raise click.UsageError("--check needs a file to compare with, not '-'")
        click.echo(text, nl=False)
        return
    if check_only:
        words = ["--system", system] if system else []
        words += ["-o", str(output)] if output else []
        _check(target, text, shlex.join([str(cluster), *words]))
        return
    try:
        lockfile.write(target, text)
    except OSError as error:
        raise OperationError(
            f"{target}: cannot write the plan: {error.strerror}\n"
            "    remedy: choose another place with --output"
        ) from None
    if not quiet:
        _print_nodes(opened.plan)
        print_budget([node.name for node in opened.cluster.nodes], opened.budgets)
    print_problems(problem for problem in opened.problems if problem.severity != "note")
    click.echo(f"wrote {target}", err=True)


def _check(target: Path, text: str, arguments: str) -> None:
    old = (
        read_bounded(target, lockfile.MAX_BYTES).decode("utf-8", "replace")
        if target.exists()
        else ""
    )
    if old == text:
        click.echo(f"{target} is up to date", err=True)
        return
    click.echo(lockfile.difference(target, old, text), nl=False)
    raise OperationError(
        f"{target}: error: stale: it does not follow from {arguments} [plan.stale]\n"
        f"    remedy: spark-appliance render {arguments}"
    )


def _print_nodes(plan: Plan) -> None:
    from rich.table import Table

    from spark_appliance.cli.output import console

    table = Table(
        title=f"{plan.name}: {plan.topology.kind}, profile {plan.source.profile}, "
        f"{plan.engine.package} {plan.engine.version}, TP {plan.parallel.tp} EP {plan.parallel.ep}",
        title_justify="left",
        box=None,
    )
    for column in ("rank", "node", "system", "address", "rails", "checkpoint", "Engram files"):
        table.add_column(column, overflow="fold")
    for node in plan.nodes:
        weights = "own copy"
        if node.weights.export is not None:
            weights = f"exports to {len(node.weights.export.clients)} rails"
        elif node.weights.mount is not None:
            weights = f"mounts {node.weights.mount.what}"
        engram = f"{node.engram.bytes / 1e9:.1f} GB" if node.engram else "none"
        table.add_row(
            str(node.rank),
            node.name,
            node.system,
            node.address,
            str(len(node.rails)),
            weights,
            engram,
        )
    console().print(table)
    for dimension in plan.parallel.padded:
        click.echo(
            f"padded: {dimension.name} {dimension.size} -> {dimension.padded} "
            f"({dimension.per_rank} a rank)"
        )
    click.echo(f"endpoint: {plan.api.url}")
