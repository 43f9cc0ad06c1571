import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spark_engram import format as packed
from spark_engram import native
from spark_engram.errors import MismatchError
from spark_engram.fake import FakeSpec, config_for
from spark_engram.format import Identity
from spark_engram.layout import Layout, tables_from_config

CONFIG = "ab" * 32


def identity(tp=3, rank=1, layout=Layout.COLUMNS, **more):
    table = tables_from_config(config_for(FakeSpec()))[0]
    return Identity.of(
        table, tp=tp, rank=rank, layout=layout, revision="r1", config_sha256=CONFIG, **more
    )


def test_crc32c_check_value():
    # "123456789" -> e3069283: the check value of CRC-32C in RFC 3720's polynomial.
    assert packed.crc32c(b"123456789") == 0xE3069283


@given(st.binary(max_size=9000), st.integers(0, 2**32 - 1))
def test_crc32c_is_the_same_in_the_core(data, seed):
    assert native.library().se_crc32c(data, len(data), seed) == packed.crc32c(data, seed)


@given(tp=st.sampled_from([1, 2, 3, 4, 5, 7, 8]), data=st.data())
def test_header_round_trip(tp, data):
    rank = data.draw(st.integers(0, tp - 1))
    layout = Layout.COLUMNS if 24 % tp == 0 else Layout.ROWS
    before = identity(tp, rank, layout, segment_pages=data.draw(st.integers(1, 2**20)))
    raw = packed.encode(before)
    assert len(raw) == 4096
    assert packed.decode(raw, "x") == before


def test_the_header_is_little_endian_at_the_documented_offsets():
    raw = packed.encode(identity())
    one = identity()
    assert raw[:8] == b"SPENGRAM"
    assert struct.unpack_from("<5I", raw, 8) == (1, 4096, 1, 3, 1)
    assert struct.unpack_from("<I3Q", raw, 28) == (1, one.row_start, one.row_end, one.total_rows)
    assert struct.unpack_from("<6I", raw, 56) == (264, 256, 8, 4096, 15, 24)
    assert struct.unpack_from("<2Q2I", raw, 80) == (
        one.pages, one.file_bytes, 16384, one.file_id,
    )  # fmt: skip
    assert raw[104:136].hex() == CONFIG
    assert raw[136:200] == b"r1".ljust(64, b"\0")
    assert struct.unpack_from("<25Q", raw, 200) == one.column_bounds
    assert struct.unpack_from("<I", raw, 4092)[0] == packed.crc32c(raw[:4092])


@given(st.integers(0, 4096 * 8 - 1))
def test_every_flipped_bit_is_refused(bit):
    raw = bytearray(packed.encode(identity()))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(MismatchError):
        packed.decode(bytes(raw), "x")


@given(st.binary(max_size=5000))
def test_foreign_bytes_are_refused(raw):
    with pytest.raises(MismatchError):
        packed.decode(raw, "x")


@given(
    edits=st.lists(
        st.tuples(
            st.integers(8, 4091),
            st.sampled_from([b"\xff", b"\xff" * 8, b"\0" * 8, b"\1", b"\x80", b"\x7f" * 4]),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_an_attacker_with_a_valid_checksum_gets_no_inconsistent_file(edits):
    raw = bytearray(packed.encode(identity()))
    for at, value in edits:
        raw[at : at + len(value)] = value[: 4092 - at]
    raw[4092:] = struct.pack("<I", packed.crc32c(bytes(raw[:4092])))
    try:
        found = packed.decode(bytes(raw), "x")
    except MismatchError:
        return
    # What is accepted must encode to the very same bytes: no field escaped the checks.
    assert packed.encode(found) == bytes(raw)
    assert found.file_bytes == 4096 * (1 + found.pages)


@pytest.mark.parametrize("revision", [b"r\0x", b"\xff"])
def test_a_revision_that_is_no_text_is_refused(revision):
    raw = bytearray(packed.encode(identity()))
    raw[136 : 136 + len(revision)] = revision
    raw[4092:] = struct.pack("<I", packed.crc32c(bytes(raw[:4092])))
    with pytest.raises(MismatchError, match="not ASCII text"):
        packed.decode(bytes(raw), "x")


def test_a_wrong_size_is_refused(tmp_path, packed_file):
    for change in (-1, 1, -4096):
        copy = tmp_path / packed_file.name
        raw = packed_file.read_bytes()
        copy.write_bytes(raw[:change] if change < 0 else raw + b"x")
        with pytest.raises(MismatchError, match="truncated or foreign file"):
            packed.read_identity(copy)


def test_another_version_is_refused():
    raw = bytearray(packed.encode(identity()))
    raw[8] = 2
    with pytest.raises(MismatchError, match="format version 2; this program reads version 1"):
        packed.decode(bytes(raw), "x")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rank", 2, r"rank is 1, needed 2"),
        ("tp", 4, r"tp is 3, needed 4"),
        ("layer", 14, r"layer is 1, needed 14"),
        ("layout", Layout.ROWS, r"layout is 'columns', needed 'rows'"),
        ("revision", "r2", r"revision is 'r1', needed 'r2'"),
        ("row_start", 7, r"row_start is \d+, needed 7"),
        ("config_sha256", "cd" * 32, r"config_sha256 is 'abab"),
    ],
)
def test_a_mismatch_names_both_sides(field, value, message):
    with pytest.raises(MismatchError, match=message):
        packed.require(identity(), replace(identity(), **{field: value}), "x")


def test_equal_identities_pass():
    packed.require(identity(), identity(), "x")
