"""Packed Engram rows on every node's own disk."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator

from spark_appliance.doctor import engram_header
from spark_appliance.doctor.checks.common import all_ok, gib
from spark_appliance.doctor.checks.store import covering
from spark_appliance.doctor.document import Document, Missing
from spark_appliance.doctor.engram_header import BadHeader, Header
from spark_appliance.doctor.registry import CHECKS, Facts
from spark_appliance.doctor.result import Verdict, fail, ok, skip, warn
from spark_appliance.model.plan import EngramFile, EngramPlan, NodePlan

LOCAL = ("ext4", "xfs")
"""File systems on which direct reads are known to work."""

JOURNAL_BYTES = 1 << 20
"""Room for journal and receipt of a file (pkgs/spark-engram/FORMAT.md)."""

_NONE = "the plan has no Engram files here"


def _sizes(document: Document) -> dict[str, int]:
    """Return the files in the Engram directory; none when it is not there.

    Raises:
        Missing: when the directory could not be read.
    """
    section = document.section("engram")
    if not section.at("present").present and section.at("directory").data is False:
        return {}
    return {name: size.integer() for name, size in section.at("present").entries()}


def _header(document: Document, file: EngramFile) -> Header | None:
    text = document.section("engram").at("headers", file.name).optional()
    if text is None:
        return None
    try:
        return engram_header.parse(base64.b64decode(text, validate=True))
    except ValueError as error:
        raise error if isinstance(error, BadHeader) else BadHeader("unreadable header") from None


@CHECKS.node(
    "ENGRAM.FILES",
    problems=("P45", "P48"),
    means="Without its packed rows a rank cannot start; a shorter file would give wrong rows.",
    do="Run spark-appliance pack; it resumes where it stopped.",
)
def files(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge that every packed file is there with its exact size."""
    del facts
    if node.engram is None:
        yield ok(_NONE)
        return
    sizes = _sizes(document)
    for file in node.engram.files:
        size = sizes.get(file.name)
        if size is None:
            part = sizes.get(f"{file.name}.partial")
            state = f"half packed, {gib(part)}" if part is not None else "missing"
            yield fail(f"{file.name}: {state}", file.name)
        elif size != file.bytes:
            yield fail(f"{file.name}: {size:,} bytes, {file.bytes:,} wanted", file.name)
        else:
            yield ok(f"{size:,} bytes", file.name)


