"""Memory figures of the kernel, read without allocating much."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from spark_appliance.node.errors import NodeError


class MemInfo:
    """``/proc/meminfo``, opened once and read into one buffer: works when memory is short."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise NodeError(f"cannot read {path}: {error.strerror}") from None
        self._path = path
        self._buffer = bytearray(8192)

    def available(self) -> int:
        """Return MemAvailable in bytes: what can be had without swapping.

        CUDA's own "free" is MemFree, which counts the page cache as used (field notes 6.2).

        Raises:
            NodeError: when the kernel gives no such line.
        """
        length = os.preadv(self._file, [self._buffer], 0)
        start = self._buffer.find(b"MemAvailable:", 0, length)
        end = self._buffer.find(b" kB", start, length)
        if start < 0 or end < 0:
            raise NodeError(f"{self._path} has no MemAvailable")
        return int(self._buffer[start + 13 : end]) * 1024

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def all_figures(path: Path) -> dict[str, int]:
    """Return every figure of a meminfo file in bytes, {} when it cannot be read."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    figures = {}
    for line in lines:
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdecimal():
            figures[name] = int(words[0]) * 1024
    return figures
