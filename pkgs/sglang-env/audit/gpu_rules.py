"""Judge which GPU code runs on the target. Pure.

Sources of the rules: NVIDIA's CUDA C++ Programming Guide, "Binary Compatibility", "PTX
Compatibility" and "Family-Specific / Architecture-Specific Features".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

GB10 = (12, 1)
"""Compute capability of the GB10 in a DGX Spark (nixpkgs' capability table, `12.1`)."""

ARCHITECTURE = re.compile(r"(?:sm|compute)_(\d+)(\d)([af]?)")


@dataclass(frozen=True)
class GpuCode:
    """The device code of one file: how many binaries (SASS) and PTX texts by architecture."""

    wheel: str
    path: str
    sass: Mapping[str, int]
    ptx: Mapping[str, int]


def runs(architecture: str, device: tuple[int, int] = GB10) -> bool:
    """Whether SASS or PTX made for `architecture` (`sm_120a`, `compute_121`) runs on `device`.

    Plain code needs the same major version for SASS and an equal or older one for PTX; `f` code
    the same major and an equal or older minor version; `a` code exactly the same device.

    Raises:
        ValueError: not the name of an architecture.
    """
    match = ARCHITECTURE.fullmatch(architecture)
    if match is None:
        raise ValueError(f"{architecture!r} is no GPU architecture")
    wanted = int(match[1]), int(match[2])
    if match[3] == "a":
        return wanted == device
    if match[3] == "f" or architecture.startswith("sm_"):
        return wanted[0] == device[0] and wanted[1] <= device[1]
    return wanted <= device


def usable(code: GpuCode, device: tuple[int, int] = GB10) -> list[str]:
    """Return the architectures in a file that run on `device`, sorted."""
    return sorted(
        {name for name in (*code.sass, *code.ptx) if runs(name, device)},
    )


def judge(codes: Iterable[GpuCode], exceptions: Mapping[str, str]) -> dict[str, Any]:
    """Return the result: per file its code and what of it runs; `problems` must be empty.

    Args:
        codes: the device code of every file that has some.
        exceptions: path -> why it does not matter that nothing in it runs.
    """
    codes = list(codes)
    dead = {code.path for code in codes if not usable(code)}
    problems = [f"{path}: nothing in it runs on sm_121" for path in dead - exceptions.keys()]
    problems += [
        f"gpu_exceptions.json: {path}: has usable code or does not exist"
        for path in exceptions.keys() - dead
    ]
    return {
        "files": {
            code.path: {
                "wheel": code.wheel,
                "sass": dict(sorted(code.sass.items())),
                "ptx": dict(sorted(code.ptx.items())),
                "runs": usable(code),
            }
            for code in codes
        },
        "nothing_runs": {path: exceptions.get(path, "") for path in sorted(dead)},
        "problems": sorted(problems),
    }
