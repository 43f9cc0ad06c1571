"""systemd units of a node, from the plan's unit data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from spark_appliance.dgxos.files import NodeFile, ini, link, text_file
from spark_appliance.errors import InputError, OperationError
from spark_appliance.model.plan import NodePlan, UnitPlan
from spark_appliance.unitfile import unit_text

SYSTEM: Final = "/etc/systemd/system"

MOUNT_TIMEOUT: Final = "90"
"""Seconds for a mount: an NFS server that is down must not block a start for good."""

_ENGRAM_OPTIONS: Final = "noatime,nodiratime,nofail"


def unit_files(node: NodePlan, placeholders: Mapping[str, str]) -> Iterator[NodeFile]:
    """Yield unit files, drop-ins of the system's own units, and the links that enable them.

    Raises:
        InputError: when a command line has a placeholder that nothing stands for.
    """
    for unit in node.units:
        if unit.type == "mount":
            yield from _mount(node, unit)
        elif unit.type == "system":
            yield _drop_in(unit)
        else:
            yield text_file(f"{SYSTEM}/{unit.name}", _text(unit, placeholders))
        if unit.type != "mount":
            for wanted_by in unit.wanted_by:
                yield link(f"{SYSTEM}/{wanted_by}.wants/{unit.name}", f"../{unit.name}")


def _text(unit: UnitPlan, placeholders: Mapping[str, str]) -> str:
    try:
        return unit_text(unit, placeholders)
    except OperationError as error:
        raise InputError.one(
            "dgxos.placeholder",
            f"{unit.name}: {error}",
            "name the engine's image in the cluster file: image: {reference, digest}",
        ) from None


def _unit_section(unit: UnitPlan) -> list[tuple[str, str]]:
    lists = (
        ("After", unit.after),
        ("Requires", unit.requires),
        ("Wants", unit.wants),
        ("PartOf", unit.part_of),
        ("Conflicts", unit.conflicts),
    )
    pairs = [("Description", unit.description.replace("%", "%%"))]
    pairs += [(key, " ".join(names)) for key, names in lists if names]
    return [*pairs, *unit.unit_settings.items()]


def _drop_in(unit: UnitPlan) -> NodeFile:
    pairs = [pair for pair in _unit_section(unit) if pair[0] != "Description"]
    return text_file(f"{SYSTEM}/{unit.name}.d/50-spark.conf", ini([("Unit", pairs)]))


def _mount(node: NodePlan, unit: UnitPlan) -> Iterator[NodeFile]:
    path = f"{SYSTEM}/{unit.name}"
    mount, engram = node.weights.mount, node.engram
    if mount is not None and mount.unit == unit.name:
        where = mount.where
        what = [("What", mount.what), ("Where", where), ("Type", mount.type)]
        what += [("Options", ",".join(mount.options)), ("TimeoutSec", MOUNT_TIMEOUT)]
        yield text_file(path, ini([("Unit", _unit_section(unit)), ("Mount", what)]))
        # Mounted at the first look into the directory: the boot never waits for the head.
        automount = unit.name.removesuffix(".mount") + ".automount"
        sections = [
            ("Unit", [("Description", unit.description)]),
            ("Automount", [("Where", where), ("TimeoutIdleSec", "0")]),
            ("Install", [("WantedBy", "multi-user.target")]),
        ]
        yield text_file(f"{SYSTEM}/{automount}", ini(sections))
        yield link(f"{SYSTEM}/multi-user.target.wants/{automount}", f"../{automount}")
    elif engram is not None and engram.device is not None and engram.mount_unit == unit.name:
        what = [("What", engram.device), ("Where", engram.directory)]
        what += [("Type", "auto"), ("Options", _ENGRAM_OPTIONS)]
        install = [("WantedBy", "multi-user.target")]
        sections = [("Unit", _unit_section(unit)), ("Mount", what), ("Install", install)]
        yield text_file(path, ini(sections))
        yield link(f"{SYSTEM}/multi-user.target.wants/{unit.name}", f"../{unit.name}")
    else:
        raise InputError.one(
            "dgxos.mount",
            f"{node.name}: {unit.name} is in the plan, but nothing says what it mounts",
            "render the plan anew: spark-appliance render cluster.yaml",
        )
