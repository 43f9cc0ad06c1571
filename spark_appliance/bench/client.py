"""The HTTP client: aiohttp, recording when each piece of a streamed answer arrived.

aiohttp and not httpx because its parser is in C: reading 16 streams of 500 events a second
took about a third of httpx's processor time (benchmarks/bench_client.py repeats this).

Every request opens its own connection, so that no request depends on how an earlier one left
a shared one; the connection's time is part of TTFT and is recorded. Redirects are not followed
and proxies from the environment are not used: both would measure something else.
"""

from __future__ import annotations

import asyncio
import errno
import json
import ssl
import time
from collections.abc import Callable
from types import SimpleNamespace, TracebackType
from typing import Any

from pydantic import SecretStr

from spark_appliance.bench import failures
from spark_appliance.bench.endpoint import Address
from spark_appliance.bench.result import Failure
from spark_appliance.bench.wire import ChatRequest, Limits, Recording
from spark_appliance.errors import OperationError

try:
    import aiohttp
except ImportError as error:  # pragma: no cover - shown by a test in a bare interpreter
    raise OperationError(
        "`bench` needs an HTTP library that is not installed\n"
        "    remedy: pip install '.[bench]' (in a checkout)"
    ) from error

HTTP_LIBRARY = f"aiohttp {aiohttp.__version__}"

_MAX_BODY = 64 * 1024  # bytes of an error body that are read
_MAX_STREAM = 256 * 1024 * 1024  # bytes of one stream; a 262144-token answer is below a third
_DONE = (b"\ndata: [DONE]", b"\ndata:[DONE]")
_TAIL = max(map(len, _DONE)) - 1


