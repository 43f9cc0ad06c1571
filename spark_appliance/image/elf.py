"""The names by which the dynamic loader knows shared libraries."""

from __future__ import annotations

import io

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile

MAGIC = b"\x7fELF"


def soname(content: bytes, machine: str = "EM_AARCH64") -> str | None:
    """Return DT_SONAME of a shared library for a machine, or None if it is no such library.

    A library without DT_SONAME gives an empty string: ldconfig then takes its file name.
    """
    if not content.startswith(MAGIC):
        return None
    try:
        elf = ELFFile(io.BytesIO(content))
        if elf.header.e_machine != machine or elf.header.e_type != "ET_DYN":
            return None
        for segment in elf.iter_segments():
            if isinstance(segment, DynamicSegment):
                for tag in segment.iter_tags("DT_SONAME"):
                    return str(vars(tag)["soname"])  # set by pyelftools for this tag
                return ""
    except ELFError:
        return None
    return None
