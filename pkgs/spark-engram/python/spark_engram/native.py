"""The native core (``libspark_engram.so``) through ctypes, and nothing more.

ctypes releases the interpreter lock during each call.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from spark_engram.errors import EngramError

ABI_VERSION = 1
HISTOGRAM_BUCKETS = 24
OK, CORRUPT = 0, -4
BACKENDS = {"auto": 0, "io_uring": 1, "pread": 2}
MESSAGE_BYTES = 512


class Options(ctypes.Structure):
    """``se_options`` of ``spark_engram.h``."""

    _fields_ = (
        ("fd", ctypes.c_int32),
        ("backend", ctypes.c_uint32),
        ("depth", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("max_run_pages", ctypes.c_uint32),
        ("sqpoll", ctypes.c_uint32),
        ("cache_ways", ctypes.c_uint32),
        ("file_id", ctypes.c_uint32),
        ("row_start", ctypes.c_uint64),
        ("row_end", ctypes.c_uint64),
        ("max_ids", ctypes.c_uint64),
        ("cache_bytes", ctypes.c_uint64),
    )


class Stats(ctypes.Structure):
    """``se_stats`` of ``spark_engram.h``."""

    _fields_ = (
        ("batches", ctypes.c_uint64),
        ("lookups", ctypes.c_uint64),
        ("owned", ctypes.c_uint64),
        ("cache_hits", ctypes.c_uint64),
        ("pages", ctypes.c_uint64),
        ("reads", ctypes.c_uint64),
        ("read_bytes", ctypes.c_uint64),
        ("errors", ctypes.c_uint64),
        ("batch_us_sum", ctypes.c_uint64),
        ("read_us_sum", ctypes.c_uint64),
        ("batch_us", ctypes.c_uint64 * HISTOGRAM_BUCKETS),
        ("read_us", ctypes.c_uint64 * HISTOGRAM_BUCKETS),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """Return the loaded core with its signatures set.

    ``SPARK_ENGRAM_LIBRARY`` names another build of it (tests run sanitizer builds this way).

    Raises:
        EngramError: the library is missing or belongs to another version of this package.

    """
    default = Path(__file__).with_name("libspark_engram.so")
    path = Path(os.environ.get("SPARK_ENGRAM_LIBRARY") or default)
    try:
        core = ctypes.CDLL(str(path))
    except OSError as error:
        raise EngramError(
            f"cannot load the native core {path}: {error}; install spark-engram with pip"
        ) from error
    core.se_abi_version.restype = ctypes.c_uint32
    if core.se_abi_version() != ABI_VERSION:
        raise EngramError(f"{path} belongs to another version of spark-engram; install it again")
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    u32, u64, size = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_size_t
    signatures: dict[str, tuple[object, tuple[object, ...]]] = {
        "se_backends": (text, ()),
        "se_crc32c": (u32, (pointer, size, u32)),
        "se_pack_pages": (u32, (pointer, pointer, u64, u64, u32, u32, pointer)),
        "se_check_pages": (
            ctypes.c_int,
            (pointer, u64, u64, u32, ctypes.POINTER(u32), ctypes.POINTER(u64)),
        ),
        "se_store_open": (
            ctypes.c_int,
            (ctypes.POINTER(Options), ctypes.POINTER(pointer), text, size),
        ),
        "se_store_close": (None, (pointer,)),
        "se_store_backend": (text, (pointer,)),
        "se_store_note": (text, (pointer,)),
        "se_store_gather": (ctypes.c_int, (pointer, pointer, u64, pointer, pointer, text, size)),
        "se_store_stats": (None, (pointer, ctypes.POINTER(Stats))),
        "se_queue_new": (pointer, ()),
        "se_queue_free": (None, (pointer,)),
        "se_job_new": (pointer, (pointer, pointer, pointer, u64, pointer, pointer, ctypes.c_int)),
        "se_job_free": (None, (pointer,)),
        "se_job_run": (None, (pointer,)),
        "se_job_start": (None, (pointer,)),
        "se_job_wait": (None, (pointer,)),
        "se_job_status": (ctypes.c_int, (pointer,)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(core, name)
        function.restype = result
        function.argtypes = arguments
    return core


def backends() -> tuple[str, ...]:
    """Return the read backends this build has, best first."""
    names: bytes = library().se_backends()
    return tuple(names.decode().split(","))
