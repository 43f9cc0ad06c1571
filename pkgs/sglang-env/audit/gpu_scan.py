"""List the device code in the wheels with NVIDIA's cuobjdump."""

from __future__ import annotations

import mmap
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from elftools.elf.elffile import ELFFile

from audit import fatbin
from audit.errors import AuditError
from audit.gpu_rules import GpuCode
from audit.wheels import LockedWheel, members, open_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator

CUDA_SECTIONS = {".nv_fatbin", "__nv_relfatbin"}
"""Where nvcc puts fat binaries (its documentation, "Separate compilation")."""

EM_CUDA = 190
"""ELF machine number of a bare cubin (elf.h)."""

ELF_MAGIC = b"\x7fELF"
ENTRY = re.compile(r"^(?:ELF|PTX) file\s+\d+:.*?\.((?:sm|compute)_\d+[af]?)\.(cubin|ptx)\s*$")


def scan_wheels(folder: Path, wheels: list[LockedWheel], cuobjdump: Path) -> Iterator[GpuCode]:
    """Yield the files that hold device code, ordered by wheel and path.

    Raises:
        AuditError: cuobjdump cannot be started or fails on a file.
    """
    for wheel in wheels:
        yield from sorted(scan_wheel(folder, wheel, cuobjdump), key=lambda code: code.path)


def scan_wheel(folder: Path, wheel: LockedWheel, cuobjdump: Path) -> Iterator[GpuCode]:
    """Yield the files of one wheel that hold device code."""
    with open_wheel(folder, wheel) as archive, tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "file"
        for path, info in members(archive):
            with archive.open(info) as stream:
                head = stream.read(4)
            if head not in {ELF_MAGIC, fatbin.MAGIC}:
                continue
            with archive.open(info) as stream, copy.open("wb") as out:
                shutil.copyfileobj(stream, out, 1 << 20)
            if not _has_device_code(copy):
                continue
            code = GpuCode(wheel.name, path, *list_code(cuobjdump, copy, path))
            if code.sass or code.ptx:
                yield code


def scan_root(root: Path, site: Path, cuobjdump: Path) -> Iterator[GpuCode]:
    """Yield the files of an unpacked root that hold device code, ordered by path.

    Args:
        root: the root; links are not followed.
        site: its site-packages. What is below has the path that it has in its wheel, everything
            else its path in the root with a leading slash.
        cuobjdump: NVIDIA's program.

    Raises:
        AuditError: cuobjdump cannot be started or fails on a file.
    """
    with tempfile.TemporaryDirectory() as name:
        # a link, because samples are written beside the file that is read
        link = Path(name) / "file"
        for file in sorted(root.rglob("*")):
            if file.is_symlink() or not file.is_file() or not _may_hold_code(file):
                continue
            below = file.is_relative_to(site)
            path = str(file.relative_to(site)) if below else f"/{file.relative_to(root)}"
            link.unlink(missing_ok=True)
            link.symlink_to(file.absolute())
            code = GpuCode("", path, *list_code(cuobjdump, link, path))
            if code.sass or code.ptx:
                yield code


def _may_hold_code(file: Path) -> bool:
    with file.open("rb") as stream:
        head = stream.read(len(ELF_MAGIC))
    return head in {ELF_MAGIC, fatbin.MAGIC} and _has_device_code(file)


def list_code(cuobjdump: Path, file: Path, label: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return how many SASS binaries and PTX texts `file` has, by architecture."""
    sass: Counter[str] = Counter()
    ptx: Counter[str] = Counter()
    for option, found in (("--list-elf", sass), ("--list-ptx", ptx)):
        found.update(_listed(cuobjdump, option, file, label))
    for (kind, name), count in _embedded(cuobjdump, file, label).items():
        (sass if kind == "sass" else ptx)[name] += count
    return dict(sass), dict(ptx)


def _listed(cuobjdump: Path, option: str, file: Path, label: str) -> Iterator[str]:
    for line in _run(cuobjdump, option, file, label).splitlines():
        match = ENTRY.match(line)
        if match is not None:
            yield match[1] if match[2] == "cubin" else match[1].replace("sm_", "compute_")


def _embedded(cuobjdump: Path, file: Path, label: str) -> Counter[tuple[str, str]]:
    """Count the code in containers that cuobjdump does not list, by kind and architecture."""
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = list(fatbin.entries(data, _listed_ranges(stream)))
        names: dict[tuple[str, int], str] = {}
        for entry in found:
            key = entry.kind, entry.architecture
            if key in names:
                continue
            sample = file.with_suffix(".fatbin")
            sample.write_bytes(data[entry.start : entry.end])
            option = "--list-elf" if entry.kind == "sass" else "--list-ptx"
            wanted = re.compile(rf"(?:sm|compute)_{entry.architecture}[af]?")
            same = [n for n in _listed(cuobjdump, option, sample, label) if wanted.fullmatch(n)]
            if not same:
                raise AuditError(f"{label}: a container names {key}, cuobjdump does not find it")
            names[key] = same[0]
    return Counter((entry.kind, names[entry.kind, entry.architecture]) for entry in found)


def _listed_ranges(stream: BinaryIO) -> list[tuple[int, int]]:
    """Return the parts of an ELF file that cuobjdump reads; all of a file that is no ELF."""
    stream.seek(0)
    if stream.read(len(ELF_MAGIC)) != ELF_MAGIC:
        return [(0, sys.maxsize)]
    stream.seek(0)
    return [
        (section["sh_offset"], section["sh_offset"] + section["sh_size"])
        for section in ELFFile(stream).iter_sections()
        if section.name in CUDA_SECTIONS
    ]


def _has_device_code(file: Path) -> bool:
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as text:
        machine = int.from_bytes(text[18:20], "little")
        return text.find(fatbin.MAGIC) >= 0 or machine == EM_CUDA


def _run(cuobjdump: Path, option: str, file: Path, label: str) -> str:
    try:
        done = subprocess.run(
            [str(cuobjdump), option, str(file)], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise AuditError(
            f"{cuobjdump}: {error.strerror}; install the wheel nvidia-cuda-cuobjdump and give "
            "--cuobjdump or $CUOBJDUMP"
        ) from error
    # A file without any code of the asked kind makes it exit with 255 and say so.
    if done.returncode and "does not contain" not in done.stdout + done.stderr:
        raise AuditError(f"{label}: cuobjdump {option}: {done.stderr.strip() or done.stdout[:200]}")
    return done.stdout
