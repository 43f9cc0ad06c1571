"""Judge the ELF files of the locked wheels against `libraries.json`. Pure."""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from audit.libraries import OWN, Libraries

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from audit.elf_scan import ElfFile

SYMBOL = re.compile(r"(GLIBC|GLIBCXX|CXXABI|GOMP|GCC)_(\d+(?:\.\d+)+)")
ORIGIN = re.compile(r"\$(?:ORIGIN\b|\{ORIGIN\})")


@dataclass
class Closure:
    """What the audit found. `problems` is empty when the table and the wheels agree."""

    problems: list[str] = field(default_factory=list)
    files: int = 0
    needed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """How many DT_NEEDED entries each kind of answer satisfied."""
    without_search_path: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Library of a wheel -> wheels that name it but whose own search path does not lead there.

    In a merged site-packages without patched files (the container) these need the loader's cache
    or a library that was loaded before.
    """
    newest_symbols: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        """Return plain, sorted data for the result file."""
        return {
            "elf_files": self.files,
            "needed": dict(sorted(self.needed.items())),
            "newest_symbols": {
                name: ".".join(map(str, version))
                for name, version in sorted(self.newest_symbols.items())
            },
            "problems": sorted(self.problems),
            "without_search_path": {
                name: sorted(wheels) for name, wheels in sorted(self.without_search_path.items())
            },
        }


def judge(
    elfs: Iterable[ElfFile],
    table: Libraries,
    files: Mapping[str, str],
    glibc: tuple[int, int],
) -> Closure:
    """Check that every DT_NEEDED is satisfied and that nothing is declared in vain.

    Args:
        elfs: all ELF files of the locked wheels.
        table: the declarations.
        files: wheel file name by package name; poetry2nix patches only `manylinux` wheels.
        glibc: (major, minor) of the oldest system the wheels must run on.
    """
    elfs = list(elfs)
    result = Closure(files=len(elfs))
    native = [elf for elf in elfs if elf.machine == table.machine]
    by_wheel: dict[str, list[ElfFile]] = defaultdict(list)
    for elf in native:
        by_wheel[elf.wheel].append(elf)
    owned = {
        wheel: {posixpath.basename(elf.path) for elf in group} for wheel, group in by_wheel.items()
    }
    used_links: set[tuple[str, str]] = set()
    used_absent: set[tuple[str, str]] = set()
    merged = {elf.path for elf in native}
    inherited = _inherited(native)

    for elf in native:
        _check_header(elf, table, files, result)
        _check_symbols(elf, glibc, result)
        for name in elf.needed:
            answer = _answer(elf.wheel, name, table, owned)
            used_links.update((elf.wheel, source) for source in answer)
            if len(answer) > 1:
                result.problems.append(
                    f"{elf.wheel}: {name} has several declared sources: {', '.join(answer)}"
                )
            elif not answer and name in table.absent.get(elf.wheel, {}):
                used_absent.add((elf.wheel, name))
                result.needed["absent"] += 1
            elif not answer:
                result.problems.append(f"{elf.wheel}: {elf.path} needs {name}: nobody has it")
            else:
                source = answer[0]
                result.needed[_kind(source, table)] += 1
                from_wheel = source == OWN or source in owned
                known = (elf.wheel, name) in inherited or _found(elf, name, merged)
                if from_wheel and not known:
                    result.without_search_path[name].add(elf.wheel)

    result.problems += _foreign_problems(elfs, table)
    result.problems += _unused(table, used_links, used_absent)
    result.problems += _open_problems(table, by_wheel, owned)
    result.problems = sorted(set(result.problems))
    return result


def _answer(wheel: str, name: str, table: Libraries, owned: Mapping[str, set[str]]) -> list[str]:
    """Who satisfies `name` for `wheel`: itself first, then what it links, then what all have."""
    if name in owned[wheel]:
        return [OWN]
    declared = [
        source
        for source in table.links.get(wheel, ())
        if name in owned.get(source, ())
        or (source in table.providers and name in table.providers[source].libraries)
    ]
    if declared:
        return declared
    return [
        one.name for one in table.providers.values() if one.everywhere and name in one.libraries
    ]


def _kind(source: str, table: Libraries) -> str:
    if source == OWN:
        return "own wheel"
    if source == "driver":
        return "driver"
    return "system" if source in table.providers else "other wheel"


def _check_header(
    elf: ElfFile, table: Libraries, files: Mapping[str, str], result: Closure
) -> None:
    if elf.interpreter not in {None, table.interpreter}:
        result.problems.append(f"{elf.wheel}: {elf.path} wants the loader {elf.interpreter}")
    if elf.needed and "manylinux" not in files[elf.wheel]:
        result.problems.append(
            f"{elf.wheel}: {files[elf.wheel]} has native files but no manylinux tag, so poetry2nix "
            "leaves them unpatched"
        )


def _check_symbols(elf: ElfFile, glibc: tuple[int, int], result: Closure) -> None:
    for symbol in elf.symbols:
        match = SYMBOL.fullmatch(symbol)
        if match is None:
            continue
        name, version = match[1], tuple(map(int, match[2].split(".")))
        result.newest_symbols[name] = max(version, result.newest_symbols.get(name, version))
        if name == "GLIBC" and version[:2] > glibc:
            result.problems.append(f"{elf.wheel}: {elf.path} needs {symbol}, newer than the target")


def _found(elf: ElfFile, name: str, merged: Container[str]) -> bool:
    """Whether the file's own search path leads to `name` in a merged site-packages."""
    return any(f"{directory}/{name}" in merged for directory in _directories(elf))


