"""The checkpoint on every node, and the way it gets there."""

from __future__ import annotations

from collections.abc import Iterator

from spark_appliance.doctor.checks.common import all_ok, gib, installed, listed, odd_ones, values
from spark_appliance.doctor.document import Document, View
from spark_appliance.doctor.registry import CHECKS, Facts
from spark_appliance.doctor.request import tables
from spark_appliance.doctor.result import Verdict, fail, ok, skip, warn
from spark_appliance.model.plan import ExportPlan, NodePlan
from spark_appliance.names import NFS_SERVER

EXTENT_BYTES = 4 << 20
"""Mean extent below which sequential reads suffer; ext4 writes extents of up to 128 MiB. Our
figure (christopherowen/spark-ds41f warns of fragmented checkpoints without one)."""

NOT_EXPORTABLE = ("overlay", "tmpfs", "nfs", "nfs4", "fuse")
"""File systems that the kernel's NFS server cannot export, or should not."""

_LOCAL_OPTIONS = frozenset({"nofail"})
"""Mount options that systemd takes for itself; those with a leading '_' too."""


def covering(document: Document, path: str) -> View | None:
    """Return the mount that holds a path.

    Raises:
        Missing: when the mounts were not reported.
    """
    best: View | None = None
    length = -1
    for mount in document.section("disks").at("mounts").items():
        where = mount.at("where").optional()
        if where is None:
            continue
        inside = path == where or path.startswith(where.rstrip("/") + "/")
        # of mounts on one place the last is seen
        if inside and len(where) >= length:
            best, length = mount, len(where)
    return best


@CHECKS.cluster(
    "STORE.CONFIG",
    means="The checkpoint is missing, or nodes have different revisions of it.",
    do="Download it whole, then compare: sha256sum config.json on every node.",
)
def config(facts: Facts) -> Iterator[Verdict]:
    """Judge that config.json and the index are there and the same on every node."""
    for name, document in facts.documents().items():
        section = document.section("checkpoint")
        if not section.at("directory").present:
            continue  # ACCESS.PROBE tells
        for key in ("config", "index"):
            reason = section.at("errors", key).optional()
            if reason is not None and not reason.startswith("no answer"):
                yield fail(reason, name)
    for thing, key in (("config.json", "config"), ("the index", "index")):
        found = values(facts, "checkpoint", key, "sha256")
        if odd_ones(found):
            yield fail(f"{thing}: {listed({n: d[:12] for n, d in found.items()})}", thing)
        elif found:
            yield ok(f"{thing}: {next(iter(found.values()))[:12]}… on {len(found)} nodes", thing)