class Client:
    """An async context around one endpoint."""

    def __init__(
        self, address: Address, key: SecretStr | None = None, limits: Limits | None = None
    ) -> None:
        self.address = address
        self.limits = limits or Limits()
        self._key = key
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_end.append(_note_connected)
        headers = {"Accept": "text/event-stream, application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key.get_secret_value()}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.limits.connect),
            trace_configs=[trace],
            headers=headers,
            auto_decompress=True,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("Client is used outside its context")
        return self._session

    async def stream(
        self,
        request: ChatRequest,
        progress: Callable[[Recording], None] | None = None,
    ) -> Recording:
        """Send one request and record its answer; a bad answer is ``Recording.failure``.

        ``progress`` is called after every read. Never raises for what an endpoint does.
        """
        session = self._open()
        url = self.address.api + "/chat/completions"
        body = json.dumps(request.body(), ensure_ascii=False).encode()
        recording = Recording(started=time.perf_counter())
        note = SimpleNamespace(recording=recording)
        deadline = _Deadline(recording, self.limits)
        try:
            async with asyncio.timeout(None) as timeout:
                deadline.arm(timeout)
                async with session.post(
                    url,
                    data=body,
                    headers={"Content-Type": "application/json"},
                    allow_redirects=False,
                    trace_request_ctx=note,
                ) as response:
                    if response.status != 200:
                        head = await response.content.read(_MAX_BODY)
                        recording.failure = _status_failure(response, head, url)
                    else:
                        await _receive(response, recording, request.max_tokens, progress)
                        if not recording.events:
                            head = b"".join(block for _, block in recording.reads)
                            recording.failure = failures.not_sse(response.content_type, head, url)
        except aiohttp.ServerTimeoutError as error:
            recording.failure = _connection_failure(error, recording, url)
        except TimeoutError:
            recording.failure = deadline.failure(url)
        except (aiohttp.ClientError, OSError) as error:
            recording.failure = _connection_failure(error, recording, url)
        finally:
            deadline.disarm()
            recording.ended = time.perf_counter()
        return recording

    async def get(self, path: str, timeout: float = 10.0) -> tuple[int, bytes]:
        """GET a path below the root; returns (status, body). Raises EndpointError."""
        url = self.address.root + path
        try:
            async with (
                asyncio.timeout(timeout),
                self._open().get(
                    url,
                    allow_redirects=False,
                    trace_request_ctx=SimpleNamespace(recording=None),
                ) as response,
            ):
                return response.status, await response.read()
        except aiohttp.ServerTimeoutError as error:
            raise EndpointError(_connection_failure(error, None, url)) from None
        except TimeoutError:
            raise EndpointError(
                Failure(
                    kind="unreachable",
                    message=f"{url} did not answer within {timeout:g} s",
                    remedy="check that the server is up and not blocked by a firewall",
                )
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise EndpointError(_connection_failure(error, None, url)) from None

    async def get_json(self, path: str) -> Any | None:
        """GET a path and decode it; None where the endpoint has no such JSON document."""
        status, body = await self.get(path)
        if status != 200:
            return None
        try:
            return json.loads(body)
        except ValueError:
            return None


class EndpointError(OperationError):
    """The endpoint cannot be used at all; ``failure`` says why."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        tail = f"\n    remedy: {failure.remedy}" if failure.remedy else ""
        super().__init__(f"{failure.message} [{failure.kind}]{tail}")


async def _receive(
    response: aiohttp.ClientResponse,
    recording: Recording,
    max_tokens: int,
    progress: Callable[[Recording], None] | None,
) -> None:
    reads = recording.reads
    clock = time.perf_counter
    tail = b"\n"
    size = 0
    # Every event with text carries at least one token; the rest is role, usage and slack.
    most = 4 * max_tokens + 1000
    async for block in response.content.iter_any():
        reads.append((clock(), block))
        recording.events += block.count(b"data:")
        size += len(block)
        if recording.events > most or size > _MAX_STREAM:
            recording.failure = Failure(
                kind="endless",
                message=f"the server went on after {recording.events} events "
                f"({size} bytes) for max_tokens {max_tokens}",
                remedy="this server does not obey max_tokens: it cannot be measured",
            )
            return
        if progress is not None:
            progress(recording)
        seam = tail + block
        if any(mark in seam for mark in _DONE):
            return
        tail = seam[-_TAIL:]


class _Deadline:
    """The three time limits of a stream, with one timer that re-arms itself when it fires."""

    def __init__(self, recording: Recording, limits: Limits) -> None:
        self._recording = recording
        self._limits = limits
        self._timeout: asyncio.Timeout | None = None
        self._handle: asyncio.TimerHandle | None = None
        self._kind = "total"

    def arm(self, timeout: asyncio.Timeout) -> None:
        self._timeout = timeout
        self._check()

    def disarm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _due(self) -> tuple[float, str]:
        recording, limits = self._recording, self._limits
        total = recording.started + limits.total
        if recording.reads:
            next_read, kind = recording.reads[-1][0] + limits.stall, "stalled"
        else:
            next_read, kind = recording.started + limits.first_token, "no-first-token"
        return (next_read, kind) if next_read < total else (total, "total")

    def _check(self) -> None:
        due, self._kind = self._due()
        left = due - time.perf_counter()
        loop = asyncio.get_running_loop()
        if left > 0:
            # Looking again after the shortest limit finds a stall early although the limit for
            # the first token, which held when this timer was set, is longer.
            self._handle = loop.call_later(min(left, self._limits.stall), self._check)
        elif self._timeout is not None:
            self._timeout.reschedule(loop.time())

    def failure(self, url: str) -> Failure:
        limits = self._limits
        if self._kind == "stalled":
            return Failure(
                kind="stalled",
                message=f"the stream stopped: nothing came for {limits.stall:g} s",
                remedy="read the engine's log; --stall-timeout changes the limit",
            )
        if self._kind == "no-first-token":
            return Failure(
                kind="no-first-token",
                message=f"{url} sent nothing for {limits.first_token:g} s",
                remedy="read the engine's log; --first-token-timeout changes the limit",
            )
        return Failure(
            kind="endless",
            message=f"the answer was not finished after {limits.total:g} s",
            remedy="--request-timeout changes the limit",
        )


async def _note_connected(
    _session: aiohttp.ClientSession,
    context: SimpleNamespace,
    _params: aiohttp.TraceConnectionCreateEndParams,
) -> None:
    note = context.trace_request_ctx
    if note is not None and note.recording is not None:
        note.recording.connected = time.perf_counter()


def _status_failure(response: aiohttp.ClientResponse, head: bytes, url: str) -> Failure:
    if 300 <= response.status < 400:
        target = response.headers.get("Location", "another address")
        return Failure(
            kind="not-found",
            message=f"{url} answered {response.status}: it redirects to {target}",
            remedy="give the final URL",
        )
    return failures.from_status(response.status, head, url)


def _connection_failure(error: Exception, recording: Recording | None, url: str) -> Failure:
    began = recording is not None and bool(recording.reads)
    if isinstance(error, (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError)) or began:
        events = recording.events if recording is not None else 0
        return Failure(
            kind="cut",
            message=f"the connection to {url} was cut after {events} events"
            if began
            else f"{url} closed the connection without an answer",
            remedy="read the engine's log: a rank or a proxy ended the request",
        )
    if isinstance(
        error,
        (
            aiohttp.ClientConnectorCertificateError,
            aiohttp.ClientConnectorSSLError,
            ssl.SSLError,
        ),
    ):
        return Failure(
            kind="tls",
            message=f"{url}: no TLS connection: {error}",
            remedy="check http against https, and the server's certificate",
        )
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return Failure(
            kind="unresolved",
            message=f"{url}: the host name does not resolve",
            remedy="check the name, or give the address",
        )
    number = getattr(error, "errno", None)
    if number is None and isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
    if number == errno.ECONNREFUSED:
        return Failure(
            kind="refused",
            message=f"{url}: connection refused: no server listens there",
            remedy="check host and port; an engine that loads its model does not listen yet "
            "(--wait SECONDS waits for it)",
        )
    if isinstance(error, aiohttp.ServerTimeoutError) or number in (errno.ETIMEDOUT,):
        reason = "no connection in time"
    else:
        reason = str(error) or type(error).__name__
    return Failure(
        kind="unreachable",
        message=f"{url}: {reason}",
        remedy="check that the machine is up and not behind a firewall",
    )
