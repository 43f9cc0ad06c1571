"""The header page of a packed Engram file, as far as doctor judges it.

The format is ``pkgs/spark-engram/FORMAT.md``, version 1; the full judge is ``spark-engram
verify`` on the node. A test holds this parser against the packer's own writer.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

HEADER_BYTES: Final = 4096
MAGIC: Final = b"SPENGRAM"
VERSION: Final = 1
LAYOUTS: Final = {1: "columns", 2: "rows"}

FOREIGN: Final = {b"DSV1EN41": "the packer of the MiaAI-Lab recipe"}
"""First bytes of other tools' files -> whose they are."""

_FIXED: Final = struct.Struct("<8s6I3Q6I2Q2I32s64s")


class BadHeader(ValueError):  # noqa: N818 - its text is the finding
    """The page is no header of this format; the text says why."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a packed file is for. ``file_id`` is 8 hex digits, as in the receipt."""

    layer: int
    tp: int
    rank: int
    layout: str
    row_start: int
    row_end: int
    file_bytes: int
    file_id: str
    config_sha256: str
    revision: str


def parse(page: bytes) -> Header:
    """Read a header page.

    Raises:
        BadHeader: when it is none, of another version, or damaged.
    """
    if page[:8] in FOREIGN:
        raise BadHeader(f"packed by {FOREIGN[page[:8]]}, which splits rows otherwise")
    if len(page) < HEADER_BYTES:
        raise BadHeader(f"{len(page)} bytes are too few for a header")
    if page[:8] != MAGIC:
        raise BadHeader(f"no spark-engram file (it starts {page[:8].hex()})")
    version = struct.unpack_from("<I", page, 8)[0]
    if version != VERSION:
        raise BadHeader(f"format version {version}, this program knows {VERSION}")
    stored = struct.unpack_from("<I", page, HEADER_BYTES - 4)[0]
    if stored != crc32c(page[: HEADER_BYTES - 4]):
        raise BadHeader("the header's checksum is wrong: damaged file")
    fields = _FIXED.unpack_from(page)
    return Header(
        layer=fields[3],
        tp=fields[4],
        rank=fields[5],
        layout=LAYOUTS.get(fields[6], f"unknown ({fields[6]})"),
        row_start=fields[7],
        row_end=fields[8],
        file_bytes=fields[17],
        file_id=f"{fields[19]:08x}",
        config_sha256=fields[20].hex(),
        revision=fields[21].rstrip(b"\0").decode("ascii", "replace"),
    )


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli, RFC 3720 appendix B.4) of a few KiB."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _crc_entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC_TABLE: Final = tuple(map(_crc_entry, range(256)))
