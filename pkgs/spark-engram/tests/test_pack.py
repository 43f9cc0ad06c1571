import errno
import json
import os
import random
import shutil

import numpy as np
import pytest
from conftest import REVISION, make_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spark_engram import directio, pack, receipt
from spark_engram import format as packed
from spark_engram.errors import (
    BusyError,
    MismatchError,
    SourceError,
    SpaceError,
    TargetError,
    UsageError,
)
from spark_engram.fake import FakeSpec
from spark_engram.journal import Journal
from spark_engram.layout import Layout
from spark_engram.store import RowStore

TP_SIZES = (1, 2, 3, 4, 8)


def rows_of(path):
    """Weights and scales read straight from the bytes, by FORMAT.md and nothing else."""
    raw = np.fromfile(path, np.uint8)[4096:].reshape(-1, 4096)
    rows = raw[:, : 15 * 264].reshape(-1, 264)
    count = packed.read_identity(path).rows.rows
    assert not rows[count:].any()
    return rows[:count, :256], rows[:count, 256:]


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("rule", Layout)
def test_every_rank_holds_exactly_its_rows(model, tmp_path, tp, rule):
    for table in model.tables:
        weights, scales = model.arrays(table.layer)
        parts = []
        for rank in range(tp):
            (job,) = model.pack(tmp_path, tp=tp, rank=rank, layout=rule, layers=(table.layer,))
            identity = job.identity
            ours = rows_of(job.path)
            assert np.array_equal(ours[0], weights[identity.row_start : identity.row_end])
            assert np.array_equal(ours[1], scales[identity.row_start : identity.row_end])
            assert job.path.stat().st_size == identity.file_bytes
            parts.append(len(ours[0]))
        assert sum(parts) == table.total_rows


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.integers(1, 60),
    orders=st.integers(1, 3),
    heads=st.integers(1, 3),
    misalign=st.integers(0, 5000),
    tp=st.integers(1, 9),
    segment=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_tables(tmp_path_factory, rows, orders, heads, misalign, tp, segment, seed):
    folder = tmp_path_factory.mktemp("random")
    spec = FakeSpec(
        rows_per_column=rows, layers=(1,), orders=orders, heads=heads, seed=seed, misalign=misalign
    )
    model = make_model(folder / "ckpt", spec)
    weights, scales = model.arrays(1)
    for rank in range(tp):
        (job,) = model.pack(folder, tp=tp, rank=rank, segment_pages=segment, verify=True)
        owned = slice(job.identity.row_start, job.identity.row_end)
        ours = rows_of(job.path)
        assert np.array_equal(ours[0], weights[owned])
        assert np.array_equal(ours[1], scales[owned])
    shutil.rmtree(folder)


def test_an_empty_shard_is_one_header_page(tmp_path):
    model = make_model(
        tmp_path / "ckpt", FakeSpec(rows_per_column=2, layers=(1,), orders=1, heads=1)
    )
    sizes = []
    for rank in range(8):
        (job,) = model.pack(tmp_path, tp=8, rank=rank, verify=True)
        assert job.identity.layout is Layout.ROWS
        sizes.append(job.path.stat().st_size)
        with RowStore(job.path) as store:
            out = store.gather(np.arange(2, dtype=np.int64))
            assert out[0].any() == (job.identity.rows.rows > 0)
    assert sorted(sizes) == [4096] * 6 + [8192] * 2


def test_a_finished_file_is_left_alone(model, tmp_path):
    (job,) = model.pack(tmp_path, tp=2, rank=0, layers=(1,))
    before = job.path.stat()
    model.pack(tmp_path, tp=2, rank=0, layers=(1,))
    after = job.path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "engram-l1-r0of2.bin",
        "engram-l1-r0of2.bin.receipt.json",
    ]


def test_the_receipt_says_what_and_from_where(model, packed_file):
    values = json.loads(receipt.path_for(packed_file).read_text())
    identity = packed.read_identity(packed_file)
    assert values["format"] == "spark-engram-receipt"
    assert values["file_bytes"] == packed_file.stat().st_size
    assert (values["tp"], values["rank"], values["layout"]) == (3, 1, "columns")
    assert values["revision"] == REVISION
    assert values["source"]["weight"]["tensor"] == "layers.1.engram.embed.weight"
    assert len(values["segments"]) == identity.segments > 1
    assert model.folder.joinpath(values["source"]["weight"]["shard"]).exists()


