"""The engine as installed: the same on every rank, whole, and able to run this model here."""

from __future__ import annotations

import re
from collections.abc import Iterator

from spark_appliance import names
from spark_appliance.doctor.checks.common import CONTAINER, all_ok, engine_runs, installed, listed
from spark_appliance.doctor.document import Document, Missing
from spark_appliance.doctor.registry import CHECKS, Facts
from spark_appliance.doctor.result import Verdict, fail, ok, skip, warn
from spark_appliance.model.plan import NodePlan

FLASHINFER = (0, 7, 2)
"""First version that the appliance is built for; DSpark needs both halves of TOPK=256 (#3817,
#3834), which are older."""

GB10 = (120, 121)
"""Device code that runs on GB10: code for sm_120 runs on sm_121 of the same major."""


@CHECKS.node(
    "IMG.RUNTIME",
    means="On DGX OS the engine runs in a container with the GPU.",
    do="Install docker or podman, and nvidia-container-toolkit.",
)
def runtime(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge whether the node can run a container with the GPU."""
    del facts
    if node.system == "nixos":
        yield ok("not needed on NixOS")
        return
    section = document.section("containers")
    docker, podman = section.at("docker").flag(), section.at("podman").flag()
    if not docker and not podman:
        yield fail("neither docker nor podman is installed")
    elif docker and not podman and not section.at("docker_active").flag():
        yield fail("docker is installed but does not run", do="systemctl enable --now docker.")
    elif not section.at("toolkit").flag():
        yield fail("nvidia-container-toolkit is not installed")
    else:
        yield ok("podman" if podman else "docker")


def identity(document: Document) -> str | None:
    """Return what the engine's unit runs: an image by digest, or a Python prefix.

    Raises:
        Missing: when the unit was not reported or is not installed.
    """
    if not installed(document):
        raise Missing("the engine is not installed yet")
    unit = document.section("engine").at("unit")
    image = unit.at("image").optional()
    if image is not None:
        return image.rpartition("@")[2]
    start = unit.at("ExecStart").text()
    if CONTAINER.search(start):
        return None
    prefixes = re.findall(r"--python[ =](/\S+)/bin/python3[\w.]*", start)
    prefixes += re.findall(r"(/\S+)/bin/python3[\w.]*", start)
    return prefixes[0] if prefixes else None


@CHECKS.cluster(
    "IMG.DIGEST",
    problems=("P80", "P81"),
    means="Ranks run different engines; forty differing files once caused wrong behaviour.",
    do="Install or roll out again; an image is named by its digest, never by a tag.",
)
def digest(facts: Facts) -> Iterator[Verdict]:
    """Compare what the engine's units run with the plan; images are named by digest and present."""
    planned = facts.plan.image.digest if facts.plan.image is not None else None
    found = {}
    for name, document in facts.documents().items():
        try:
            what = identity(document)
        except Missing as missing:
            yield skip(str(missing), name)
            continue
        if what is None:
            yield fail("the unit names no digest and no Python prefix", name)
            continue
        found[name] = what
        if planned is not None and what.startswith("sha256:") and what != planned:
            yield fail(f"the unit runs {what[:19]}…, the plan has {planned[:19]}…", name)
        if what.startswith("sha256:") and not _present(document, what):
            yield fail(f"{what[:19]}… is not on the node", name, do="Run spark-appliance install.")
    systems = {node.system for node in facts.plan.nodes}
    if len(systems) == 1 and len(set(found.values())) > 1:
        yield fail(listed({name: what[:60] for name, what in found.items()}))
    elif len(systems) > 1 and found:
        yield ok("NixOS and DGX OS are mixed; versions are compared by IMG.PACKAGES")
    elif found:
        yield ok(f"the same everywhere: {next(iter(found.values()))[:60]}")


@CHECKS.node(
    "IMG.LIVE",
    problems=("P80",),
    means="The engine that runs is not the one that was installed: it is older, or not ours.",
    do="Run spark-appliance restart.",
)
def live(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Compare the image of the engine's running container with the one that its unit names."""
    del facts
    if node.system == "nixos":
        yield ok("not needed on NixOS")
        return
    if not installed(document):
        yield skip("the engine is not installed yet")
        return
    planned = identity(document)
    if planned is None or not planned.startswith("sha256:"):
        yield skip("the unit names no digest")
        return
    if not document.section("containers").at("running").present:
        yield skip("only docker is asked for what runs, and it does not run")
        return
    running = [
        container.at("Image").text()
        for container in document.section("containers").at("running").items()
        if container.at("Names").optional() == names.CONTAINER
    ]
    if not running:
        if engine_runs(document):
            yield skip("the engine's unit is up, but its container is not there (yet)")
        else:
            yield ok("no engine runs")
        return
    wanted = {planned, *_ids(document, planned)}
    for name in running:
        what = name.rpartition("@")[2]
        if what in wanted:
            yield ok(f"{what[:19]}…")
        else:
            yield fail(f"{name[:100]} runs, the unit names {planned[:19]}…")


def _ids(document: Document, digest: str) -> set[str]:
    """Return the ids of the images with a digest: docker names a container's image by either."""
    images = document.section("containers").at("images")
    if not images.present:
        return set()
    return {
        image.at("ID").text()
        for image in images.items()
        if image.at("Digest").optional() == digest and image.at("ID").present
    }


def _present(document: Document, digest: str) -> bool:
    section = document.section("containers")
    for kind in ("images", "podman_images"):
        if not section.at(kind).present:
            continue
        for image in section.at(kind).items():
            named = [image.at(key).optional() or "" for key in ("Digest", "ID", "digest", "id")]
            if digest in named or digest.partition(":")[2] in named:
                return True
            if image.at("digests").present and digest in image.at("digests").texts():
                return True
    return False


@CHECKS.cluster(
    "IMG.PACKAGES",
    problems=("P80", "P101"),
    means="Ranks with different versions hang or answer wrongly.",
    do="Install or roll out again from one build.",
)
def packages(facts: Facts) -> Iterator[Verdict]:
    """Compare the versions of the engine's packages over the nodes, and with the plan."""
    versions: dict[str, dict[str, str]] = {}
    for node, document in facts.documents().items():
        view = document.section("engine").at("packages")
        if not view.present:
            yield skip("the engine's files are not known on this node", node)
            continue
        for package, found in view.entries():
            numbers = found.texts()
            versions.setdefault(package, {})[node] = " and ".join(numbers)
            if len(numbers) > 1:
                yield warn(f"{package} is there twice: {' and '.join(numbers)}", node)

    def wrong() -> Iterator[Verdict]:
        for package, by_node in versions.items():
            if len(set(by_node.values())) > 1:
                yield fail(f"{package}: {listed(by_node)}", package)
        engine = facts.plan.engine
        for node, version in versions.get(engine.package, {}).items():
            if version != engine.version:
                yield fail(
                    f"{node}: {engine.package} {version}, the plan is for {engine.version}", node
                )

    if versions:
        yield from all_ok(wrong(), f"{len(versions)} packages alike")


@CHECKS.node(
    "IMG.MODELCLASS",
    problems=("P79",),
    means="The engine does not know the model's architecture and refuses to load it.",
    do="Use the engine version of the plan.",
)
def model_class(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge whether the engine's sources name the checkpoint's architecture."""
    del facts, node
    if not installed(document):
        yield skip("the engine is not installed yet")
        return
    classes = document.section("engine").at("classes")
    wanted, known = classes.at("wanted").texts(), classes.at("known").texts()
    missing = [name for name in wanted if name not in known]
    if missing:
        yield fail(f"unknown: {', '.join(missing)}")
    else:
        yield ok(", ".join(wanted) or "the checkpoint names none")


@CHECKS.node(
    "IMG.FLASHINFER",
    problems=("P83",),
    means="Older FlashInfer lacks attention kernels that DSpark needs on SM 12.x.",
    do="Use the engine version of the plan.",
)
def flashinfer(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge the version of FlashInfer."""
    del facts, node
    if not installed(document):
        yield skip("the engine is not installed yet")
        return
    found = document.section("engine").at("packages", "flashinfer-python")
    version = next(iter(found.texts()), "") if found.present else ""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if not version:
        yield skip("flashinfer-python was not found among the engine's packages")
    elif numbers < FLASHINFER:
        yield fail(f"{version}, {'.'.join(map(str, FLASHINFER))} or newer needed")
    else:
        yield ok(version)


@CHECKS.node(
    "IMG.ARCH",
    problems=("P82",),
    means="The kernels have no code for GB10: 'no kernel image is available'.",
    do="Use an sgl-kernel built for CUDA 13 with sm_120 or sm_121.",
)
def gpu_code(facts: Facts, node: NodePlan, document: Document) -> Iterator[Verdict]:
    """Judge the architectures of sgl_kernel's main library."""
    del facts, node
    if not installed(document):
        yield skip("the engine is not installed yet")
        return
    if engine_runs(document):
        yield skip("not read while the engine runs")
        return
    found = {}
    for path, numbers in document.section("engine").at("architectures").entries():
        if "common_ops" in path:
            found[path] = [entry.integer() for entry in numbers.items()]
    if not found:
        yield skip("sgl_kernel has no common_ops")
    for path, codes in found.items():
        text = ", ".join(f"sm_{code}" for code in codes) or "no device code"
        good = any(code in GB10 for code in codes)
        yield ok(text, path) if good else fail(f"{path}: {text}", path)
