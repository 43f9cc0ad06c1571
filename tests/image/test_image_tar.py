from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_appliance.image import tar
from spark_appliance.image.errors import ImageError
from spark_appliance.image.tree import Entry, Kind, Tree

_part = st.text(
    st.characters(blacklist_categories=("Cs",), blacklist_characters="/\0"), min_size=1, max_size=60
).filter(lambda part: part not in {".", ".."})
_paths = st.lists(_part, min_size=1, max_size=4).map("/".join)


def read(content: bytes) -> list[tuple[tarfile.TarInfo, bytes | None]]:
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        out = []
        for member in archive:
            file = archive.extractfile(member) if member.isreg() else None
            out.append((member, file.read() if file else None))
        return out


@given(st.dictionaries(_paths, st.binary(max_size=1500), max_size=8), st.integers(0, 0o1777))
def test_tarfile_reads_what_is_written(files: dict[str, bytes], mode: int) -> None:
    tree = Tree()
    kept: dict[str, bytes] = {}
    for path, content in files.items():
        try:
            tree.file(path, content, mode & 0o777)
        except ImageError:  # a file where another one needs a folder
            continue
        kept[path] = content
    data = b"".join(tar.stream(tree, 42))
    assert len(data) % tar.BLOCK == 0
    assert data.endswith(tar.END)
    members = read(data)
    assert {m.name: content for m, content in members if m.isreg()} == kept
    assert all((m.uid, m.gid, m.mtime, m.uname, m.gname) == (0, 0, 42, "", "") for m, _ in members)
    assert all(m.mode == mode & 0o777 for m, _ in members if m.isreg())
    names = [m.name for m, _ in members]
    assert names == sorted(names, key=str.encode)


@pytest.mark.parametrize("length", [99, 100, 101, 255, 3000])
def test_long_names_and_targets(length: int) -> None:
    tree = Tree()
    tree.link("d/" + "n" * (length - 2), "t" * length)
    (folder, _), (member, _) = read(b"".join(tar.stream(tree)))
    assert folder.isdir()
    assert (len(member.name), member.linkname) == (length, "t" * length)


def test_a_size_beyond_ustar_goes_into_a_pax_record() -> None:
    class Large(bytes):
        def __len__(self) -> int:
            return 8**11

    header = tar.entry_header("large", Entry(Kind.FILE, 0o644, Large()))
    assert b" size=8589934592\n" in header
    assert tarfile.TarInfo.frombuf(header[-512:], "utf-8", "strict").size == 0


@pytest.mark.parametrize("size", range(80, 120))
def test_a_pax_record_counts_its_own_length(size: int) -> None:
    record = tar.pax_record(b"path", b"x" * size)
    assert int(record.split(b" ")[0]) == len(record)


@pytest.mark.parametrize("path", ["/etc/passwd", "a/../../b", ""])
def test_paths_outside_the_image_are_refused(path: str) -> None:
    with pytest.raises(ImageError, match="not a path inside the image"):
        Tree().file(path, b"")


def test_two_contents_for_one_path_are_refused() -> None:
    tree = Tree()
    tree.file("a", b"1")
    tree.file("a", b"1")
    with pytest.raises(ImageError, match="a: two packages"):
        tree.file("a", b"2")
    with pytest.raises(ImageError, match="directory and a file"):
        tree.file("a/b", b"")