def test_a_file_of_another_revision_is_not_overwritten_silently(model, tmp_path):
    model.pack(tmp_path, tp=2, rank=0, layers=(1,), revision="old")
    with pytest.raises(MismatchError, match=r"revision is 'old', needed 'new'.*--restart"):
        model.pack(tmp_path, tp=2, rank=0, layers=(1,), revision="new")
    (job,) = model.pack(tmp_path, tp=2, rank=0, layers=(1,), revision="new", restart=True)
    assert packed.read_identity(job.path).revision == "new"


class StopError(Exception):
    pass


def interrupt_after(monkeypatch, appends):
    """Make the journal fail after some segments, as if the process ended there."""
    original = Journal.append

    def append(self, checksum):
        if len(self.checksums) >= appends:
            raise StopError
        original(self, checksum)

    monkeypatch.setattr(Journal, "append", append)
    return original


@pytest.mark.parametrize("segments", [0, 1, 3])
def test_resume_continues_and_gives_the_same_bytes(model, tmp_path, monkeypatch, segments):
    (whole,) = model.pack(tmp_path / "whole", tp=1, rank=0, layers=(1,))
    original = interrupt_after(monkeypatch, segments)
    with pytest.raises(StopError):
        model.pack(tmp_path / "cut", tp=1, rank=0, layers=(1,))
    monkeypatch.setattr(Journal, "append", original)
    events = []
    reporter = type("R", (), {"emit": lambda _s, e, **f: events.append((e, f))})()
    options = pack.PackOptions(
        checkpoint=model.folder, output=tmp_path / "cut", tp=1, rank=0, layers=(1,),
        revision=REVISION, segment_pages=16,
    )  # fmt: skip
    (job,) = pack.pack(options, reporter)
    assert job.path.read_bytes() == whole.path.read_bytes()
    starts = [f for e, f in events if e == "file" and f["state"] in ("start", "resume")]
    assert starts[0]["done_bytes"] == 4096 * (1 + 16 * segments)
    assert not job.partial.exists()
    assert not job.journal.exists()


def test_a_journalled_segment_that_did_not_survive_is_packed_again(model, tmp_path, monkeypatch):
    original = interrupt_after(monkeypatch, 3)
    with pytest.raises(StopError):
        model.pack(tmp_path, tp=1, rank=0, layers=(1,))
    monkeypatch.setattr(Journal, "append", original)
    partial = tmp_path / "engram-l1-r0of1.bin.partial"
    with partial.open("r+b") as stream:
        stream.seek(4096 * (1 + 2 * 16) + 100)
        stream.write(b"lost")
    (job,) = model.pack(tmp_path, tp=1, rank=0, layers=(1,), verify=True)
    weights, _ = model.arrays(1)
    assert np.array_equal(rows_of(job.path)[0], weights)


def test_a_torn_journal_line_is_ignored(model, tmp_path, monkeypatch):
    original = interrupt_after(monkeypatch, 2)
    with pytest.raises(StopError):
        model.pack(tmp_path, tp=1, rank=0, layers=(1,))
    monkeypatch.setattr(Journal, "append", original)
    journal = tmp_path / "engram-l1-r0of1.bin.partial.journal"
    journal.write_bytes(journal.read_bytes() + b'{"segment":2,"checksum":"0123')
    (job,) = model.pack(tmp_path, tp=1, rank=0, layers=(1,), verify=True)
    assert job.path.exists()


def test_an_unfinished_file_of_another_source_needs_restart(model, tmp_path, monkeypatch):
    original = interrupt_after(monkeypatch, 1)
    with pytest.raises(StopError):
        model.pack(tmp_path, tp=1, rank=0, layers=(1,))
    monkeypatch.setattr(Journal, "append", original)
    with pytest.raises(MismatchError, match="--restart"):
        model.pack(tmp_path, tp=1, rank=0, layers=(1,), revision="other")
    model.pack(tmp_path, tp=1, rank=0, layers=(1,), revision="other", restart=True)


