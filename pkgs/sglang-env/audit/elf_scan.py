"""Read what the dynamic loader would read from every ELF file of a wheel."""

from __future__ import annotations

import mmap
import shutil
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.segments import InterpSegment

from audit.wheels import LockedWheel, members, open_wheel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

MAGIC = b"\x7fELF"


@dataclass(frozen=True)
class ElfFile:
    """One ELF file. `path` is below site-packages; `search` is DT_RUNPATH, else DT_RPATH.

    `inherited` says that `search` is a DT_RPATH: it also serves the libraries loaded through this
    file. `symbols` are the version names asked of other libraries, such as `GLIBC_2.34`. `opens`
    are those of the looked-for names that stand as text in the file.
    """

    wheel: str
    path: str
    machine: str
    kind: str
    soname: str | None
    needed: tuple[str, ...]
    search: tuple[str, ...]
    inherited: bool
    interpreter: str | None
    symbols: tuple[str, ...]
    opens: tuple[str, ...]


def scan_wheels(
    folder: Path, wheels: list[LockedWheel], opens: Mapping[str, Iterable[str]]
) -> Iterator[ElfFile]:
    """Yield the ELF files of all wheels, ordered by wheel and path.

    Args:
        folder: where the wheels are.
        wheels: what the lock names.
        opens: by package name, the library names to look for in the text of its files.
    """
    for wheel in wheels:
        found = scan_wheel(folder, wheel, frozenset(opens.get(wheel.name, ())))
        yield from sorted(found, key=lambda elf: elf.path)


def scan_wheel(folder: Path, wheel: LockedWheel, opens: frozenset[str]) -> Iterator[ElfFile]:
    """Yield the ELF files of one wheel."""
    with open_wheel(folder, wheel) as archive:
        for path, info in members(archive):
            with archive.open(info) as stream:
                if stream.read(len(MAGIC)) != MAGIC:
                    continue
            with tempfile.TemporaryFile() as copy:
                with archive.open(info) as stream:
                    shutil.copyfileobj(stream, copy, 1 << 20)
                found = read_elf(wheel.name, path, copy, opens)
            if found is not None:
                yield found


def read_elf(
    wheel: str, path: str, stream: BinaryIO, opens: frozenset[str] = frozenset()
) -> ElfFile | None:
    """Read one ELF file from a real file, or None when it is no loadable ELF."""
    stream.seek(0)
    try:
        elf = ELFFile(stream)
        tags, interpreter = _dynamic(elf)
    except ELFError:
        return None
    symbols = {
        version.name
        for section in elf.iter_sections()
        if isinstance(section, GNUVerNeedSection)
        for _, versions in section.iter_versions()
        for version in versions
    }
    run_path = tags.get("runpath", [])
    search = run_path or tags.get("rpath", [])
    return ElfFile(
        wheel=wheel,
        path=path,
        machine=elf.header.e_machine,
        kind=elf.header.e_type,
        soname=next(iter(tags.get("soname", [])), None),
        needed=tuple(tags.get("needed", [])),
        search=tuple(part for entry in search for part in entry.split(":") if part),
        inherited=not run_path and "rpath" in tags,
        interpreter=interpreter,
        symbols=tuple(sorted(symbols)),
        opens=_named(stream, opens),
    )


def _dynamic(elf: ELFFile) -> tuple[dict[str, list[str]], str | None]:
    """Return the texts of the dynamic section by tag, and the loader of a program."""
    tags: dict[str, list[str]] = {}
    interpreter = None
    for segment in elf.iter_segments():
        if isinstance(segment, InterpSegment):
            interpreter = segment.get_interp_name()
        if isinstance(segment, DynamicSegment):
            for tag in segment.iter_tags():
                for attribute in ("needed", "soname", "rpath", "runpath"):
                    if hasattr(tag, attribute):
                        tags.setdefault(attribute, []).append(getattr(tag, attribute))
    return tags, interpreter


def _named(stream: BinaryIO, names: frozenset[str]) -> tuple[str, ...]:
    """Return those names that the file mentions as text: whole, or up to `.so` (`libX.so.%d`)."""
    if not names:
        return ()
    with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return tuple(
            sorted(
                name
                for name in names
                if any(
                    text.find(spelling.encode()) >= 0
                    for spelling in (
                        f"{name}\0",
                        f"{name.rpartition('.so.')[0]}.so\0",
                        f"{name.rpartition('.so.')[0]}.so.%d\0",
                    )
                )
            )
        )