@CHECKS.node(
    "STORE.SHARDS",
    means="The checkpoint is incomplete as this node sees it: loading fails after minutes.",
    do="Download again what is named; on a worker look at the head first, then at the mount.",
)
def shards(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge number, names and total size of the shards."""
    del node
    section = document.section("checkpoint")
    sizes = {name: size.integer() for name, size in section.at("files").entries()}
    wanted = section.at("index", "shards").texts()
    total = section.at("index", "total_size").integer()
    count = facts.plan.model.shards

    def wrong() -> Iterator[Verdict]:
        missing = [name for name in wanted if name not in sizes]
        if missing:
            yield fail(f"{len(missing)} missing, first {missing[0]}", "missing")
        if len(wanted) != count:
            yield fail(f"the index names {len(wanted)} shards, the plan {count}", "count")
        empty = [name for name in wanted if sizes.get(name) == 0]
        if empty:
            yield fail(f"{empty[0]} is empty", "empty")
        have = sum(sizes.get(name, 0) for name in wanted)
        # the index counts the tensors, files have headers on top
        if not missing and have < total:
            yield fail(f"{have:,} bytes, the tensors alone have {total:,}", "size")

    yield from all_ok(wrong(), f"{len(wanted)} shards, {gib(sum(sizes.values()))}")


@CHECKS.cluster(
    "STORE.SAME",
    problems=("P39",),
    means="A node sees other shards than the head: a stale mount, copy or volume.",
    do="Mount again, or copy again with verification (share).",
)
def same(facts: Facts) -> Iterator[Verdict]:
    """Compare the sizes of all shards with those on the head."""
    documents = facts.documents()
    head = facts.plan.nodes[0].name
    if head not in documents:
        yield skip("the head gave no answer")
        return
    files = documents[head].section("checkpoint").at("files")
    reference = {name: size.data for name, size in files.entries()}
    for name, document in documents.items():
        view = document.section("checkpoint").at("files")
        if name == head or not view.present:
            continue
        sizes = {shard: size.data for shard, size in view.entries()}
        differ = sorted(
            s for s in reference.keys() | sizes.keys() if reference.get(s) != sizes.get(s)
        )
        if differ:
            first = differ[0]
            yield fail(
                f"{len(differ)} shards differ from {head}, first {first}: "
                f"{sizes.get(first)} bytes, not {reference.get(first)}",
                name,
            )
        else:
            yield ok(f"{len(sizes)} shards as on {head}", name)


@CHECKS.node(
    "STORE.MOUNT",
    problems=("P39", "P42"),
    means="The worker would load from the wrong place, slowly, or not at all.",
    do="systemctl restart the mount unit; share sets it up.",
)
def mount(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge the file system under the checkpoint: the plan's mount, or a local disk."""
    path = facts.plan.model.path
    here = covering(document, path)
    kind = (here.at("type").optional() or "?") if here else "?"
    what = (here.at("what").optional() or "?") if here else "?"
    plan = node.weights.mount
    if plan is None:
        if kind.startswith("nfs"):
            yield fail(f"{path} is {kind} from {what}, the plan has a local copy", "type")
        else:
            yield ok(f"local ({kind})")
        return
    if here is None or here.at("where").optional() != plan.where:
        known = document.section("services").at("units", plan.unit, "load").optional() == "loaded"
        if known:
            yield fail(f"{plan.where} is not mounted", "mounted")
        else:
            yield skip("the mount is not installed yet")
        return
    if not kind.startswith("nfs") or what != plan.what:
        yield fail(f"{plan.where} is {kind} from {what}, not from {plan.what}", "what")
        return
    options = set(here.at("options").texts())
    missing = [
        option
        for option in plan.options
        if option not in options and option not in _LOCAL_OPTIONS and not option.startswith("_")
    ]
    if "ro" in missing:
        yield fail("mounted writable", "ro")
    elif missing:
        yield warn(f"mounted without {', '.join(missing)}", "options")
    else:
        yield ok(f"{plan.what} with the plan's options")


@CHECKS.node(
    "STORE.EXPORT",
    problems=("P36", "P40"),
    means="Workers are refused, or others than the workers can read the checkpoint.",
    do="Install the head (it writes the export), then exportfs -ra.",
)
def export(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge the head's export: clients, options, file system, threads, server."""
    plan = node.weights.export
    if plan is None:
        yield ok("exports nothing")
        return
    state = document.section("services").at("units", NFS_SERVER)
    if state.at("load").optional() == "not-found" or not installed(document):
        yield skip("the export is not installed yet")
        return
    section = document.section("nfs")
    entries = [e for e in section.at("exports").items() if e.at("path").optional() == plan.path]

    def wrong() -> Iterator[Verdict]:
        if state.at("active").text() != "active":
            yield fail(f"{NFS_SERVER} is {state.at('active').optional()}", "server")
        yield from _clients(plan, entries)
        here = covering(document, plan.path)
        kind = here.at("type").optional() or "" if here else ""
        if kind.startswith(NOT_EXPORTABLE):
            yield fail(f"{plan.path} is on {kind}, which cannot be exported", "type")
        threads = section.at("threads").optional()
        if threads is not None and threads.isdigit() and int(threads) < plan.threads:
            yield warn(f"{threads} server threads, {plan.threads} planned", "threads")

    yield from all_ok(wrong(), f"{plan.path} to {len(plan.clients)} addresses")
    del facts


def _clients(plan: ExportPlan, entries: list[View]) -> Iterator[Verdict]:
    clients = {entry.at("client").optional() or "?": entry for entry in entries}
    missing = [client for client in plan.clients if client not in clients]
    extra = [client for client in clients if client not in plan.clients]
    if missing:
        yield fail(f"not exported to {', '.join(missing)}", "missing")
    if extra:
        yield fail(f"also exported to {', '.join(extra)}", "extra")
    for client, entry in clients.items():
        options = entry.at("options").texts()
        lacking = [option for option in plan.options if option not in options]
        if {"ro", "root_squash"} & set(lacking):
            yield fail(f"{client} without {', '.join(lacking)}", client)
        elif lacking:
            yield warn(f"{client} without {', '.join(lacking)}", client)


@CHECKS.node(
    "STORE.RPC",
    means="The head's NFS server does not answer this worker; a mount would hang.",
    do="On the head: systemctl status nfs-server; then the firewall on the rail.",
)
def rpc(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge whether the server answers an RPC from this worker."""
    if node.weights.mount is None:
        yield ok("mounts nothing")
        return
    head = facts.documents().get(facts.plan.nodes[0].name)
    if head is None or not installed(head):
        yield skip("the head's export is not installed yet")
        return
    section = document.section("nfs")
    if section.at("rpc").present:
        yield ok(
            section.at("rpc").text().splitlines()[0][:80] if section.at("rpc").text() else "ok"
        )
        return
    reason = section.at("errors", "rpc").optional() or "no answer"
    yield skip(reason) if "not installed" in reason else fail(reason)


@CHECKS.node(
    "STORE.VOLUME",
    problems=("P39",),
    means="A docker volume keeps its old options; a container that names it reads a stale model.",
    do="docker volume rm NAME.",
)
def volume(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge NFS volumes that earlier set-ups left behind; ours uses none."""
    del facts, node
    section = document.section("containers")
    if not section.at("docker_active").flag():
        yield ok("docker does not run")
        return

    def left() -> Iterator[Verdict]:
        for entry in section.at("volumes").items():
            name = entry.at("name").optional() or "?"
            yield warn(f"{name}: {entry.at('device').optional()}", name)

    yield from all_ok(left(), "no NFS volumes")


@CHECKS.node(
    "STORE.FRAGMENTS",
    problems=("P53",),
    means="The checkpoint lies in many small pieces on the disk and loads slowly.",
    do="e4defrag on the directory, or copy it anew.",
)
def fragments(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge the mean size of an extent of the shards on a local disk."""
    del facts
    if node.weights.mount is not None:
        yield ok("read over NFS")
        return
    section = document.section("checkpoint")
    extents = {name: count.integer() for name, count in section.at("extents").entries()}
    sizes = {name: size.integer() for name, size in section.at("files").entries()}
    pieces = sum(extents.get(name, 0) for name in sizes)
    if not pieces:
        yield skip("the file system tells no extents")
        return
    mean = sum(size for name, size in sizes.items() if name in extents) / pieces
    text = f"{pieces} extents of {mean / (1 << 20):.1f} MiB"
    yield warn(text) if mean < EXTENT_BYTES else ok(text)


@CHECKS.cluster(
    "CFG.TABLES",
    problems=("P88",),
    means="A table that one rank lacks makes the ranks disagree and hang at the first request.",
    do="Copy the file to every node.",
)
def speculation_tables(facts: Facts) -> Iterator[Verdict]:
    """Judge files that the command line names: there, and the same on every rank."""
    found: dict[str, dict[str, str]] = {}
    for node in facts.plan.nodes:
        document = facts.documents().get(node.name)
        for path in tables(node) if document is not None else ():
            entry = document.section("files").at(path, "sha256") if document else None
            digest = entry.optional() if entry else None
            found.setdefault(path, {})[node.name] = digest or "missing"
    for path, by_node in found.items():
        if "missing" in by_node.values() or len(set(by_node.values())) > 1:
            yield fail(f"{path}: {listed({n: d[:12] for n, d in by_node.items()})}", path)
        else:
            yield ok(path, path)
    if not found:
        yield ok("the plan names none")