@CHECKS.node(
    "ENGRAM.HEADER",
    problems=("P46", "P56"),
    means="The file was packed for another rank, size or model, or by another tool.",
    do="Remove it and run spark-appliance pack.",
)
def header(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge layer, ranks, layout, rows, revision and model of each packed file."""
    if node.engram is None:
        yield ok(_NONE)
        return
    tp = facts.plan.parallel.tp
    config = document.section("checkpoint").at("config", "sha256").optional()
    for file in node.engram.files:
        try:
            found = _header(document, file)
        except BadHeader as error:
            yield fail(f"{file.name}: {error}", file.name)
            continue
        if found is None:
            yield skip(f"{file.name} is not there (ENGRAM.FILES)", file.name)
            continue
        wanted: dict[str, tuple[object, object]] = {
            "layer": (found.layer, file.layer),
            "tp": (found.tp, tp),
            "rank": (found.rank, node.rank),
            "layout": (found.layout, file.layout),
            "first row": (found.row_start, file.row_start),
            "last row": (found.row_end, file.row_end),
            "bytes": (found.file_bytes, file.bytes),
        }
        if config is not None:
            wanted["config.json"] = (found.config_sha256[:12], config[:12])
        if facts.plan.model.revision is not None:
            wanted["revision"] = (found.revision, facts.plan.model.revision)
        differ = [
            f"{what} {have}, not {want}" for what, (have, want) in wanted.items() if have != want
        ]
        if differ:
            yield fail(f"{file.name}: {'; '.join(differ)}", file.name)
        else:
            yield ok(
                f"layer {found.layer}, rank {found.rank} of {found.tp}, {found.layout}", file.name
            )


@CHECKS.node(
    "ENGRAM.RECEIPT",
    problems=("P48", "P56"),
    means="Without its receipt nobody has seen the file complete.",
    do="Run spark-appliance pack: it checks the file and writes the receipt.",
)
def receipt(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge that each file has a receipt, and that it is this file's."""
    del facts
    if node.engram is None:
        yield ok(_NONE)
        return
    sizes = _sizes(document)
    receipts = document.section("engram").at("receipts")
    for file in node.engram.files:
        if file.name not in sizes:
            yield skip(f"{file.name} is not there (ENGRAM.FILES)", file.name)
            continue
        entry = receipts.at(file.name)
        if not receipts.present:
            receipts.text()
        if not entry.present:
            yield fail(f"{file.name} has no receipt", file.name)
            continue
        try:
            found = _header(document, file)
        except BadHeader:
            found = None  # told by ENGRAM.HEADER
        differ = []
        if entry.at("file").optional() != file.name:
            differ.append(f"file {entry.at('file').optional()}")
        if entry.at("file_bytes").data != file.bytes:
            differ.append(f"file_bytes {entry.at('file_bytes').data}")
        if found is not None and entry.at("file_id").optional() != found.file_id:
            differ.append(f"file_id {entry.at('file_id').optional()}, the file has {found.file_id}")
        if differ:
            yield fail(f"{file.name}: receipt of another file ({'; '.join(differ)})", file.name)
        else:
            yield ok(entry.at("packer").optional() or "there", file.name)


@CHECKS.node(
    "ENGRAM.SPACE",
    problems=("P48",),
    means="The packed rows do not fit on the disk: packing stops half way.",
    do="Free space, or give the node a larger Engram device.",
)
def space(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Compare what is still to be packed with what is free."""
    del facts
    plan = node.engram
    if plan is None:
        yield ok(_NONE)
        return
    missing = _still_to_pack(plan, _sizes(document))
    if not missing:
        yield ok("everything is packed")
        return
    if plan.device is not None and not _mounted(document, plan):
        yield skip(f"{plan.device} is not mounted (ENGRAM.DISK)")
        return
    free = document.section("disks").at("free", plan.directory, "free").integer()
    text = f"{gib(free)} free, {gib(missing)} to pack"
    yield ok(text) if free >= missing else fail(text)


def _still_to_pack(plan: EngramPlan, sizes: dict[str, int]) -> int:
    missing = 0
    for file in plan.files:
        if file.name not in sizes:
            missing += file.bytes + JOURNAL_BYTES - sizes.get(f"{file.name}.partial", 0)
    return max(0, missing)


def _mounted(document: Document, plan: EngramPlan) -> bool:
    here = covering(document, plan.directory)
    device = document.section("engram").at("device", "device").optional()
    return here is not None and device is not None and here.at("device").optional() == device


@CHECKS.node(
    "ENGRAM.DISK",
    problems=("P49",),
    means="Rows must be read directly from a local disk: elsewhere each read costs two, or fails.",
    do="Put the Engram directory on ext4 or xfs on the node's NVMe; mount the plan's device.",
)
def disk(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge device, file system and direct reads of the Engram directory."""
    del facts
    plan = node.engram
    if plan is None:
        yield ok(_NONE)
        return
    section = document.section("engram")
    here = covering(document, plan.directory)
    kind = (here.at("type").optional() or "?") if here else "?"
    if plan.device is not None:
        if not section.at("device").present:
            yield fail(
                f"{plan.device} is not there", "device", do="ls -l /dev/disk/by-id on the node."
            )
            return
        if not _mounted(document, plan):
            unit = plan.mount_unit or ""
            known = document.section("services").at("units", unit, "load").optional() == "loaded"
            text = f"{plan.device} is not mounted at {plan.directory}"
            yield fail(text, "mounted") if known else skip(f"{text}; not installed yet", "mounted")
            return
    direct = section.at("direct").optional()
    if kind not in LOCAL:
        yield fail(f"{plan.directory} is on {kind}", "type")
    elif direct is None:
        raise Missing("engram.direct was not reported")
    elif direct not in ("ok", "nothing to read"):
        yield fail(f"direct reads fail ({direct})", "direct")
    else:
        yield ok(f"{kind}, direct reads {direct}")


@CHECKS.node(
    "ENGRAM.NVME",
    problems=("P51",),
    means="Interrupt coalescing is off. Single reads look faster, but with the deep queue of the "
    "engine prefill is about 1 % slower.",
    do="Leave it as DGX OS sets it (feature 8 = 0x107).",
)
def nvme(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Tell the NVMe interrupt coalescing (christopherowen/spark-ds41f docs/doctor.md)."""
    del facts
    if node.engram is None:
        yield ok(_NONE)
        return

    def off() -> Iterator[Verdict]:
        for name, text in document.section("disks").at("coalescing").entries():
            match = re.search(r"value:\s*(0x[0-9a-fA-F]+|[0-9]+)", text.text())
            if match and int(match.group(1), 16) == 0:
                yield warn(f"{name}: off", name)

    yield from all_ok(off(), "on, or not told")
