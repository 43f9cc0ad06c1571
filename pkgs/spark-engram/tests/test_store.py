import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import make_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spark_engram import metrics, native, receipt
from spark_engram.errors import MismatchError, ReadError, UsageError
from spark_engram.fake import FakeSpec
from spark_engram.job import Job, Queue
from spark_engram.store import RowStore, StoreOptions

BACKENDS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            name not in native.backends(), reason=f"this build has no {name} backend"
        ),
    )
    for name in ("io_uring", "pread")
]


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param == "io_uring" and not io_uring_allowed():
        pytest.skip("this kernel or container refuses io_uring")
    return request.param


def io_uring_allowed():
    try:
        with open("/proc/sys/kernel/io_uring_disabled") as stream:  # noqa: PTH123
            return stream.read().strip() == "0"
    except FileNotFoundError:
        return os.uname().release >= "5.10"


@pytest.fixture
def truth(model, packed_file):
    """What gather must give: the source arrays, zero outside the rank's rows."""
    weights, scales = (array.copy() for array in model.arrays(1))
    with RowStore(packed_file) as store:
        owned = store.identity.rows
    for array in (weights, scales):
        array[: owned.start] = 0
        array[owned.end :] = 0
    return weights, scales, owned


def options(backend, **more):
    return StoreOptions(backend=backend, threads=8, depth=16, **more)


def test_gather_gives_the_source_rows(backend, packed_file, truth):
    weights, scales, _ = truth
    ids = np.arange(len(weights), dtype=np.int64)
    with RowStore(packed_file, options(backend)) as store:
        assert store.backend == backend
        for order in (ids, ids[::-1], np.random.default_rng(3).permutation(ids)):
            found = store.gather(order)
            assert np.array_equal(found[0], weights[order])
            assert np.array_equal(found[1], scales[order])


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_ids_in_any_order(backend, packed_file, truth, data):
    weights, scales, owned = truth
    edge = st.sampled_from(
        [0, owned.start - 1, owned.start, owned.end - 1, owned.end, len(weights) - 1]
    )
    odd = st.sampled_from([-1, len(weights), 2**62, -(2**63), 2**63 - 1])
    ids = np.array(
        data.draw(st.lists(st.integers(0, len(weights) - 1) | edge | odd, max_size=300)), np.int64
    )
    settings_ = options(
        backend,
        max_ids=data.draw(st.integers(1, 400)),
        max_run_pages=data.draw(st.integers(1, 64)),
        cache_bytes=data.draw(st.sampled_from([0, 5000, 10**6])),
        cache_ways=data.draw(st.integers(1, 16)),
    )
    inside = (ids >= 0) & (ids < len(weights))
    with RowStore(packed_file, settings_) as store:
        for _ in range(2):  # the second time from the cache, if there is one
            found = store.gather(ids)
            assert np.array_equal(found[0][inside], weights[ids[inside]])
            assert np.array_equal(found[1][inside], scales[ids[inside]])
            assert not found[0][~inside].any()


