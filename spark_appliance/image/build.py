"""Build an image: jobs for the layers, their results, and the layout around them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from spark_appliance.image import (
    glue,
    oci,
    plugins,
    sbom,
    tar,
)
from spark_appliance.image import layer as layers
from spark_appliance.image.base import UID
from spark_appliance.image.errors import ImageError, write_failure
from spark_appliance.image.lock import ImageLock, Selection
from spark_appliance.image.plugins import Plugin
from spark_appliance.image.recipe import Recipe
from spark_appliance.image.store import Store, hash_file
from spark_appliance.image.wheels import Layout

_NOTES = "spark-layers.json"
"""In the output: layer key -> Result, so that the next build can take a layer over."""
_LAYER_CODE = ("base", "debs", "elf", "layer", "ldcache", "tar", "tree", "wheels")
LABEL = "dev.spark-appliance."
"""What the names of our own labels begin with."""

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Request:
    """Everything that decides the bytes of an image, and where the SBOM finds licences."""

    recipe: Recipe
    lock: ImageLock
    selection: Selection
    plugins: tuple[Plugin, ...]
    licences: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Built:
    """A finished image; ``reused`` names layers that were taken over from the former output."""

    image: oci.Image
    layers: tuple[layers.Result, ...]
    reused: tuple[str, ...]
    reference: str


def code_version() -> str:
    """Return the sha256 of the modules that decide a layer's bytes: other code, other layers."""
    total = hashlib.sha256()
    for name in _LAYER_CODE:
        total.update(Path(__file__).with_name(f"{name}.py").read_bytes() + b"\0")
    return total.hexdigest()


def jobs(request: Request) -> list[layers.Job]:
    """Return the layers in their order; each wheel is in exactly one."""
    recipe = request.recipe
    selection = request.selection
    found = [layers.Job("base", "", packages=selection.debs, deb_drops=recipe.debian.drop)]
    left = list(selection.wheels)
    for rule in recipe.layers:
        taken = [wheel for wheel in left if re.search(rule.wheels, wheel.name)]
        left = [wheel for wheel in left if wheel not in taken]
        if taken:
            names = {wheel.name for wheel in taken}
            drops = tuple((d.wheel, d.paths) for d in recipe.wheels_drop if d.wheel in names)
            found.append(layers.Job(rule.name, "", wheels=tuple(taken), drops=drops))
    if left:
        raise ImageError(f"no layer of the recipe takes: {', '.join(w.name for w in left)}")
    version = code_version()
    return [_keyed(job, version, recipe.target.python) for job in found]


def _keyed(job: layers.Job, version: str, python: str) -> layers.Job:
    inputs = [
        job.name,
        [[p.name, p.sha256] for p in job.packages],
        [[w.name, w.sha256] for w in job.wheels],
        [d.paths for d in job.deb_drops],
        job.drops,
        version,
        python,
    ]
    key = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
    return layers.Job(job.name, key, job.packages, job.wheels, job.deb_drops, job.drops)


def build(
    request: Request,
    store: Store,
    out: Path,
    *,
    workers: int = 2,
    fresh: bool = False,
    report: Report = lambda _: None,
) -> Built:
    """Build an image into a folder; an older image there is replaced in one step.

    Args:
        request: what to build.
        store: where the files are; each is checked before use.
        out: folder of the OCI layout.
        workers: processes at a time.
        fresh: take no layer over from an older image in ``out``.
        report: called with a line for each finished layer.

    Raises:
        ImageError: a file is missing or wrong, the output cannot be written, or another build
            writes to the same folder.
    """
    out = out.absolute()
    if out.exists() and not (out / "oci-layout").is_file() and any(out.iterdir()):
        raise ImageError(f"{out}: not empty and no image\n    remedy: choose a new folder for -o")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _only_build(out), _work_folder(out) as work:
            return _build(request, store, out, work, workers, fresh, report)
    except OSError as error:
        raise write_failure(out, error) from None


def _build(
    request: Request, store: Store, out: Path, work: Path, workers: int, fresh: bool,
    report: Report,
) -> Built:  # fmt: skip
    layout = oci.Layout(work)
    layout.create()
    environment = Layout(request.recipe.target.python)
    todo = jobs(request)
    old = {} if fresh else _notes(out)
    results: dict[str, layers.Result] = {}
    for job in todo:
        if job.key in old and _take_over(old[job.key], out, layout):
            results[job.name] = old[job.key]
            report(f"{job.name}: taken over from the former image")
    reused = tuple(results)
    rest = [job for job in todo if job.name not in results]
    results |= _write_layers(rest, store, environment, work, workers, report)
    ordered = [results[job.name] for job in todo]
    last = _glue_layer(request, environment, ordered, layout)
    report(_line(last))
    ordered.append(last)
    reference = reference_of(request)
    image = oci.write_image(
        layout,
        config=config(request, environment, ordered),
        layers=[result.blob for result in ordered],
        reference=reference,
        sbom=sbom.build(
            request.selection,
            request.plugins,
            request.licences,
            name=request.recipe.name,
            version=_version(request),
            distribution=request.recipe.target.suites[0],
        ),
        variant=request.recipe.target.variant,
        architecture=request.recipe.target.architecture,
    )
    notes = {result.key: result.as_data() for result in ordered[:-1]}
    (work / _NOTES).write_text(json.dumps(notes, sort_keys=True))
    _publish(work, out)
    return Built(image, tuple(ordered), reused, reference)


