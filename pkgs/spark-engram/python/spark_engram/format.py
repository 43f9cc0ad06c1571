"""The packed file's header, format version 1. FORMAT.md is the specification.

The only parser of the format: the native store is given the numbers this module has
checked, so there is one place to attack and one to trust.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path

from spark_engram import layout as geometry
from spark_engram.errors import MismatchError
from spark_engram.layout import Layout, RowRange, Table

MAGIC = b"SPENGRAM"
VERSION = 1
#: Pages that one checksum of the receipt covers, unless a file's header says otherwise: 64 MiB.
SEGMENT_PAGES = 16384
MAX_COLUMNS = 255
_REVISION_BYTES = 64
_FIXED = struct.Struct("<8s6I3Q6I2Q2I32s64s")
_CRC = struct.Struct("<I")
_BOUNDS_AT = _FIXED.size
_CRC_AT = geometry.HEADER_BYTES - _CRC.size


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_CRC_TABLE = _crc_table()


def crc32c(data: bytes, seed: int = 0) -> int:
    """CRC-32C (Castagnoli, RFC 3720 appendix B.4) of a few KiB; slowly and without the native core.

    Bulk data is checked by the native core with the same polynomial.
    """
    crc = seed ^ 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


@dataclass(frozen=True)
class Identity:
    """What a packed file is for. Two files with equal identities hold equal bytes.

    ``config_sha256`` is the lower-case hex SHA-256 of the checkpoint's ``config.json``;
    ``revision`` is the model revision, up to 64 ASCII characters, empty when unknown.
    """

    layer: int
    tp: int
    rank: int
    layout: Layout
    row_start: int
    row_end: int
    total_rows: int
    column_bounds: tuple[int, ...]
    revision: str
    config_sha256: str
    segment_pages: int = SEGMENT_PAGES

    @classmethod
    def of(
        cls,
        table: Table,
        *,
        tp: int,
        rank: int,
        layout: Layout,
        revision: str,
        config_sha256: str,
        segment_pages: int = SEGMENT_PAGES,
    ) -> Identity:
        """Return the identity of one rank's file of ``table``."""
        owned = geometry.shard_range(table.total_rows, table.column_bounds, rank, tp, layout)
        return cls(
            layer=table.layer,
            tp=tp,
            rank=rank,
            layout=layout,
            row_start=owned.start,
            row_end=owned.end,
            total_rows=table.total_rows,
            column_bounds=table.column_bounds,
            revision=revision,
            config_sha256=config_sha256,
            segment_pages=segment_pages,
        )

    @property
    def rows(self) -> RowRange:
        """The rows this file holds."""
        return RowRange(self.row_start, self.row_end)

    @property
    def pages(self) -> int:
        """Row pages in this file."""
        return geometry.page_count(self.rows.rows)

    @property
    def segments(self) -> int:
        """Checksummed segments in this file."""
        return -(-self.pages // self.segment_pages)

    @property
    def segment_rows(self) -> int:
        """Rows of a full segment."""
        return self.segment_pages * geometry.ROWS_PER_PAGE

    @property
    def file_bytes(self) -> int:
        """Exact size of this file in bytes."""
        return geometry.file_bytes(self.rows.rows)

    @property
    def file_name(self) -> str:
        """The name this file has in its folder."""
        return geometry.file_name(self.layer, self.rank, self.tp)

    @property
    def file_id(self) -> int:
        """A 32-bit number, stored in every page, that tells files of other identities apart."""
        return crc32c(_fixed(self, 0) + _bounds(self))


def encode(identity: Identity) -> bytes:
    """Return the 4096 header bytes of ``identity``.

    Raises:
        ValueError: a field does not fit (more than 255 columns, a long revision).

    """
    body = _fixed(identity, identity.file_id) + _bounds(identity)
    body = body.ljust(_CRC_AT, b"\0")
    return body + _CRC.pack(crc32c(body))


def decode(header: bytes, name: str) -> Identity:
    """Parse and check 4096 header bytes; ``name`` is used in messages.

    Raises:
        MismatchError: not a packed file, another version, damaged, or inconsistent.

    """
    if len(header) < geometry.HEADER_BYTES:
        raise MismatchError(f"{name}: {len(header)} bytes is too short for a header; pack it again")
    header = header[: geometry.HEADER_BYTES]
    if header[:8] != MAGIC:
        raise MismatchError(f"{name}: not a spark-engram file (it starts {header[:8].hex()})")
    (version,) = struct.unpack_from("<I", header, 8)
    if version != VERSION:
        raise MismatchError(
            f"{name}: format version {version}; this program reads version {VERSION}"
        )
    (stored,) = _CRC.unpack_from(header, _CRC_AT)
    actual = crc32c(header[:_CRC_AT])
    if stored != actual:
        raise MismatchError(
            f"{name}: header checksum {stored:08x} but its bytes give {actual:08x}: damaged file"
        )
    (
        _, _, header_bytes, layer, tp, rank, layout, start, end, total, row_bytes, weight_bytes,
        scale_bytes, page_bytes, rows_per_page, columns, pages, size, segment_pages, file_id,
        config, revision,
    ) = _FIXED.unpack_from(header)  # fmt: skip
    expected = (
        ("header bytes", header_bytes, geometry.HEADER_BYTES),
        ("row bytes", row_bytes, geometry.ROW_BYTES),
        ("weight bytes", weight_bytes, geometry.WEIGHT_BYTES),
        ("scale bytes", scale_bytes, geometry.SCALE_BYTES),
        ("page bytes", page_bytes, geometry.PAGE_BYTES),
        ("rows per page", rows_per_page, geometry.ROWS_PER_PAGE),
    )
    for what, found, wanted in expected:
        if found != wanted:
            raise MismatchError(f"{name}: {what} is {found}, version {VERSION} has {wanted}")
    if not 1 <= columns <= MAX_COLUMNS or layout not in (1, 2) or segment_pages == 0:
        raise MismatchError(
            f"{name}: {columns} columns, layout id {layout}, {segment_pages} segment pages: "
            "not a valid header"
        )
    revision = revision.rstrip(b"\0")
    if b"\0" in revision or not revision.isascii():
        raise MismatchError(f"{name}: the revision is not ASCII text: not a valid header")
    bounds = struct.unpack_from(f"<{columns + 1}Q", header, _BOUNDS_AT)
    if any(header[_BOUNDS_AT + 8 * (columns + 1) : _CRC_AT]):
        raise MismatchError(f"{name}: reserved header bytes are not zero: not a valid header")
    identity = Identity(
        layer=layer,
        tp=tp,
        rank=rank,
        layout=Layout(layout),
        row_start=start,
        row_end=end,
        total_rows=total,
        column_bounds=bounds,
        revision=revision.decode("ascii"),
        config_sha256=config.hex(),
        segment_pages=segment_pages,
    )
    _check(identity, name, pages=pages, size=size, file_id=file_id)
    return identity


def read_identity(path: Path) -> Identity:
    """Read the header of the file at ``path`` and check it against the file's size.

    Raises:
        MismatchError: the file is missing, is no valid packed file, or has the wrong size.

    """
    try:
        with path.open("rb") as stream:
            header = stream.read(geometry.HEADER_BYTES)
            size = stream.seek(0, 2)
    except OSError as error:
        raise MismatchError(
            f"{path}: {error.strerror}: pack it with `spark-engram pack`"
        ) from error
    identity = decode(header, str(path))
    if size != identity.file_bytes:
        raise MismatchError(
            f"{path}: {size} bytes, but its header asks for {identity.file_bytes}: "
            "truncated or foreign file; pack it again"
        )
    return identity


def require(found: Identity, wanted: Identity, name: str) -> None:
    """Refuse a file packed for something else, naming both sides of each difference.

    Raises:
        MismatchError: any field of the identities differs.

    """
    differences = []
    for field in fields(Identity):
        is_, should = getattr(found, field.name), getattr(wanted, field.name)
        if is_ == should:
            continue
        if isinstance(is_, Layout):
            is_, should = is_.label, should.label
        if field.name == "column_bounds":
            is_, should = f"{len(is_) - 1} columns", f"{len(should) - 1} other columns"
        differences.append(f"{field.name} is {is_!r}, needed {should!r}")
    if differences:
        raise MismatchError(f"{name}: packed for something else: " + "; ".join(differences))


def _fixed(identity: Identity, file_id: int) -> bytes:
    revision = identity.revision.encode("ascii")
    if len(revision) > _REVISION_BYTES or b"\0" in revision:
        raise ValueError(f"revision {identity.revision!r} does not fit in 64 ASCII characters")
    if len(identity.column_bounds) - 1 > MAX_COLUMNS:
        raise ValueError(f"more than {MAX_COLUMNS} hash columns")
    return _FIXED.pack(
        MAGIC,
        VERSION,
        geometry.HEADER_BYTES,
        identity.layer,
        identity.tp,
        identity.rank,
        identity.layout.value,
        identity.row_start,
        identity.row_end,
        identity.total_rows,
        geometry.ROW_BYTES,
        geometry.WEIGHT_BYTES,
        geometry.SCALE_BYTES,
        geometry.PAGE_BYTES,
        geometry.ROWS_PER_PAGE,
        len(identity.column_bounds) - 1,
        identity.pages,
        identity.file_bytes,
        identity.segment_pages,
        file_id,
        bytes.fromhex(identity.config_sha256),
        revision,
    )


def _bounds(identity: Identity) -> bytes:
    return struct.pack(f"<{len(identity.column_bounds)}Q", *identity.column_bounds)


def _check(identity: Identity, name: str, *, pages: int, size: int, file_id: int) -> None:
    bounds = identity.column_bounds
    consistent = (
        0 <= identity.rank < identity.tp
        and identity.row_start <= identity.row_end <= identity.total_rows
        and bounds[0] == 0
        and bounds[-1] == identity.total_rows
        and all(low <= high for low, high in pairwise(bounds))
        and (pages, size) == (identity.pages, identity.file_bytes)
        and identity.total_rows < 2**40
    )
    if consistent and identity.layout is Layout.COLUMNS:
        consistent = (len(bounds) - 1) % identity.tp == 0
    if consistent:
        owned = geometry.shard_range(
            identity.total_rows, bounds, identity.rank, identity.tp, identity.layout
        )
        consistent = owned == identity.rows and file_id == identity.file_id
    if not consistent:
        raise MismatchError(f"{name}: the header contradicts itself: not a valid file")