def test_a_lost_receipt_is_made_again(model, tmp_path):
    (job,) = model.pack(tmp_path, tp=1, rank=0, layers=(1,))
    before = receipt.path_for(job.path).read_bytes()
    receipt.path_for(job.path).unlink()
    model.pack(tmp_path, tp=1, rank=0, layers=(1,))
    assert receipt.path_for(job.path).read_bytes() == before


def test_two_packers_do_not_meet(model, tmp_path):
    (job,) = pack.jobs(
        pack.PackOptions(checkpoint=model.folder, output=tmp_path, tp=1, rank=0, layers=(1,))
    )
    journal = Journal.open(job.journal, job.start, restart=False)
    try:
        with pytest.raises(BusyError, match="another process"):
            model.pack(tmp_path, tp=1, rank=0, layers=(1,), revision="")
    finally:
        journal.close()


def test_space_is_checked_first_with_the_numbers(model, tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[4] = 3  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result(fields))
    with pytest.raises(SpaceError, match=rf"needs \d+ bytes .*only {3 * real.f_frsize} "):
        model.pack(tmp_path, tp=1, rank=0)
    assert list(tmp_path.iterdir()) == []


def test_a_full_drive_loses_nothing(model, tmp_path, monkeypatch):
    original = directio.DirectFile.write_all

    def write_all(self, view, offset):
        if offset > 4096 * 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(self, view, offset)

    monkeypatch.setattr(directio.DirectFile, "write_all", write_all)
    with pytest.raises(SpaceError, match=r"No space left on device; make room, then run the same"):
        model.pack(tmp_path, tp=1, rank=0, layers=(1,))
    monkeypatch.setattr(directio.DirectFile, "write_all", original)
    (job,) = model.pack(tmp_path, tp=1, rank=0, layers=(1,), verify=True)
    assert job.path.exists()


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_vanished_server_is_named_and_nothing_is_lost(model, tmp_path, monkeypatch, code):
    original = directio.DirectFile.read_into

    def read_into(self, view, offset):
        if offset > 200_000 and "safetensors" in self.path.name:
            raise OSError(code, os.strerror(code))
        return original(self, view, offset)

    monkeypatch.setattr(directio.DirectFile, "read_into", read_into)
    with pytest.raises(SourceError, match=r"check the file or the NFS server.*is kept"):
        model.pack(tmp_path, tp=1, rank=0, layers=(1,))
    monkeypatch.setattr(directio.DirectFile, "read_into", original)
    (job,) = model.pack(tmp_path, tp=1, rank=0, layers=(1,), verify=True)
    assert job.path.exists()


def test_a_shard_that_shrinks_while_packing_is_an_error(model, tmp_path, monkeypatch):
    original = directio.DirectFile.read_into

    def read_into(self, view, offset):
        got = original(self, view, offset)
        return min(got, 100) if "safetensors" in self.path.name else got

    monkeypatch.setattr(directio.DirectFile, "read_into", read_into)
    with pytest.raises(SourceError, match="the shard is truncated"):
        model.pack(tmp_path, tp=1, rank=0, layers=(1,))


def test_without_o_direct_packing_works_and_says_so(model, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "O_DIRECT", 0o100000000 | os.O_DIRECTORY)  # refused with ENOTDIR
    original = os.open

    def refuse(path, flags, *rest):
        if flags & 0o100000000:
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    events = []
    reporter = type("R", (), {"emit": lambda _s, e, **f: events.append((e, f))})()
    pack.pack(
        pack.PackOptions(
            checkpoint=model.folder, output=tmp_path, tp=1, rank=0, layers=(1,), segment_pages=16
        ),
        reporter,
    )
    warnings = [f["message"] for e, f in events if e == "warning"]
    assert len(warnings) == 1
    assert "refuses O_DIRECT" in warnings[0]
    monkeypatch.undo()
    pack.verify(tmp_path / "engram-l1-r0of1.bin", None)


@pytest.mark.parametrize("at", [4096 + 5, 4096 * 3 + 4000, 4096 * 5 + 4085])
def test_verify_finds_every_damaged_page(packed_file, tmp_path, at):
    copy = tmp_path / packed_file.name
    shutil.copy(packed_file, copy)
    shutil.copy(receipt.path_for(packed_file), receipt.path_for(copy))
    pack.verify(copy, None)
    with copy.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte[0] ^ 1]))
    with pytest.raises(MismatchError, match=rf"page {at // 4096 - 1} failed its check"):
        pack.verify(copy, None)


