"""NCCL: one library, the same everywhere, new enough, and the ring's where there is a ring."""

from __future__ import annotations

from collections.abc import Iterator

from spark_appliance.doctor.checks.common import installed, listed
from spark_appliance.doctor.document import Document
from spark_appliance.doctor.registry import CHECKS, Facts
from spark_appliance.doctor.result import Verdict, fail, ok, skip, warn
from spark_appliance.model.plan import NodePlan

OLDEST = (2, 29)
"""2.28 crashes after about 1.1 M collectives (nccl#2213) and can dead-lock (sglang#33289)."""

FENCED = (2, 30, 7)
"""First version for which the fence of the aarch64 IB send path is published (nccl#2393)."""


def _libraries(document: Document) -> list[tuple[str, str, str | None]]:
    """Return path, hash and version of the engine's own libraries.

    Raises:
        Missing: when they were not reported.
    """
    return [
        (entry.at("path").text(), entry.at("sha256").text(), entry.at("version").optional())
        for entry in document.section("engine").at("nccl").items()
    ]


@CHECKS.node(
    "NCCL.VERSION",
    problems=("P22", "P23", "P24"),
    means="This NCCL is known to crash or hang after hours.",
    do="Use the engine version of the plan (NCCL 2.30.7 or newer).",
)
def version(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge the version of the engine's library."""
    del facts, node
    if not installed(document):
        yield skip("the engine is not installed yet")
        return
    for path, _, text in _libraries(document):
        numbers = tuple(int(part) for part in (text or "").split(".") if part.isdigit())
        if not numbers:
            yield skip(f"{path} tells no version", path)
        elif numbers < OLDEST:
            yield fail(f"{text}: {path}", path)
        elif numbers < FENCED:
            yield warn(f"{text}: {path}", path)
        else:
            yield ok(f"{text}", path)


@CHECKS.node(
    "NCCL.SINGLE",
    means="Two different NCCL libraries in one environment: the order of imports decides.",
    do="Remove the one that the engine does not bring itself.",
)
def single(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge whether the engine's environment holds one NCCL."""
    del facts, node
    if not installed(document):
        yield skip("the engine is not installed yet")
        return
    libraries = _libraries(document)
    hashes = {digest for _, digest, _ in libraries}
    if not libraries:
        yield fail("libnccl.so.2 was not found in the engine's environment")
    elif len(hashes) > 1:
        yield warn(", ".join(path for path, _, _ in libraries))
    else:
        yield ok(libraries[0][0])


@CHECKS.cluster(
    "NCCL.HASH",
    problems=("P18", "P22"),
    means="Ranks with different NCCL libraries fail at start, or hang later.",
    do="Put the same file on every rank: install or roll out again.",
)
def same(facts: Facts) -> Iterator[Verdict]:
    """Compare the library over the ranks: the plan's replacement, or the engine's own."""
    found = {}
    for node in facts.plan.nodes:
        document = facts.documents().get(node.name)
        if document is None:
            continue
        library = node.nccl_library
        if library is not None:
            entry = document.section("files").at(library.path)
            if not entry.present:
                yield fail(f"{library.path} is not there", node.name)
                continue
            digest = entry.at("sha256").text()
            if library.sha256 is not None and digest != library.sha256:
                yield fail(
                    f"{library.path} is {digest[:12]}…, pinned {library.sha256[:12]}…", node.name
                )
            found[node.name] = digest
        elif document.section("engine").at("nccl").present:
            found[node.name] = " ".join(sorted({digest for _, digest, _ in _libraries(document)}))
        else:
            yield skip("the engine is not installed yet, or its files are not known", node.name)
    if len(set(found.values())) > 1:
        yield fail(listed({name: digest[:12] for name, digest in found.items()}))
    elif found:
        yield ok(f"the same on {len(found)} ranks")


@CHECKS.node(
    "NCCL.MARKER",
    problems=("P17",),
    means="Stock NCCL connects ranks that have no cable between them: init fails on a ring.",
    do="Give topology.nccl_library a libnccl.so.2 built with switchless-ring support.",
)
def marker(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge whether the ring's library has ring support."""
    if facts.plan.topology.kind != "ring":
        yield ok(f"not needed on a {facts.plan.topology.kind}")
        return
    if node.nccl_library is None:
        yield fail("a ring without nccl_library")
        return
    path = node.nccl_library.path
    entry = document.section("files").at(path)
    if not entry.present:
        yield skip(f"{path} is not there (NCCL.HASH)")
    elif entry.at("markers", "ring").flag():
        yield ok(path)
    else:
        yield fail(f"{path} knows no NCCL_SWITCHLESS_RING_ONLY")