def _write_layers(
    todo: Sequence[layers.Job], store: Store, environment: Layout, work: Path, workers: int,
    report: Report,
) -> dict[str, layers.Result]:  # fmt: skip
    # the largest first, so that the last one does not run alone for long
    order = sorted(todo, key=lambda job: ("cuda", "rest", "torch", "base").index(job.name))
    results = {}
    pool = ProcessPoolExecutor(max(1, min(workers, len(order) or 1)))
    try:
        futures: list[Future[layers.Result]] = [
            pool.submit(layers.write, job, store, environment, work) for job in order
        ]
        for future in futures:
            result = future.result()
            results[result.name] = result
            report(_line(result))
    except BrokenProcessPool:
        raise ImageError(
            "a process of the build was killed\n"
            "    remedy: free memory (each layer takes up to 400 MiB) or use --jobs 1"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
    return results


def _glue_layer(
    request: Request, environment: Layout, done: Sequence[layers.Result], layout: oci.Layout
) -> layers.Result:
    target = request.recipe.target
    paths = frozenset(path for result in done for path in result.libraries)
    names = {folder: found for result in done for folder, found in result.names.items()}
    glued = glue.skeleton(environment, target.multiarch, paths, _python_version(request))
    for plugin in request.plugins:
        plugins.install(glued, plugin, environment)
    folders = glue.library_folders(environment, paths)
    cache = glue.loader_cache(target.multiarch, names, folders, paths, glued)
    glued.file("etc/ld.so.cache", cache)
    blob = layout.put_stream(tar.stream(glued, layers.MTIME))
    return layers.Result("glue", "", blob.digest, blob.size, len(glued.entries), (), {})


def config(request: Request, environment: Layout, done: Sequence[layers.Result]) -> dict[str, Any]:
    """Return the image's config, whose sha256 is the image id: settings, labels and layers."""
    profile = request.recipe.profiles[request.selection.profile]
    created = (
        datetime.strptime(request.lock.debian.snapshot, "%Y%m%dT%H%M%SZ")
        .replace(tzinfo=UTC)
        .strftime("%Y-%m-%dT%H:%M:%SZ")
    )
    compilers = any(package.name == "g++" for package in request.selection.debs)
    settings: dict[str, Any] = {
        "Env": glue.environment(environment, compilers=compilers),
        "User": f"{UID}:{UID}",
        "WorkingDir": "/cache",
        "Labels": labels(request),
    }
    if profile.entrypoint:
        settings["Entrypoint"] = list(profile.entrypoint)
    if profile.command:
        settings["Cmd"] = list(profile.command)
    return {
        "architecture": request.recipe.target.architecture,
        "variant": request.recipe.target.variant,
        "os": "linux",
        "created": created,
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [result.digest for result in done]},
        "history": [
            {"created": created, "created_by": f"spark-appliance image build: {result.name}"}
            for result in done
        ],
    }


def labels(request: Request) -> dict[str, str]:
    """Return the labels: lock hash, source of each plugin, version, profile."""
    found = {
        "org.opencontainers.image.title": request.recipe.name,
        "org.opencontainers.image.version": _version(request),
        f"{LABEL}lock": f"sha256:{request.selection.digest}",
        f"{LABEL}profile": request.selection.profile,
        f"{LABEL}debian-snapshot": request.lock.debian.snapshot,
    }
    for plugin in request.plugins:
        found[f"{LABEL}plugin.{plugin.name}"] = f"{plugin.version} sha256:{plugin.digest}"
    return found


def reference_of(request: Request) -> str:
    """Return name and tag of an image."""
    return f"{request.recipe.name}:{_version(request)}-{request.selection.profile}"


def _version(request: Request) -> str:
    name = request.recipe.version_of
    found = (wheel.version for wheel in request.selection.wheels if wheel.name == name)
    return next(found, "0")


def _python_version(request: Request) -> str:
    name = f"python{request.recipe.target.python}-minimal"
    version = next((d.version for d in request.selection.debs if d.name == name), "0")
    return version.split("-")[0]


def _line(result: layers.Result) -> str:
    return f"{result.name}: {result.files} entries, {result.size} bytes, {result.digest}"


def _notes(out: Path) -> dict[str, layers.Result]:
    try:
        data = json.loads((out / _NOTES).read_text())
        return {key: layers.Result.from_data(item) for key, item in data.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _take_over(result: layers.Result, out: Path, layout: oci.Layout) -> bool:
    """Link a blob of the former image into the new one, if it still has its bytes."""
    path = oci.Layout(out).path(result.digest)
    try:
        if f"sha256:{hash_file(path)}" != result.digest:
            return False
        target = layout.path(result.digest)
        try:
            os.link(path, target)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
                raise
            shutil.copyfile(path, target)
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def _only_build(out: Path) -> Iterator[None]:
    """Hold a lock beside the output; a second build to the same place is refused."""
    path = out.with_name(f".{out.name}.lock")
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ImageError(
                f"{out}: another build is writing here\n"
                "    remedy: wait for it, or choose another folder for -o"
            ) from None
        yield


@contextlib.contextmanager
def _work_folder(out: Path) -> Iterator[Path]:
    """A folder beside the output; whatever is left in it at the end goes away."""
    for old in out.parent.glob(f".{out.name}.building-*"):  # of builds that were killed
        shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.building-", dir=out.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(work: Path, out: Path) -> None:
    """Put the finished layout in its place."""
    for path in (work, *work.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    old = out.with_name(f".{out.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    work.rename(out)
    shutil.rmtree(old, ignore_errors=True)
