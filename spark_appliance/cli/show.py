"""``show``: what one node will run, read from the plan."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click

from spark_appliance import lockfile
from spark_appliance.errors import InputError
from spark_appliance.model.plan import NodePlan, Plan


@click.command()
@click.argument("node")
@click.option(
    "--format",
    "style",
    type=click.Choice(["table", "argv", "shell", "json", "env"]),
    default="table",
    show_default=True,
    help="argv: one argument a line; shell: a line to paste; env: NAME=value lines.",
)
@click.option(
    "-p",
    "--plan",
    "plan_path",
    type=click.Path(path_type=Path),
    default=Path(lockfile.LOCK_NAME),
    show_default=True,
    help="The plan to read.",
)
def show(node: str, style: str, plan_path: Path) -> None:
    """Show what NODE will run."""
    plan = lockfile.load(plan_path)
    chosen = plan.node(node)
    if chosen is None:
        raise InputError.one(
            "plan.unknown-node",
            f"{plan_path}: there is no node {node!r}",
            f"use one of: {', '.join(other.name for other in plan.nodes)}",
        )
    if style == "argv":
        click.echo("\n".join(chosen.argv))
    elif style == "env":
        click.echo("\n".join(f"{name}={value}" for name, value in sorted(chosen.env.items())))
    elif style == "shell":
        variables = [f"{name}={value}" for name, value in sorted(chosen.env.items())]
        click.echo(" ".join(shlex.quote(word) for word in ("env", *variables, *chosen.argv)))
    elif style == "json":
        click.echo(json.dumps(chosen.model_dump(mode="json"), indent=2, sort_keys=True))
    else:
        _print_table(plan, chosen)


def _print_table(plan: Plan, node: NodePlan) -> None:
    from rich.table import Table

    from spark_appliance.cli.output import console

    out = console()
    out.print(
        f"[bold]{node.name}[/bold]: rank {node.rank} of {plan.parallel.tp}, {node.role}, "
        f"{node.system}, {node.address}"
    )
    rails = Table(title="Rails", title_justify="left", box=None)
    for column in ("netdev", "RDMA device", "cage", "address", "MTU", "reaches"):
        rails.add_column(column, overflow="fold")
    for rail in node.rails:
        peers = ", ".join(f"{peer.node} {peer.address}" for peer in rail.peers)
        rails.add_row(rail.netdev, rail.rdma, rail.cage, rail.address, str(rail.mtu), peers)
    if node.rails:
        out.print(rails)
    units = Table(title="Units, in start order", title_justify="left", box=None)
    for column in ("unit", "started by", "after"):
        units.add_column(column, overflow="fold")
    for unit in node.units:
        units.add_row(unit.name, unit.started_by, ", ".join(unit.after))
    out.print(units)
    if node.engram is not None:
        files = Table(
            title=f"Engram rows in {node.engram.directory}", title_justify="left", box=None
        )
        for column in ("file", "rows", "bytes"):
            files.add_column(column, overflow="fold")
        for file in node.engram.files:
            files.add_row(file.name, f"{file.row_start} to {file.row_end}", f"{file.bytes:,}")
        out.print(files)
    free = (node.memory.total - node.memory.used) / (1 << 30)
    out.print(f"memory: {node.memory.used / (1 << 30):.1f} GiB used, {free:.1f} GiB free at worst")
    out.print(f"engine: {shlex.join(node.argv)}", markup=False)
