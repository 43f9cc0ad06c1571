from __future__ import annotations

import re
import shutil
import subprocess
from functools import cmp_to_key
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_appliance.image import glue, ldcache
from spark_appliance.image.tree import Tree
from spark_appliance.image.wheels import Layout

_names = st.text("abc.0123456789-_", min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("name", "matches"),
    [
        ("libnvrtc.so.13", True),
        ("libnvrtc-builtins.so.13.0", True),
        ("libcudart.so", True),
        ("libfoo.so.1.2.3", True),
        ("libfoo.so.1a", False),
        ("foo.so", False),
        ("libfoo.a", False),
    ],
)
def test_names_that_ldconfig_considers(name: str, matches: bool) -> None:
    assert bool(ldcache.LIBRARY.fullmatch(name)) is matches


@given(_names, _names, _names)
def test_compare_is_an_order(a: str, b: str, c: str) -> None:
    def sign(left: str, right: str) -> int:
        value = ldcache.compare(left, right)
        return (value > 0) - (value < 0)

    assert sign(a, a) == 0
    assert sign(a, b) == -sign(b, a)
    ordered = sorted([a, b, c], key=cmp_to_key(ldcache.compare))
    assert sign(ordered[0], ordered[2]) <= 0


def test_numbers_compare_by_value() -> None:
    assert ldcache.compare("libx.so.10", "libx.so.9") > 0
    assert ldcache.compare("libx1", "libxa") > 0


def test_glibc_reads_the_cache(tmp_path: Path) -> None:
    program = shutil.which("ldconfig", path="/sbin:/usr/sbin:/usr/bin")
    if program is None:
        pytest.skip("ldconfig is not installed")
    entries = [("libb.so.2", "/x/libb.so.2"), ("libb.so.10", "/x/libb.so.10"), ("liba.so", "/y/a")]
    path = tmp_path / "cache"
    path.write_bytes(ldcache.encode(entries))
    out = subprocess.run([program, "-p", "-C", path], capture_output=True, text=True, check=True)
    found = re.findall(r"^\t(\S+) \(libc6,AArch64\) => (\S+)$", out.stdout, re.M)
    assert found == [
        ("libb.so.10", "/x/libb.so.10"), ("libb.so.2", "/x/libb.so.2"), ("liba.so", "/y/a")
    ]  # fmt: skip


def test_cuda_libraries_get_all_their_names() -> None:
    layout = Layout("3.13")
    folder = f"{layout.site}/nvidia/cu13/lib"
    names = ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libcudart.so.13")
    paths = frozenset(f"{folder}/{name}" for name in names)
    tree: Tree = glue.skeleton(layout, "aarch64-linux-gnu", paths, "3.13.5")
    assert tree[f"{folder}/libnvrtc-builtins.so"].target == "libnvrtc-builtins.so.13.0"
    assert tree["usr/local/cuda"].target == f"/{layout.site}/nvidia/cu13"
    assert tree[f"{layout.site}/nvidia/cu13/lib64"].target == "lib"
    assert tree[f"{folder}/stubs/libcuda.so"].target == "/usr/lib/aarch64-linux-gnu/libcuda.so.1"
    assert tree["etc/ld.so.conf.d/zz-sglang.conf"].content == f"/{folder}\n".encode()
    base = {"usr/lib/aarch64-linux-gnu": ("libc.so.6",)}
    cache = glue.loader_cache("aarch64-linux-gnu", base, [folder], paths, tree)
    for name in (*names, "libcudart.so"):
        assert f"/{folder}/{name}\0".encode() in cache
    assert b"/lib/aarch64-linux-gnu/libc.so.6\0" in cache
    assert b"stubs" not in cache
