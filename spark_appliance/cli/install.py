"""``build``, ``install``, ``uninstall``: a node gets what the plan says."""

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

_FLAKE = click.option(
    "--flake", default=".", show_default=True, help="Flake with the NixOS nodes' systems."
)


@click.command()
@cluster_argument
@node_option
@_FLAKE
@click.option("--copy", is_flag=True, help="Also copy each system to its node.")
@dry_run_option
@runs_option
def build(
    cluster: Path, nodes: tuple[str, ...], flake: str, copy: bool, dry_run: bool, runs: Path
) -> None:
    """Build the systems of NixOS nodes here, without touching any node."""
    from spark_appliance.errors import InputError
    from spark_appliance.fleet.nixos import Nixos
    from spark_appliance.fleet.remote import Rehearsal

    plan = open_plan(cluster)
    rehearsal = Rehearsal() if dry_run else None
    with fleet_run("build", plan, runs, nodes, rehearsal=rehearsal) as (crew, folder):
        chosen = crew.only(r.name for r in crew if r.plan.system == "nixos")
        if not chosen.remotes:
            raise InputError.one(
                "build.no-nixos",
                "no chosen node runs NixOS",
                "DGX OS nodes: spark-appliance install",
            )
        worker = Nixos(chosen, flake, folder)
        paths = worker.build()
        if copy:
            worker.copy(paths)
    if rehearsal is not None:
        print_rehearsal(rehearsal)
        return
    for name, path in paths.items():
        click.echo(f"{name} {path}")


@click.command()
@cluster_argument
@node_option
@_FLAKE
@click.option("--diff", "only_diff", is_flag=True, help="Show what would change; change nothing.")
@click.option("--adopt", is_flag=True, help="Replace files of others; they come back on uninstall.")
@dry_run_option
@runs_option
def install(
    cluster: Path,
    nodes: tuple[str, ...],
    flake: str,
    only_diff: bool,
    adopt: bool,
    dry_run: bool,
    runs: Path,
) -> None:
    """Put the plan on the nodes; nothing is started or stopped.

    DGX OS: the engine's image by digest, units, network, export, mounts, as a generation that can
    be rolled back. NixOS: the built system, activated and made the boot default. A cluster that
    serves is changed with rollout instead.
    """
    from spark_appliance.fleet.install import Installer
    from spark_appliance.fleet.nixos import Nixos
    from spark_appliance.fleet.remote import Rehearsal

    plan = open_plan(cluster)
    rehearsal = Rehearsal() if dry_run else None
    warnings: list[str] = []
    name = "install-diff" if only_diff else "install"
    with fleet_run(name, plan, runs, nodes, rehearsal=rehearsal) as (crew, folder):
        dgx = crew.only(r.name for r in crew if r.plan.system == "dgx-os")
        nixos = crew.only(r.name for r in crew if r.plan.system == "nixos")
        if only_diff:
            diffs = Installer(dgx).diff()
        else:
            for node, applied in Installer(dgx).install(adopt=adopt).items():
                warnings += [f"{node}: {text}" for text in applied.warnings]
            if nixos.remotes:
                worker = Nixos(nixos, flake, folder)
                paths = worker.build()
                worker.copy(paths)
                nixos.each(lambda remote: worker.go_back(remote, paths[remote.name]))
    if rehearsal is not None:
        print_rehearsal(rehearsal)
        return
    for text in warnings:
        click.echo(f"warning: {text}", err=True)
    if only_diff:
        for node, answer in diffs.items():
            _print_diff(node, answer)
        for remote in nixos:
            click.echo(f"# {remote.name}: NixOS; nixos-rebuild dry-activate shows its changes")


def _print_diff(node: str, answer: dict[str, object]) -> None:
    changes = answer.get("changes")
    count = len(changes) if isinstance(changes, list) else 0
    click.echo(f"# {node}: {count} files change")
    click.echo(str(answer.get("diff", "")), nl=False)
    conflicts = answer.get("conflicts")
    for conflict in conflicts if isinstance(conflicts, list) else []:
        click.echo(f"# {node}: {conflict['path']} {conflict['reason']}: needs --adopt")
    found = answer.get("warnings")
    for text in found if isinstance(found, list) else []:
        click.echo(f"# {node}: warning: {text}")


@click.command()
@cluster_argument
@node_option
@click.option("--purge", is_flag=True, help="Also remove compiled kernels and packed Engram rows.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@dry_run_option
@runs_option
def uninstall(
    cluster: Path, nodes: tuple[str, ...], purge: bool, yes: bool, dry_run: bool, runs: Path
) -> None:
    """Stop everything of ours on DGX OS nodes and remove every file; others' files come back."""
    from spark_appliance.fleet.install import Installer
    from spark_appliance.fleet.remote import Rehearsal

    plan = open_plan(cluster)
    rehearsal = Rehearsal() if dry_run else None
    if not yes and not dry_run:
        names = ", ".join(nodes or [node.name for node in plan.nodes if node.system == "dgx-os"])
        click.confirm(f"Stop serving and remove everything from {names}?", abort=True, err=True)
    with fleet_run("uninstall", plan, runs, nodes, rehearsal=rehearsal) as (crew, _):
        dgx = crew.only(r.name for r in crew if r.plan.system == "dgx-os")
        Installer(dgx).uninstall(purge=purge)
        for remote in crew:
            if remote.plan.system == "nixos":
                crew.board.done(remote.name, "NixOS: take the module out of its configuration")
    if rehearsal is not None:
        print_rehearsal(rehearsal)
