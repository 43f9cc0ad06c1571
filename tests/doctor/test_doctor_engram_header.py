"""The header parser against the packer's own writer and against damage."""

from __future__ import annotations

import sys

import pytest
from doctor_nodes import ROOT
from doctor_root import header

from spark_appliance.doctor import engram_header
from spark_appliance.doctor.engram_header import BadHeader
from spark_appliance.model.plan import Plan


def test_crc32c_of_the_standard():
    # RFC 3720, appendix B.4
    assert engram_header.crc32c(b"\0" * 32) == 0x8A9136AA
    assert engram_header.crc32c(b"\xff" * 32) == 0x62A8AB43
    assert engram_header.crc32c(bytes(range(32))) == 0x46DD794E


def test_a_header_is_read(plan: Plan):
    node = plan.nodes[1]
    assert node.engram is not None
    file = node.engram.files[1]
    found = engram_header.parse(header(plan, node, file))
    assert (found.layer, found.tp, found.rank, found.layout) == (14, 3, 1, "columns")
    assert (found.row_start, found.row_end) == (file.row_start, file.row_end)
    assert (found.file_bytes, found.file_id, found.revision) == (file.bytes, "1234abcd", "")


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [(0, b"X", "no spark-engram"), (8, b"\2", "version 2"), (20, b"\7", "checksum")],
)
def test_damage_is_named(plan: Plan, at: int, value: bytes, message: str):
    node = plan.nodes[1]
    assert node.engram is not None
    page = bytearray(header(plan, node, node.engram.files[0]))
    page[at : at + len(value)] = value
    with pytest.raises(BadHeader, match=message):
        engram_header.parse(bytes(page))


def test_a_short_file():
    with pytest.raises(BadHeader, match="too few"):
        engram_header.parse(b"SPENGRAM")


def test_the_packers_own_header_is_understood(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    folder = ROOT / "pkgs" / "spark-engram" / "python"
    if not folder.is_dir():
        pytest.skip("pkgs/spark-engram is not in this tree")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    pytest.importorskip("spark_engram.format", reason="spark_engram does not import here")
    from spark_engram import format as packed
    from spark_engram.layout import Layout

    node = plan.nodes[1]
    assert node.engram is not None
    file = node.engram.files[0]
    bounds = (0, file.row_start, file.row_end, 384_006_168)
    identity = packed.Identity(
        layer=file.layer,
        tp=3,
        rank=1,
        layout=Layout.COLUMNS,
        row_start=file.row_start,
        row_end=file.row_end,
        total_rows=384_006_168,
        column_bounds=bounds,
        revision="fb2764a5",
        config_sha256="ab" * 32,
    )
    found = engram_header.parse(packed.encode(identity))
    assert (found.layer, found.tp, found.rank, found.layout) == (file.layer, 3, 1, "columns")
    assert (found.row_start, found.row_end) == (file.row_start, file.row_end)
    assert (found.file_bytes, found.revision) == (file.bytes, "fb2764a5")
    assert found.file_id == f"{identity.file_id:08x}"
    assert found.config_sha256 == "ab" * 32
