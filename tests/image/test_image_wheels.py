from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from pathlib import Path

import image_inputs as inputs
import pytest

from spark_appliance.image import tar, wheels
from spark_appliance.image.errors import ImageError
from spark_appliance.image.tree import Tree

LAYOUT = wheels.Layout("3.13")
SITE = LAYOUT.site


def content(tree: Tree, path: str) -> bytes:
    one = Tree({path: tree[path]})
    size = tree[path].size
    data = b"".join(tar.stream(one))
    start = len(data) - len(tar.END) - size - len(tar.padding(size))
    return data[start : start + size]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    made = inputs.write(tmp_path)
    tree = Tree()
    wheels.add(tree, made.files / "tool-1.0-py3-none-any.whl", LAYOUT, [r"^tool/tests/"])
    return tree


def test_schemes(tree: Tree) -> None:
    assert content(tree, f"{SITE}/tool/__init__.py") == b"def main(): pass\n"
    assert content(tree, f"{SITE}/extra.py") == b"x = 1\n"
    assert content(tree, "opt/sglang/share/tool.txt") == b"data\n"
    assert content(tree, "opt/sglang/bin/run") == b"#!/opt/sglang/bin/python3\nprint(1)\n"
    assert tree["opt/sglang/bin/run"].mode == 0o755
    assert tree[f"{SITE}/tool/__init__.py"].mode == 0o644


def test_console_script(tree: Tree) -> None:
    script = content(tree, "opt/sglang/bin/tool").decode()
    assert script.startswith("#!/opt/sglang/bin/python3\nimport sys\nfrom tool import main\n")
    assert "sys.exit(main())" in script
    assert tree["opt/sglang/bin/tool"].mode == 0o755


def test_record_names_every_file_with_its_hash(tree: Tree) -> None:
    record = f"{SITE}/tool-1.0.dist-info/RECORD"
    rows = list(csv.reader(io.StringIO(content(tree, record).decode())))
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    found = set()
    for path, digest, size in rows:
        parts: list[str] = SITE.split("/")
        for part in path.split("/"):
            parts = parts[:-1] if part == ".." else [*parts, part]
        where = "/".join(parts)
        found.add(where)
        if where != record:
            data = content(tree, where)
            want = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={want}", str(len(data)))
    assert found == {path for path, entry in tree.entries.items() if entry.kind.value == b"0"}


def test_dropped_files_are_in_neither_tree_nor_record(tree: Tree) -> None:
    assert not [path for path in tree.entries if "tests" in path]
    assert b"tests" not in content(tree, f"{SITE}/tool-1.0.dist-info/RECORD")


def test_a_file_that_is_no_wheel(tmp_path: Path) -> None:
    path = tmp_path / "x-1.0-py3-none-any.whl"
    path.write_bytes(b"no zip")
    with pytest.raises(ImageError, match="not an installable wheel"):
        wheels.add(Tree(), path, LAYOUT)


def test_a_path_out_of_site_packages_is_refused(tmp_path: Path) -> None:
    _, _, path = inputs.wheel(tmp_path, "bad", "1.0", {"../../../../../../etc/x": b""})
    with pytest.raises(ImageError, match=r"bad-1\.0"):
        wheels.add(Tree(), path, LAYOUT)


def test_a_member_that_is_shorter_than_stated(tmp_path: Path) -> None:
    _, _, path = inputs.wheel(tmp_path, "cut", "1.0", {"cut.py": b"0123456789" * 50})
    tree = Tree()
    wheels.add(tree, path, LAYOUT)
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        offset = archive.getinfo("cut.py").header_offset
    data[offset + 30 + len("cut.py") + 3] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(ImageError, match=r"cut\.py"):
        content(tree, f"{SITE}/cut.py")
