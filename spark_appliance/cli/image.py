"""``image``: the container image and the disk image."""

from __future__ import annotations

import click

from spark_appliance.cli.lazy import Entry, LazyGroup

_COMMANDS = {
    "lock": Entry("image_build:lock", "Resolve the Debian packages and write the lock."),
    "build": Entry("image_build:build", "Build the container image as an OCI layout."),
    "check": Entry("image_build:check", "Look for faults in a built image."),
    "digests": Entry("image_build:digests", "Print digests and layers of built images."),
    "write": Entry("image_disk:write", "Write the disk image to a whole disk, and read it back."),
    "compare": Entry("image_disk:compare", "Compare two raw disk images."),
}


@click.group(cls=LazyGroup, table=_COMMANDS)
def image() -> None:
    """Container image and disk image, the same bytes for everyone."""