def test_large_batches_use_the_radix_sort(backend, packed_file, truth):
    weights, scales, owned = truth
    ids = np.random.default_rng(0).integers(owned.start, owned.end, 20_000)
    with RowStore(packed_file, options(backend)) as store:
        found = store.gather(ids)
        stats = store.stats()
    assert np.array_equal(found[0], weights[ids])
    assert np.array_equal(found[1], scales[ids])
    # Rows of one page are read once, neighbouring pages together.
    assert stats.pages == len(np.unique((ids - owned.start) // 15))
    assert stats.reads <= -(-stats.pages // 8) + 8


def test_rows_of_other_ranks_are_left_as_they_are(backend, packed_file, truth):
    _, _, owned = truth
    weights = np.full((3, 256), 7, np.uint8)
    scales = np.full((3, 8), 9, np.uint8)
    ids = np.array([owned.start - 1, owned.end, -5], np.int64)
    with RowStore(packed_file, options(backend)) as store:
        store.gather(ids, weights, scales)
    assert (weights == 7).all()
    assert (scales == 9).all()


def test_counters_and_histograms(backend, packed_file, truth):
    _, _, owned = truth
    first = owned.start
    with RowStore(packed_file, options(backend, cache_bytes=10**6)) as store:
        store.gather(np.array([first, first + 1, first + 300, first, 0], np.int64))
        store.gather(np.array([first, first + 300], np.int64))
        stats = store.stats()
        text = metrics.render([store])
    assert (stats.batches, stats.lookups, stats.owned) == (2, 7, 6)
    assert (stats.pages, stats.reads, stats.read_bytes) == (2, 2, 8192)
    assert (stats.cache_hits, stats.errors) == (2, 0)
    assert sum(stats.batch_us) == 2
    assert sum(stats.read_us) == 2
    label = f'{{layer="1",rank="1",backend="{backend}"}}'
    assert f"spark_engram_lookups_total{label} 7" in text
    assert "# TYPE spark_engram_read_seconds histogram" in text
    assert f"spark_engram_read_seconds_count{label} 2" in text
    assert 'le="+Inf"} 2' in text


def test_percentiles_of_a_histogram():
    counts = [0, 0, 50, 40, 9, 1, 0]
    assert metrics.percentile_us(counts, 0.5) == 4
    assert metrics.percentile_us(counts, 0.99) == 16
    assert metrics.percentile_us([0, 0], 0.5) == 0
    assert metrics.percentile_us([0, 1], 0.5) == float("inf")


def test_many_threads_share_one_store(backend, packed_file, truth):
    weights, scales, owned = truth
    failures = []

    def read(seed, store):
        generator = np.random.default_rng(seed)
        for _ in range(30):
            ids = generator.integers(owned.start, owned.end, 200)
            found = store.gather(ids)
            if not (np.array_equal(found[0], weights[ids]) and (found[1] == scales[ids]).all()):
                failures.append(seed)

    with RowStore(packed_file, options(backend, cache_bytes=50_000)) as store:
        threads = [threading.Thread(target=read, args=(seed, store)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.stats().batches == 180
    assert failures == []


def test_many_stores_share_one_file(backend, packed_file, truth):
    weights, _, owned = truth
    ids = np.random.default_rng(1).integers(owned.start, owned.end, 500)
    stores = [RowStore(packed_file, options(backend)) for _ in range(4)]
    results = [None] * len(stores)

    def read(at):
        results[at] = stores[at].gather(ids)[0]

    threads = [threading.Thread(target=read, args=(at,)) for at in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for store in stores:
        store.close()
    assert all(np.array_equal(result, weights[ids]) for result in results)


@pytest.fixture
def damaged(packed_file, tmp_path):
    """A private copy with one bit of page 2 flipped."""
    copy = tmp_path / packed_file.name
    shutil.copy(packed_file, copy)
    shutil.copy(receipt.path_for(packed_file), receipt.path_for(copy))
    with copy.open("r+b") as stream:
        stream.seek(4096 * 3 + 1234)
        byte = stream.read(1)[0]
        stream.seek(4096 * 3 + 1234)
        stream.write(bytes([byte ^ 4]))
        os.fsync(stream.fileno())
    return copy


def test_a_damaged_page_is_an_error_and_the_store_goes_on(backend, damaged, truth):
    weights, _, owned = truth
    with RowStore(damaged, options(backend)) as store:
        bad = np.arange(owned.start, owned.start + 100, dtype=np.int64)
        with pytest.raises(ReadError, match="page 2 failed its check"):
            store.gather(bad)
        good = np.arange(owned.start + 45, owned.start + 100, dtype=np.int64)
        assert np.array_equal(store.gather(good)[0], weights[good])
        assert store.stats().errors == 1


def test_a_file_cut_while_open_is_an_error(backend, packed_file, tmp_path, truth):
    _, _, owned = truth
    copy = tmp_path / packed_file.name
    shutil.copy(packed_file, copy)
    with RowStore(copy, options(backend)) as store:
        os.truncate(copy, 4096 * 5)
        with pytest.raises(ReadError, match="truncated file"):
            store.gather(np.arange(owned.start, owned.end, dtype=np.int64))


def test_a_job_fills_its_staging(backend, packed_file, truth):
    weights, scales, owned = truth
    ids = np.array([owned.start, owned.end - 1, owned.start], np.int64)
    staging = np.zeros((3, 256), np.uint8), np.zeros((3, 8), np.uint8)
    with RowStore(packed_file, options(backend)) as store:
        queue = Queue()
        addresses = (staging[0].ctypes.data, staging[1].ctypes.data)
        job = Job(store, ids.ctypes.data, 3, *addresses, queue=queue)
        job.run()
        assert np.array_equal(staging[0], weights[ids])
        ids[:] = owned.start + 7  # a graph replay changes the ids in place
        job.run()
        assert np.array_equal(staging[1], scales[ids])
        ids[:] = owned.start + 8
        job.start()
        job.wait()
        job.wait()
        assert np.array_equal(staging[0], weights[ids])
        assert not job.failed
        job.free()
        queue.close()


JOB = """
import sys
import numpy as np
from pathlib import Path
from spark_engram.job import Job, Queue
from spark_engram.store import RowStore, StoreOptions
store = RowStore(Path(sys.argv[1]), StoreOptions(backend=sys.argv[2], threads=4))
start = store.identity.row_start
ids = np.arange(start, start + 100, dtype=np.int64)
w, s = np.zeros((100, 256), np.uint8), np.zeros((100, 8), np.uint8)
job = Job(store, ids.ctypes.data, 100, w.ctypes.data, s.ctypes.data,
          queue=Queue(), abort_on_error=sys.argv[3] == "abort")
if sys.argv[4] == "run":
    job.run()
else:
    job.start()
    job.wait()
print("failed" if job.failed else "fine")
"""


@pytest.mark.parametrize("mode", ["abort", "report"])
@pytest.mark.parametrize("step", ["run", "start"])
def test_a_job_that_fails_ends_the_process_loudly(backend, damaged, mode, step):
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(damaged), backend, mode, step],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "spark-engram: fatal: page 2 failed its check" in done.stderr
    if mode == "abort":
        assert done.returncode == -signal.SIGABRT
        assert done.stdout == ""
    else:
        assert (done.returncode, done.stdout) == (0, "failed\n")


SECCOMP = """
import ctypes, struct, sys
from pathlib import Path
import numpy as np
# Refuse io_uring_setup (425) as Docker's default profile does: EPERM.
filters = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7fff0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *f) for f in filters))
class Prog(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
prog = Prog(len(filters), ctypes.addressof(program))
assert libc.prctl(22, 2, ctypes.byref(prog)) == 0
from spark_engram.errors import UsageError
from spark_engram.store import RowStore, StoreOptions
store = RowStore(Path(sys.argv[1]))
start = store.identity.row_start
print(store.backend, "|", store.note, "|", store.gather(np.array([start]))[0].any())
try:
    RowStore(Path(sys.argv[1]), StoreOptions(backend="io_uring"))
except UsageError as error:
    print(error)
"""


def test_pread_takes_over_where_seccomp_refuses_io_uring(packed_file):
    if "io_uring" not in native.backends():
        pytest.skip("this build has no io_uring backend")
    done = subprocess.run(
        [sys.executable, "-c", SECCOMP, str(packed_file)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "pread | io_uring refused: Operation not permitted | True"
    assert "cannot open the row store: io_uring refused" in second


@pytest.mark.parametrize(
    "wrong",
    [
        {"depth": 0},
        {"depth": 5000},
        {"threads": 0},
        {"max_run_pages": 0},
        {"max_run_pages": 65},
        {"max_ids": 0},
        {"cache_ways": 17},
        {"cache_bytes": 1},
        {"backend": "mmap"},
    ],
)
def test_options_out_of_range_are_refused(packed_file, wrong):
    with pytest.raises(UsageError, match=r"must be|row cache"):
        RowStore(packed_file, StoreOptions(**wrong))


def test_options_from_the_environment():
    found = StoreOptions.from_environment(
        {
            "SPARK_ENGRAM_BACKEND": "pread",
            "SPARK_ENGRAM_DEPTH": "64",
            "SPARK_ENGRAM_THREADS": "",
            "SPARK_ENGRAM_SQPOLL": "1",
            "SPARK_ENGRAM_CACHE_BYTES": "1000000",
        }
    )
    assert found == StoreOptions(
        backend="pread", depth=64, threads=96, sqpoll=True, cache_bytes=1_000_000
    )
    with pytest.raises(UsageError, match="SPARK_ENGRAM_DEPTH=-1: must be a whole number"):
        StoreOptions.from_environment({"SPARK_ENGRAM_DEPTH": "-1"})
    with pytest.raises(UsageError, match="must be one of auto, io_uring, pread"):
        StoreOptions.from_environment({"SPARK_ENGRAM_BACKEND": "aio"})


def test_sqpoll(packed_file, truth):
    if "io_uring" not in native.backends() or not io_uring_allowed():
        pytest.skip("needs io_uring")
    weights, _, owned = truth
    try:
        store = RowStore(packed_file, StoreOptions(backend="io_uring", sqpoll=True, depth=8))
    except UsageError as error:
        pytest.skip(f"this kernel refuses SQPOLL: {error}")
    ids = np.random.default_rng(1).integers(owned.start, owned.end, 3000)
    with store:
        assert np.array_equal(store.gather(ids)[0], weights[ids])


def test_a_missing_file_says_how_to_make_it(tmp_path):
    with pytest.raises(MismatchError, match="pack it with `spark-engram pack`"):
        RowStore(tmp_path / "engram-l1-r0of1.bin")


def test_a_file_system_without_o_direct_is_refused(packed_file, monkeypatch):
    original = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return original(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(MismatchError, match="refuses O_DIRECT; keep packed files on a local"):
        RowStore(packed_file)
    RowStore(packed_file, StoreOptions(direct=False)).close()


def test_a_closed_store_refuses(packed_file):
    store = RowStore(packed_file)
    store.close()
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.gather(np.zeros(1, np.int64))


@pytest.mark.parametrize("shape", [(2, 256), (3, 255)])
def test_outputs_of_the_wrong_shape_are_refused(packed_file, shape):
    with RowStore(packed_file) as store:
        with pytest.raises(ValueError, match="need a uint8 array"):
            store.gather(np.zeros(3, np.int64), np.zeros(shape, np.uint8))
        with pytest.raises(ValueError, match="one dimension"):
            store.gather(np.zeros((3, 1), np.int64))


def test_packed_layouts_agree_with_direct_reads(tmp_path):
    model = make_model(tmp_path / "ckpt", FakeSpec(rows_per_column=3, layers=(7,), heads=2))
    (job,) = model.pack(tmp_path, tp=1, rank=0)
    weights, scales = model.arrays(7)
    with RowStore(job.path, StoreOptions(direct=False)) as store:
        found = store.gather(np.arange(len(weights), dtype=np.int64))
    assert np.array_equal(found[0], weights)
    assert np.array_equal(found[1], scales)


def test_the_sources_agree_on_the_abi():
    text = (Path(__file__).parents[1] / "src" / "spark_engram.h").read_text()
    assert f"#define SE_ABI_VERSION {native.ABI_VERSION}\n" in text
    assert f"#define SE_HISTOGRAM_BUCKETS {native.HISTOGRAM_BUCKETS}\n" in text