def _inherited(native: Iterable[ElfFile]) -> set[tuple[str, str]]:
    """(wheel, library) that a DT_RPATH of some file of the wheel leads to.

    A library loaded through that file searches there too, so the siblings that auditwheel puts in
    `*.libs` find each other.
    """
    native = list(native)
    by_directory: dict[str, set[str]] = defaultdict(set)
    for elf in native:
        by_directory[posixpath.dirname(elf.path)].add(posixpath.basename(elf.path))
    return {
        (elf.wheel, name)
        for elf in native
        if elf.inherited
        for directory in _directories(elf)
        for name in by_directory.get(directory, ())
    }


def _directories(elf: ElfFile) -> list[str]:
    """Return the directories below site-packages of a file's search path."""
    return [
        posixpath.normpath(ORIGIN.sub("/" + posixpath.dirname(elf.path), entry)).lstrip("/")
        for entry in elf.search
        if ORIGIN.match(entry)
    ]


def _foreign_problems(elfs: Iterable[ElfFile], table: Libraries) -> list[str]:
    seen = {(elf.wheel, elf.machine) for elf in elfs if elf.machine != table.machine}
    declared = {(wheel, machine) for wheel, one in table.foreign.items() for machine in one}
    return [f"{wheel}: has {machine} code, not declared" for wheel, machine in seen - declared] + [
        f"libraries.json: foreign {wheel} {machine}: no such file"
        for wheel, machine in declared - seen
    ]


def _unused(
    table: Libraries, links: set[tuple[str, str]], absent: set[tuple[str, str]]
) -> list[str]:
    unused_links = {(wheel, one) for wheel, all_ in table.links.items() for one in all_} - links
    unused_absent = {(wheel, one) for wheel, all_ in table.absent.items() for one in all_} - absent
    return [
        *(f"libraries.json: links {wheel} -> {one}: not needed" for wheel, one in unused_links),
        *(f"libraries.json: absent {wheel} {one}: not needed" for wheel, one in unused_absent),
    ]


def _open_problems(
    table: Libraries, by_wheel: Mapping[str, list[ElfFile]], owned: Mapping[str, set[str]]
) -> list[str]:
    problems = []
    for wheel, sources in table.opens.items():
        named = {
            name
            for elf in by_wheel.get(wheel, [])
            for name in elf.opens
            if name != posixpath.basename(elf.path)
        }
        for source, names in sources.items():
            for name in names:
                where = f"libraries.json: opens {wheel} {name}"
                if name not in named:
                    problems.append(f"{where}: the wheel does not name it")
                if source == OWN:
                    has = name in owned.get(wheel, ())
                elif source in table.providers:
                    has = name in table.providers[source].libraries
                else:
                    directory = table.directories.get(source, "")
                    has = any(elf.path == f"{directory}/{name}" for elf in by_wheel.get(source, []))
                if not has:
                    problems.append(f"{where}: {source} does not have it")
    used = {source for sources in table.opens.values() for source in sources}
    problems += [
        f"libraries.json: directories {name}: nobody opens a library there"
        for name in table.directories
        if name not in used
    ]
    return problems
