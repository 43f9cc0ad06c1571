"""ELF closure: the rules on made-up files, the reader on a real one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("elftools", reason="pyelftools is not installed: it reads ELF files")

from audit.elf_rules import judge
from audit.elf_scan import ElfFile, read_elf
from audit.errors import AuditError
from audit.libraries import Libraries, load, parse

FILES = {"a": "a-1-cp313-cp313-manylinux_2_28_aarch64.whl", "b": "b-1-py3-none-any.whl"} | {
    name: f"{name}-1-py3-none-manylinux_2_28_aarch64.whl" for name in ("c", "d")
}


def table(**changes: Any) -> Libraries:
    data: dict[str, Any] = {
        "target": {"machine": "EM_AARCH64", "interpreter": "/lib/ld.so"},
        "providers": {
            "driver": {"libraries": ["libcuda.so.1"]},
            "glibc": {"everywhere": True, "libraries": ["libc.so.6"]},
            "zlib": {"libraries": ["libz.so.1"]},
        },
        "directories": {},
        "links": {},
        "opens": {},
        "absent": {},
        "foreign": {},
        "stray": {},
        "cuda_home": [],
    }
    return parse(data | changes)


def elf(wheel: str, path: str, *needed: str, **fields: Any) -> ElfFile:
    values: dict[str, Any] = {
        "machine": "EM_AARCH64",
        "kind": "ET_DYN",
        "soname": None,
        "search": (),
        "inherited": False,
        "interpreter": None,
        "symbols": (),
        "opens": (),
    }
    return ElfFile(wheel=wheel, path=path, needed=needed, **(values | fields))


def problems(elfs: list[ElfFile], libraries: Libraries) -> list[str]:
    return judge(elfs, libraries, FILES, (2, 41)).problems


def test_a_wheel_may_need_itself_the_system_and_what_it_links() -> None:
    elfs = [
        elf("a", "a/x.so", "liba.so", "libc.so.6", "libd.so.1", "libcuda.so.1", "libz.so.1"),
        elf("a", "a.libs/liba.so"),
        elf("d", "d/libd.so.1"),
    ]
    result = judge(elfs, table(links={"a": ["d", "driver", "zlib"]}), FILES, (2, 41))
    assert result.problems == []
    assert dict(result.needed) == {
        "own wheel": 1,
        "system": 2,
        "other wheel": 1,
        "driver": 1,
    }


def test_a_library_of_another_wheel_must_be_declared() -> None:
    elfs = [elf("a", "a/x.so", "libd.so.1"), elf("d", "d/libd.so.1")]
    assert problems(elfs, table()) == ["a: a/x.so needs libd.so.1: nobody has it"]


def test_a_declared_absence_is_no_problem_but_a_vain_one_is() -> None:
    elfs = [elf("a", "a/x.so", "libmpi.so.40")]
    assert problems(elfs, table(absent={"a": {"libmpi.so.40": "why"}})) == []
    assert problems([elf("a", "a/x.so")], table(absent={"a": {"libmpi.so.40": "why"}})) == [
        "libraries.json: absent a libmpi.so.40: not needed"
    ]


def test_an_absence_that_somebody_fills_is_a_problem() -> None:
    elfs = [elf("a", "a/x.so", "libd.so.1"), elf("d", "d/libd.so.1")]
    libraries = table(absent={"a": {"libd.so.1": "why"}}, links={"a": ["d"]})
    assert problems(elfs, libraries) == ["libraries.json: absent a libd.so.1: not needed"]


def test_a_link_that_nothing_uses_is_a_problem() -> None:
    elfs = [elf("a", "a/x.so"), elf("d", "d/libd.so.1")]
    assert problems(elfs, table(links={"a": ["d", "zlib"]})) == [
        "libraries.json: links a -> d: not needed",
        "libraries.json: links a -> zlib: not needed",
    ]


def test_two_sources_of_one_library_are_a_problem() -> None:
    elfs = [elf("a", "a/x.so", "lib.so"), elf("c", "c/lib.so"), elf("d", "d/lib.so")]
    assert problems(elfs, table(links={"a": ["c", "d"]})) == [
        "a: lib.so has several declared sources: c, d"
    ]


def test_native_files_in_a_wheel_without_manylinux_tag_are_a_problem() -> None:
    assert "no manylinux tag" in problems([elf("b", "b/x.so", "libc.so.6")], table())[0]


def test_symbols_newer_than_the_target_are_a_problem() -> None:
    elfs = [elf("a", "a/x.so", symbols=("GLIBC_2.17", "GLIBC_2.42", "GLIBCXX_3.4.29"))]
    result = judge(elfs, table(), FILES, (2, 41))
    assert result.problems == ["a: a/x.so needs GLIBC_2.42, newer than the target"]
    assert result.as_data()["newest_symbols"] == {"GLIBC": "2.42", "GLIBCXX": "3.4.29"}


def test_another_loader_is_a_problem() -> None:
    assert problems([elf("a", "a/bin", interpreter="/lib/ld-musl.so")], table()) == [
        "a: a/bin wants the loader /lib/ld-musl.so"
    ]


def test_code_of_another_machine_must_be_declared() -> None:
    elfs = [elf("a", "a/k.co", machine="EM_AMDGPU")]
    assert problems(elfs, table()) == ["a: has EM_AMDGPU code, not declared"]
    assert problems(elfs, table(foreign={"a": {"EM_AMDGPU": "why"}})) == []
    assert problems([], table(foreign={"a": {"EM_AMDGPU": "why"}})) == [
        "libraries.json: foreign a EM_AMDGPU: no such file"
    ]


@pytest.mark.parametrize(
    ("source", "name", "directories", "found"),
    [
        ("own", "libo.so.1", {}, True),
        ("driver", "libcuda.so.1", {}, True),
        ("d", "libd.so.1", {"d": "d"}, True),
        ("d", "libd.so.1", {"d": "elsewhere"}, False),
        ("zlib", "libo.so.1", {}, False),
    ],
)
def test_what_is_opened_must_be_named_and_be_there(
    source: str, name: str, directories: dict[str, str], found: bool
) -> None:
    elfs = [elf("a", "a/x.so", opens=(name,)), elf("a", "a/libo.so.1"), elf("d", "d/libd.so.1")]
    libraries = table(opens={"a": {source: [name]}}, directories=directories)
    expected = [] if found else [f"libraries.json: opens a {name}: {source} does not have it"]
    assert problems(elfs, libraries) == expected


def test_a_library_that_the_wheel_does_not_name_is_a_problem() -> None:
    elfs = [elf("a", "a/x.so"), elf("a", "a/libo.so.1", opens=("libo.so.1",))]
    assert problems(elfs, table(opens={"a": {"own": ["libo.so.1"]}})) == [
        "libraries.json: opens a libo.so.1: the wheel does not name it"
    ]


def test_a_directory_that_nobody_opens_is_a_problem() -> None:
    assert problems([], table(directories={"d": "d"})) == [
        "libraries.json: directories d: nobody opens a library there"
    ]


def test_what_the_search_path_does_not_reach_is_listed() -> None:
    elfs = [
        elf("a", "a/x.so", "libd.so.1", search=("$ORIGIN/../d",)),
        elf("c", "c/x.so", "libd.so.1", search=("$ORIGIN", "/somewhere")),
        elf("d", "d/libd.so.1"),
    ]
    result = judge(elfs, table(links={"a": ["d"], "c": ["d"]}), FILES, (2, 41))
    assert result.as_data()["without_search_path"] == {"libd.so.1": ["c"]}


@pytest.mark.parametrize(("inherited", "listed"), [(True, {}), (False, {"liby.so": ["a"]})])
def test_siblings_inherit_an_rpath_but_not_a_runpath(
    inherited: bool, listed: dict[str, list[str]]
) -> None:
    elfs = [
        elf("a", "a/x.so", "libz.so", search=("${ORIGIN}/../a.libs",), inherited=inherited),
        elf("a", "a.libs/libz.so", "liby.so"),
        elf("a", "a.libs/liby.so"),
    ]
    result = judge(elfs, table(), FILES, (2, 41))
    assert result.as_data()["without_search_path"] == listed


@pytest.mark.skipif(sys.platform != "linux", reason="no ELF program here to read")
def test_the_reader_reads_a_real_program() -> None:
    with Path(sys.executable).resolve().open("rb") as stream:
        found = read_elf("w", "bin/python", stream, frozenset({"libnothere.so.9"}))
    assert found is not None
    assert "libc.so.6" in found.needed
    assert found.interpreter is not None
    assert found.interpreter.rpartition("/")[2].startswith("ld-linux")
    assert any(symbol.startswith("GLIBC_2.") for symbol in found.symbols)
    assert found.opens == ()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"libx.so.1\0", True),
        (b"libx.so\0", True),
        (b"libx.so.%d\0", True),
        (b"libx.so.10\0", False),
        (b"libx\0", False),
    ],
)
def test_names_are_found_in_the_text_of_a_file(tmp_path: Path, text: bytes, named: bool) -> None:
    program = Path(sys.executable).resolve().read_bytes()
    if not program.startswith(b"\x7fELF"):
        pytest.skip("no ELF program here to read")
    path = tmp_path / "file"
    path.write_bytes(program + text)
    with path.open("rb") as stream:
        found = read_elf("w", "p", stream, frozenset({"libx.so.1"}))
    assert found is not None
    assert found.opens == (("libx.so.1",) if named else ())


def test_what_is_no_elf_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\x7fELF but not really")
    with path.open("rb") as stream:
        assert read_elf("w", "p", stream) is None


def test_a_broken_table_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "libraries.json"
    path.write_text('{"target": {}}')
    with pytest.raises(AuditError, match=r"libraries\.json: missing or wrong field: 'machine'"):
        load(path)
