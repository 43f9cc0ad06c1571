"""The download cache: files by sha256, fetched in parallel, continued where they stopped.

A file gets its final name only after its hash was checked, so whatever has a final name is
whole; ``verified`` checks it again before every build, because discs rot.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import BinaryIO, Protocol

from spark_appliance.errors import InputError
from spark_appliance.image.errors import (
    DownloadError,
    HashMismatchError,
    ImageError,
    write_failure,
)

CHUNK = 1 << 20
_TIMEOUT_S = 60.0
_TRIES = 4
_PARALLEL = 4


class Pinned(Protocol):
    """Anything with a file name and a sha256 (hex)."""

    @property
    def file(self) -> str:
        """The file name."""

    @property
    def sha256(self) -> str:
        """The hash of the content."""


@dataclass(frozen=True, slots=True)
class Download:
    """A file to fetch: its name, hash and address."""

    file: str
    sha256: str
    url: str


Progress = Callable[[str, int], None]
"""Called with a file name and the number of bytes that have just arrived."""


def default_folder() -> Path:
    """Return the cache folder of this user (XDG_CACHE_HOME)."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "spark-appliance" / "image"


def hash_file(path: Path) -> str:
    """Return the sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Store:
    """A cache folder, and folders of files that somebody else has fetched (``seeds``)."""

    def __init__(self, folder: Path, seeds: Sequence[Path] = ()) -> None:
        self.folder = folder
        self._seeds = tuple(seeds)

    def path(self, item: Pinned) -> Path:
        """Return where the cache keeps a file; the wheel tools need its real name."""
        return self.folder / "sha256" / item.sha256 / item.file

    def locate(self, item: Pinned) -> Path | None:
        """Return where a file lies, unchecked: the cache, else a seed folder of that name.

        Raises:
            ImageError: this user may not look into the cache.
        """
        for path in (self.path(item), *(seed / item.file for seed in self._seeds)):
            try:
                if stat.S_ISREG(path.stat().st_mode):
                    return path
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise _unreadable(path, error) from None
        return None

    def verified(self, item: Pinned) -> Path:
        """Return the path of a file whose bytes have just been checked.

        Raises:
            HashMismatchError: the bytes differ from the lock.
            ImageError: the file is missing or unreadable.
        """
        path = self.locate(item)
        if path is None:
            raise ImageError(
                f"{item.file}: not in {self.folder}\n    remedy: run image build without --offline"
            )
        try:
            found = hash_file(path)
        except OSError as error:
            raise _unreadable(path, error) from None
        if found != item.sha256:
            raise HashMismatchError(path, item.sha256, found)
        return path

    def fetch(self, downloads: Iterable[Download], progress: Progress | None = None) -> None:
        """Download what is missing, several at a time; an interrupt loses nothing.

        Raises:
            DownloadError: a server cannot be reached or breaks off again and again.
            HashMismatchError: a server sends other bytes than were locked.
            ImageError: the cache cannot be written.
        """
        todo = [item for item in downloads if self.locate(item) is None]
        if not todo:
            return
        pool = ThreadPoolExecutor(_PARALLEL)
        stop = threading.Event()
        try:
            for future in [pool.submit(self._one, item, progress, stop) for item in todo]:
                future.result()
        finally:
            # an interrupt, or another file's failure: the others keep what has arrived
            stop.set()
            pool.shutdown(cancel_futures=True)

    def _one(self, item: Download, progress: Progress | None, stop: threading.Event) -> None:
        final = self.path(item)
        partial = self.folder / "partial" / item.sha256
        try:
            partial.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("ab") as file, _locked(file):
                # Another build may have finished it while this one waited for the lock.
                if final.is_file():
                    partial.unlink(missing_ok=True)
                    return
                _receive(item, file, progress, stop)
                found = hash_file(partial)
                if found != item.sha256:
                    partial.unlink()
                    raise HashMismatchError(Path(item.file), item.sha256, found)
                os.fsync(file.fileno())
                final.parent.mkdir(parents=True, exist_ok=True)
                partial.rename(final)
        except OSError as error:
            raise write_failure(self.folder, error) from None


@contextlib.contextmanager
def _locked(file: BinaryIO) -> Iterator[None]:
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _unreadable(path: Path, error: OSError) -> ImageError:
    return ImageError(
        f"{path}: cannot read: {error.strerror}\n"
        "    remedy: give this user the right to read the cache, or choose another with --cache"
    )


def _receive(
    item: Download, file: BinaryIO, progress: Progress | None, stop: threading.Event
) -> None:
    """Append the rest of a download to a file; asks the server to go on from where it ends."""
    if not item.url.startswith(("http://", "https://")):
        raise InputError.one("image.url", f"{item.url}: not an http address")
    reason = ""
    for _ in range(_TRIES):
        begin = os.fstat(file.fileno()).st_size
        request = urllib.request.Request(item.url)  # noqa: S310 - http checked above
        if begin:
            request.add_header("Range", f"bytes={begin}-")
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
                if begin and answer.status != 206:
                    file.truncate(0)
                    begin = 0
                length = answer.headers.get("Content-Length")
                got = _copy(answer, file, item.file, progress, stop)
            if stop.is_set():
                reason = "stopped"
                break
            if length is None or got == int(length):
                return
            reason = f"the connection ended after {begin + got} bytes"
        except urllib.error.HTTPError as error:
            if error.code == 416 and begin:  # nothing is left: the hash decides
                return
            reason = f"the server answers {error.code} {error.reason}"
            if error.code < 500:
                break
        except (urllib.error.URLError, TimeoutError, ConnectionError, _http_errors()) as error:
            reason = str(getattr(error, "reason", error))
    raise DownloadError(
        f"{item.file}: {reason}\n"
        "    remedy: run the command again, it goes on where it stopped; for a file that the "
        "mirror no longer has, give a mirror that keeps old files (docs/image.md)"
    )


def _http_errors() -> type[Exception]:
    import http.client

    return http.client.HTTPException


def _copy(
    source: BufferedIOBase,
    file: BinaryIO,
    name: str,
    progress: Progress | None,
    stop: threading.Event,
) -> int:
    total = 0
    # read1: what is there, so that a slow server does not hold up an interrupt
    while not stop.is_set() and (chunk := source.read1(CHUNK)):
        file.write(chunk)
        total += len(chunk)
        if progress is not None:
            progress(name, len(chunk))
    file.flush()
    return total
