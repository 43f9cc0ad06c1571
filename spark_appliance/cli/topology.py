"""``topology``: which cable goes where, as a picture or as text."""

from __future__ import annotations

from pathlib import Path

import click

from spark_appliance import lockfile
from spark_appliance.errors import OperationError
from spark_appliance.topology import picture
from spark_appliance.workspace import open_cluster


@click.command()
@click.argument("cluster", type=click.Path(path_type=Path), default=Path("cluster.yaml"))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write an SVG file (text without it)."
)
def topology(cluster: Path, output: Path | None) -> None:
    """Draw the cabling of CLUSTER: cages, cables, interface names, addresses, ranks."""
    drawing = open_cluster(cluster).require_drawing()
    if str(output) == "-":
        click.echo(picture.svg(drawing), nl=False)
        return
    if output is None:
        click.echo(picture.text(drawing), nl=False)
        return
    try:
        lockfile.write(output, picture.svg(drawing))
    except OSError as error:
        raise OperationError(f"{output}: cannot write the picture: {error.strerror}") from None
    click.echo(f"wrote {output}", err=True)
