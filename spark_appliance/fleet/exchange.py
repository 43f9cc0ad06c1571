"""An HTTP request with one deadline for the whole of it.

The timeouts of a socket count every read anew: a server that sends a byte now and then never ends.
So a thread of its own sends and reads; whoever waits for it waits until the deadline and no longer.
"""

from __future__ import annotations

import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, Self

_BLOCK: Final = 1 << 16


class Exchange:
    """A request that is sent at once; ``seconds`` is its deadline, from the name's look-up on.

    Leaving the context gives the answer up: the connection is closed at its next byte.
    """

    def __init__(self, request: urllib.request.Request, seconds: float) -> None:
        self._request = request
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._left = threading.Event()
        self._found: queue.SimpleQueue[int | bytes | Exception] = queue.SimpleQueue()
        # daemon: one that still waits for a byte must not keep the program
        threading.Thread(target=self._work, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._left.set()

    def status(self) -> int:
        """Return the HTTP status; call it once, first.

        Raises:
            TimeoutError: after the deadline.
            OSError: without a connection.
            http.client.HTTPException: when the answer is no HTTP.
        """
        item = self._next()
        if not isinstance(item, int):
            raise TypeError("the status comes first")
        return item

    def blocks(self) -> Iterator[bytes]:
        """Yield the body as it comes, in blocks of at most 64 KiB.

        Raises:
            TimeoutError: after the deadline.
            OSError: when the connection breaks.
            http.client.HTTPException: when the answer is no HTTP.
        """
        while True:
            item = self._next()
            if item == b"":
                return
            if isinstance(item, bytes):
                yield item

    def lines(self) -> Iterator[bytes]:
        """Yield the body's lines as they come, without their ends; raises as ``blocks``."""
        rest = b""
        for block in self.blocks():
            *lines, rest = (rest + block).split(b"\n")
            yield from lines
        if rest:
            yield rest

    def _next(self) -> int | bytes:
        left = self._until - time.monotonic()
        try:
            if left <= 0:
                raise queue.Empty
            item = self._found.get(timeout=left)
        except queue.Empty:
            raise TimeoutError(f"not finished after {self._seconds:g} s") from None
        if isinstance(item, Exception):
            raise item
        return item

    def _work(self) -> None:
        try:
            with self._open() as answer:
                self._found.put(int(answer.status))
                while not self._left.is_set():
                    block = answer.read1(_BLOCK)
                    self._found.put(block)
                    if not block:
                        return
        except Exception as error:  # raised again where somebody waits for the answer
            self._found.put(error)

    def _open(self) -> Any:
        try:
            # the same deadline for each read: a server that says nothing at all is left as well
            return urllib.request.urlopen(self._request, timeout=self._seconds)  # noqa: S310
        except urllib.error.HTTPError as error:
            return error
