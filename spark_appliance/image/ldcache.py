"""/etc/ld.so.cache, as ``ldconfig`` would write it on the target (glibc, dl-cache.h).

Without it the loader does not find the libraries of the CUDA wheels: ld.so.conf.d alone has no
effect, and no ldconfig runs here. The NVIDIA container run time writes it again at the start.
"""

from __future__ import annotations

import functools
import posixpath
import re
import struct
from collections.abc import Iterable, Sequence

from spark_appliance.image import elf
from spark_appliance.image.tree import Kind, Tree

_MAGIC = b"glibc-ld.so.cache1.1"
_FLAGS = 0x0A03
"""FLAG_ELF_LIBC6 | FLAG_AARCH64_LIB64 (glibc, sysdeps/generic/ldconfig.h)."""
_LITTLE_ENDIAN = 2
"""cache_file_new_flags_endian_little (glibc, sysdeps/generic/dl-cache.h)."""
_HEADER = struct.Struct("<IIB3xI12x")
_ENTRY = struct.Struct("<iIIIQ")

LIBRARY = re.compile(r"lib.+\.so(\.\d+)*")
"""Names that ldconfig considers; also those with several numbers, such as
libnvrtc-builtins.so.13.0, which is opened by that name."""

_LOADER = "ld-linux"
"""The loader itself, which ldconfig enters although it has another name."""


def compare(left: str, right: str) -> int:
    """Order two names as the loader's binary search expects (glibc, _dl_cache_libcmp).

    Numbers compare by value, and a digit sorts after anything else.
    """
    a, b = left.encode() + b"\0", right.encode() + b"\0"
    i = j = 0
    while a[i]:
        a_digit, b_digit = 48 <= a[i] <= 57, 48 <= b[j] <= 57
        if a_digit and b_digit:
            first = second = 0
            while 48 <= a[i] <= 57:
                first = first * 10 + a[i] - 48
                i += 1
            while 48 <= b[j] <= 57:
                second = second * 10 + b[j] - 48
                j += 1
            if first != second:
                return first - second
        elif a_digit or b_digit:
            return 1 if a_digit else -1
        elif a[i] != b[j]:
            return a[i] - b[j]
        else:
            i += 1
            j += 1
    return a[i] - b[j]


def _descending(left: str, right: str) -> int:
    return compare(right, left)


def encode(entries: Iterable[tuple[str, str]]) -> bytes:
    """Return the bytes of the cache for (name, path) pairs in the order of the search.

    Of one name the first path wins.
    """
    # descending and stable, as ldconfig writes them
    by_name = functools.cmp_to_key(_descending)
    ordered = sorted(entries, key=lambda entry: by_name(entry[0]))
    offset = len(_MAGIC) + _HEADER.size + _ENTRY.size * len(ordered)
    strings = bytearray()
    places: dict[str, int] = {}
    for text in sorted({text for entry in ordered for text in entry}):
        places[text] = offset + len(strings)
        strings += text.encode() + b"\0"
    head = _MAGIC + _HEADER.pack(len(ordered), len(strings), _LITTLE_ENDIAN, 0)
    body = b"".join(_ENTRY.pack(_FLAGS, places[n], places[p], 0, 0) for n, p in ordered)
    return head + body + bytes(strings)


def considered(name: str) -> bool:
    """Return whether ldconfig looks at a file of this name."""
    return LIBRARY.fullmatch(name) is not None or name.startswith(_LOADER)


def names(tree: Tree, folder: str) -> list[str]:
    """Return the names under which ldconfig would enter the libraries of one folder, sorted.

    A file counts by its DT_SONAME; a link by its own name if that has no version, as compilers
    use it. Libraries that stay in a wheel count by their file name: NVIDIA's have it as SONAME.
    """
    found = set()
    for path, entry in tree.entries.items():
        head, name = posixpath.split(path)
        if head != folder or not considered(name):
            continue
        if entry.kind is Kind.LINK:
            if name.endswith(".so") or name.startswith(_LOADER):
                found.add(name)
        elif isinstance(entry.content, bytes):
            own = elf.soname(entry.content)
            if own is not None:
                found.add(own or name)
        else:
            found.add(name)
    return sorted(found)


def entries(
    folders: Sequence[tuple[str, Sequence[str]]],
) -> list[tuple[str, str]]:
    """Return (name, path) pairs for folders in the order of the search, each with its names."""
    return [(name, f"{folder}/{name}") for folder, found in folders for name in found]
