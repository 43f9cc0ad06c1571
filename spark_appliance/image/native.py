"""Compile the native library of a plugin with the pinned compiler of the recipe.

The compiler is a wheel, checked by sha256 like every other file and unpacked for the one run: what
is installed on the machine has no part in the bytes.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from debian.debfile import DebFile

from spark_appliance import process
from spark_appliance.errors import InputError
from spark_appliance.files import write_text
from spark_appliance.image.errors import ImageError
from spark_appliance.image.lock import DebPackage, ImageLock
from spark_appliance.image.recipe import Compiler, Native
from spark_appliance.image.store import Store, hash_file

_TIMEOUT_S = 1800.0
_SUFFIXES = (".c", ".cc", ".cpp")


def packages(lock: ImageLock, plugin: str) -> tuple[DebPackage, ...]:
    """Return the Debian packages that a plugin is compiled against."""
    name = Native.profile(plugin)
    return tuple(package for package in lock.debian.packages if name in package.profiles)


def compiler(plugin: str, native: Native, machine: str | None = None) -> Compiler:
    """Return the compiler for a machine (default: this one).

    Raises:
        InputError: the recipe pins none for it.
    """
    wanted = machine or platform.machine()
    for found in native.compilers:
        if found.machine == wanted:
            return found
    raise InputError.one(
        "image.compiler",
        f"the library of {plugin} is compiled with {native.compiler}, which the recipe pins for "
        f"{', '.join(c.machine for c in native.compilers)}; this machine is {wanted}",
        f"compile it on one of those and give it with --plugin-library {plugin}=FILE",
    )


def build(
    native: Native, chosen: Compiler, folder: Path, debs: Sequence[DebPackage], store: Store
) -> Path:
    """Return the library, compiled now or earlier from the same inputs.

    Args:
        native: how it is compiled.
        chosen: what ``compiler`` returns.
        folder: the project.
        debs: what ``packages`` returns.
        store: where compiler and packages are, and where the result is kept.

    Raises:
        InputError: the project has no sources.
        ImageError: compiler or a package is missing or wrong, or the compiler fails.
    """
    sources = _sources(folder, native)
    key = hashlib.sha256(native.model_dump_json().encode() + chosen.machine.encode())
    key.update(chosen.sha256.encode())
    for path in _inputs(folder, native):
        # fixed lengths, so that no name can pass for content
        place = path.relative_to(folder).as_posix().encode()
        key.update(hashlib.sha256(place).digest() + bytes.fromhex(hash_file(path)))
    for package in debs:
        key.update(package.sha256.encode())
    kept = store.folder / "native" / key.hexdigest() / native.library
    noted = kept.with_name(f"{kept.name}.sha256")
    if _whole(kept, noted):
        return kept
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ImageError(f"{kept.parent}: cannot write: {error.strerror}") from None
    with tempfile.TemporaryDirectory(prefix="compile-", dir=kept.parent) as name:
        work = Path(name)
        for package in debs:
            with DebFile(str(store.verified(package))) as archive:
                tar: tarfile.TarFile = archive.data.tgz()
                tar.extractall(work / "root", filter="data")
        with zipfile.ZipFile(store.verified(chosen)) as wheel:
            wheel.extractall(work / "compiler")  # noqa: S202 - checked by its hash
        (work / "compiler" / native.command[0]).chmod(0o755)
        exports = "".join(f"{symbol}; " for symbol in native.exports)
        (work / "exports.map").write_text(f"{{ global: {exports}local: *; }};\n")
        process.run(
            argv(native, sources, work),
            timeout=_TIMEOUT_S,
            env={"ZIG_GLOBAL_CACHE_DIR": str(work / "c"), "ZIG_LOCAL_CACHE_DIR": str(work / "c")},
        )
        with (work / native.library).open("rb") as made:
            digest = hashlib.file_digest(made, "sha256").hexdigest()
            os.fsync(made.fileno())
        os.replace(work / native.library, kept)  # noqa: PTH105 - atomic, same folder
    # after it: a library without this, or with another's, is compiled again
    write_text(noted, f"{digest}\n")
    return kept


def _whole(library: Path, noted: Path) -> bool:
    try:
        return hash_file(library) == noted.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return False


def argv(native: Native, sources: Sequence[Path], work: Path) -> list[str]:
    """Return the compiler's command line; nothing of it depends on the host but paths."""
    return [
        *(str(work / "compiler" / native.command[0]), *native.command[1:]),
        *("-target", native.target),
        *("-shared", "-fPIC", "-s", *native.flags),
        f"-ffile-prefix-map={sources[0].parent}=src",
        f"-ffile-prefix-map={work}=work",
        *("-isystem", str(work / "root/usr/include")),
        *(str(path) for path in sources),
        *(str(work / "root" / path) for path in native.archives),
        f"-Wl,--version-script={work / 'exports.map'}",
        *("-o", str(work / native.library)),
    ]


def _sources(folder: Path, native: Native) -> list[Path]:
    found = sorted(
        path
        for name in native.sources
        for path in (folder / name).iterdir()
        if path.suffix in _SUFFIXES
    )
    if not found:
        raise InputError.one("image.plugin", f"{folder}: no sources")
    return found


def _inputs(folder: Path, native: Native) -> list[Path]:
    """Return every file below the folders of the sources: headers and what they include too."""
    return sorted(
        {path for name in native.sources for path in (folder / name).rglob("*") if path.is_file()}
    )