def test_verify_finds_pages_in_the_wrong_place(packed_file, tmp_path):
    raw = bytearray(packed_file.read_bytes())
    raw[4096:8192], raw[8192:12288] = raw[8192:12288], raw[4096:8192]
    copy = tmp_path / packed_file.name
    copy.write_bytes(raw)
    with pytest.raises(MismatchError, match="page 0 failed its check"):
        pack.verify(copy, None)


def test_verify_compares_with_the_source(model, tmp_path):
    (job,) = model.pack(tmp_path, tp=3, rank=1, layers=(1,))
    other = make_model(tmp_path / "other", FakeSpec(rows_per_column=100, seed=9))
    source = pack.jobs(
        pack.PackOptions(checkpoint=other.folder, output=tmp_path, tp=3, rank=1, layers=(1,))
    )[0].source
    pack.verify(job.path, job.source)
    with pytest.raises(MismatchError, match=r"differs from layers\.1\.engram\.embed\.weight"):
        pack.verify(job.path, source)


def test_boundary_rows_are_always_compared(packed_file):
    identity = packed.read_identity(packed_file)
    rows = pack.sample_rows(identity, random.Random(1))
    inner = [b for b in identity.column_bounds if identity.row_start < b < identity.row_end]
    assert {identity.row_start, identity.row_end - 1} <= set(rows)
    assert {row for bound in inner for row in (bound - 1, bound)} <= set(rows)
    assert {identity.row_start + 240, identity.row_start + 239} <= set(rows)
    assert all(identity.row_start <= row < identity.row_end for row in rows)


@pytest.mark.parametrize(
    ("break_it", "error", "message"),
    [
        (lambda f: (f / "config.json").unlink(), UsageError, "must be the folder with config.json"),
        (lambda f: (f / "config.json").write_text("{"), UsageError, "not valid JSON"),
        (
            lambda f: (f / "model.safetensors.index.json").unlink(),
            SourceError,
            "download the whole checkpoint",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {}}'),
            SourceError,
            "does not say where layers.1.engram.embed.weight is",
        ),
        (
            lambda f: (f / "model-00002-of-00003.safetensors").unlink(),
            SourceError,
            "No such file",
        ),
        (
            lambda f: os.truncate(f / "model-00002-of-00003.safetensors", 5000),
            SourceError,
            "truncated shard",
        ),
    ],
)
def test_an_incomplete_checkpoint_is_explained(model, tmp_path, break_it, error, message):
    copy = tmp_path / "ckpt"
    shutil.copytree(model.folder, copy)
    break_it(copy)
    with pytest.raises(error, match=message):
        pack.jobs(pack.PackOptions(checkpoint=copy, output=tmp_path, tp=1, rank=0))


def test_a_missing_output_folder_is_explained(model, tmp_path):
    with pytest.raises(UsageError, match="create it on the NVMe drive"):
        pack.pack(pack.PackOptions(checkpoint=model.folder, output=tmp_path / "no", tp=1, rank=0))


def test_an_unwritable_output_is_a_target_error(model, tmp_path, monkeypatch):
    original = directio.DirectFile.open

    def refuse(path, flags, **more):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return original(path, flags, **more)

    monkeypatch.setattr(directio.DirectFile, "open", refuse)
    with pytest.raises(TargetError, match="Read-only file system"):
        model.pack(tmp_path, tp=1, rank=0, layers=(1,))


def test_the_revision_of_a_hub_download_is_found(model, tmp_path):
    commit = "dba1be0a" * 5
    hub = tmp_path / "snapshots" / commit
    hub.parent.mkdir()
    shutil.copytree(model.folder, hub)
    plain = tmp_path / "plain"
    shutil.copytree(model.folder, plain)
    metadata = plain / ".cache/huggingface/download/config.json.metadata"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"{commit}\netag\n1.0\n")
    for folder in (hub, plain):
        options = pack.PackOptions(checkpoint=folder, output=tmp_path, tp=1, rank=0)
        assert {job.identity.revision for job in pack.jobs(options)} == {commit}
