from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from spark_appliance.image.errors import DownloadError, HashMismatchError, ImageError
from spark_appliance.image.store import Download, Store

CONTENT = bytes(range(256)) * 4096
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves CONTENT; ``cuts`` are the numbers of bytes after which answers break off."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cuts: list[int] = []
        self.ranges: list[str | None] = []
        self.ignore_range = False
        self.stalls = 0
        """After so many bytes the rest comes one byte at a time, until this is 0 again."""
        self.pause = threading.Event()

    def item(self, sha256: str = SHA256) -> Download:
        return Download("file.bin", sha256, f"http://127.0.0.1:{self.server_address[1]}/file.bin")


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        if self.path != "/file.bin":
            self.send_error(404)
            return
        if start and start >= len(CONTENT):
            self.send_error(416)
            return
        if self.server.ignore_range:
            start = 0
        self.send_response(206 if start else 200)
        body = CONTENT[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.server.stalls:
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body[: self.server.stalls])
                for byte in body[self.server.stalls :]:
                    if not self.server.stalls:
                        return
                    self.wfile.write(bytes([byte]))
                    self.server.pause.wait(0.01)
            return
        cut = self.server.cuts.pop(0) if self.server.cuts else len(body)
        self.wfile.write(body[:cut])

    def log_message(self, *_: object) -> None:
        """Stay quiet."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_an_interrupted_download_goes_on_where_it_stopped(server: Server, tmp_path: Path) -> None:
    server.cuts = [1000]
    Store(tmp_path).fetch([server.item()])
    assert server.ranges == [None, "bytes=1000-"]
    assert Store(tmp_path).verified(server.item()).read_bytes() == CONTENT
    assert not list((tmp_path / "partial").iterdir())


def test_what_arrived_is_kept_for_the_next_run(server: Server, tmp_path: Path) -> None:
    server.cuts = [10, 10, 10, 10]
    with pytest.raises(DownloadError, match="ended after 40 bytes"):
        Store(tmp_path).fetch([server.item()])
    assert Store(tmp_path).locate(server.item()) is None
    Store(tmp_path).fetch([server.item()])
    assert server.ranges[-1] == "bytes=40-"
    assert Store(tmp_path).verified(server.item()).read_bytes() == CONTENT


def test_a_server_without_ranges(server: Server, tmp_path: Path) -> None:
    server.cuts, server.ignore_range = [1000], True
    Store(tmp_path).fetch([server.item()])
    assert Store(tmp_path).verified(server.item()).read_bytes() == CONTENT


def test_a_whole_partial_file_is_taken(server: Server, tmp_path: Path) -> None:
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / SHA256).write_bytes(CONTENT)
    Store(tmp_path).fetch([server.item()])
    assert Store(tmp_path).verified(server.item()).read_bytes() == CONTENT


def test_wrong_bytes_never_get_a_name(server: Server, tmp_path: Path) -> None:
    item = server.item("0" * 64)
    with pytest.raises(HashMismatchError, match=SHA256):
        Store(tmp_path).fetch([item])
    assert Store(tmp_path).locate(item) is None
    assert not list((tmp_path / "partial").iterdir())


def test_a_file_that_is_gone(server: Server, tmp_path: Path) -> None:
    item = Download("gone.bin", SHA256, server.item().url.replace("file", "gone"))
    with pytest.raises(DownloadError, match="404"):
        Store(tmp_path).fetch([item])
    assert len(server.ranges) == 1


def test_a_full_disc(server: Server, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("/dev/full does not exist")
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / SHA256).symlink_to("/dev/full")
    with pytest.raises(ImageError, match=f"cannot write: {os.strerror(errno.ENOSPC)}"):
        Store(tmp_path).fetch([server.item()])
    assert Store(tmp_path).locate(server.item()) is None


def test_rotten_files_are_not_used(tmp_path: Path) -> None:
    item = Download("file.bin", SHA256, "")
    path = Store(tmp_path).path(item)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(HashMismatchError, match="the lock says"):
        Store(tmp_path).verified(item)


def test_seeds_are_checked_too(tmp_path: Path) -> None:
    (tmp_path / "seed").mkdir()
    (tmp_path / "seed/file.bin").write_bytes(CONTENT)
    store = Store(tmp_path / "cache", [tmp_path / "seed"])
    assert store.verified(Download("file.bin", SHA256, "")).parent == tmp_path / "seed"
    with pytest.raises(HashMismatchError):
        store.verified(Download("file.bin", "0" * 64, ""))
    with pytest.raises(ImageError, match=r"other\.bin: not in"):
        store.verified(Download("other.bin", SHA256, ""))


def test_only_http(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="not an http address"):
        Store(tmp_path).fetch([Download("x", SHA256, "file:///etc/passwd")])


def test_an_interrupt_ends_at_once_and_keeps_what_arrived(server: Server, tmp_path: Path) -> None:
    server.stalls = 4096
    code = (
        "import sys; from pathlib import Path; from spark_appliance.image.store import *\n"
        "Store(Path(sys.argv[1])).fetch([Download('file.bin', sys.argv[2], sys.argv[3])],"
        " lambda name, size: print(size, flush=True))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), SHA256, server.item().url],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    assert int(child.stdout.readline()) < len(CONTENT)  # something has arrived
    child.send_signal(signal.SIGINT)
    # the server goes on sending a little for ever, so this returns only if nobody waits for it
    _, errors = child.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    server.stalls = 0
    partial = tmp_path / "partial" / SHA256
    kept = partial.stat().st_size
    assert 0 < kept < len(CONTENT)
    assert CONTENT.startswith(partial.read_bytes())
    Store(tmp_path).fetch([server.item()])
    assert server.ranges[-1] == f"bytes={kept}-"
    assert Store(tmp_path).verified(server.item()).read_bytes() == CONTENT


def without_rights(function: Callable[[], object]) -> str:
    """Call a function as a user who may not read everything; returns what it raises."""
    if os.getuid() != 0:
        with pytest.raises(ImageError) as caught:
            function()
        return str(caught.value)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        message = "nothing was raised"
        try:
            os.setgroups([])
            os.setuid(65534)  # nobody
            function()
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
        os.write(theirs, message.encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        message = pipe.read()
    os.waitpid(child, 0)
    return message.removeprefix("ImageError: ")


@pytest.mark.parametrize("level", ["folder", "file"])
def test_a_cache_that_this_user_may_not_read(level: str) -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to others
        Path(name).chmod(0o755)
        store, item = Store(Path(name) / "cache"), Download("file.bin", SHA256, "")
        path = store.path(item)
        path.parent.mkdir(parents=True)
        path.write_bytes(CONTENT)
        closed = path if level == "file" else store.folder
        closed.chmod(0)
        try:
            message = without_rights(lambda: store.verified(item))
        finally:
            closed.chmod(0o700)
    assert message.startswith(f"{path}: cannot read: Permission denied\n")
    assert "remedy: give this user the right to read the cache" in message


def test_two_downloads_of_one_file_at_once(server: Server, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        for future in [
            pool.submit(lambda: Store(tmp_path).fetch([server.item()])) for _ in range(4)
        ]:
            future.result()
    assert Store(tmp_path).verified(server.item()).read_bytes() == CONTENT
    assert server.ranges == [None]  # the others waited for the first
    assert not list((tmp_path / "partial").iterdir())
