"""``image write|compare``: the disk image. Needs no more than the command line itself."""

from __future__ import annotations

from pathlib import Path

import click

from spark_appliance.errors import OperationError
from spark_appliance.image import disk, partitions, personal


@click.command()
@click.argument("image_file", metavar="IMAGE", type=click.Path(path_type=Path))
@click.argument("device", type=click.Path(path_type=Path))
@click.option(
    "--authorized-keys",
    "keys",
    type=click.Path(path_type=Path),
    help="Public SSH keys that may log in as root.",
)
@click.option("--plan", type=click.Path(path_type=Path), help="The plan, cluster.lock.json.")
@click.option("--node", metavar="NAME", help="Which node this disk is for.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def write(
    image_file: Path,
    device: Path,
    keys: Path | None,
    plan: Path | None,
    node: str | None,
    yes: bool,
) -> None:
    """Write the disk image IMAGE to the whole disk DEVICE, and read it back.

    Keys, plan and name are put on its ESP, read by the node on its first boot.
    """
    size = disk.image_size(image_file)
    files = personal.collect(keys, plan, node)
    if files:
        personal.require_tools()
    partitions.require_whole(image_file)
    target = disk.inspect(device)
    disk.check(target, size)
    click.echo(str(target))
    if not yes:
        click.confirm(f"Overwrite all of {target.path} with {size / 1e9:.1f} GB?", abort=True)
    shown = -1

    def progress(what: str, done: int, total: int) -> None:
        nonlocal shown
        step = done * 20 // total
        if step != shown:
            shown = step
            click.echo(f"{what} {step * 5} %", err=True)

    digest = disk.write(image_file, Path(target.path), progress)
    click.echo(f"verified {target.path}: sha256:{digest}")
    if files:
        personal.put(Path(target.path), files)
    for file in files:
        click.echo(f"on the ESP: {file.path}")
    if keys is None:
        click.echo(
            "note: without keys on the ESP (--authorized-keys) or in the image's configuration "
            "nobody can log in",
            err=True,
        )


@click.command()
@click.argument("image_file", metavar="IMAGE", type=click.Path(path_type=Path))
@click.argument("other", metavar="OTHER", type=click.Path(path_type=Path))
def compare(image_file: Path, other: Path) -> None:
    """Compare two raw disk images: which partitions differ, and where."""
    found = partitions.differences(image_file, other)
    for difference in found:
        click.echo(str(difference))
    if found:
        raise OperationError(f"{image_file} and {other} differ")
    click.echo("the same bytes")
