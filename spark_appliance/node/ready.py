"""``ready``: the endpoint is up once it generates the right answer, and down once it cannot.

A status code is not enough: an engine was seen "running" requests at 0 tokens/s for days while
its health route said 200 (field notes P98). A slow answer is not enough either: a probe may wait
behind long prompts. So a probe that fails while serving counts only when the engine's own token
counters stand still.
"""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final
from urllib.parse import urlsplit

from spark_appliance.node.clock import Clock
from spark_appliance.node.errors import NodeError
from spark_appliance.node.files import remove, write_atomic
from spark_appliance.node.guard import READY_FILE
from spark_appliance.node.journal import Journal
from spark_appliance.node.notify import Notifier
from spark_appliance.node.plan import NodeContext

WRONG_ANSWERS: Final = 3
"""Wrong answers in a row before a start is given up."""

STALLED_PROBES: Final = 2
"""Probes in a row without an answer and without progress before the engine counts as wedged."""

UNKNOWN_PROBES: Final = 5
"""The same where the engine publishes no counters, but its health route still answers."""

MAX_BODY: Final = 4 * 2**20

METRICS_SECONDS: Final = 10.0

_TOKENS: Final = re.compile(rb"^sglang:\w*tokens_total(?:\{[^\n]*\})? ([0-9.eE+]+)$", re.MULTILINE)
"""sglang 0.5.23 srt/observability/metrics_collector.py: realtime_, prompt_, generation_..."""


class Kind(Enum):
    """What a probe found."""

    DOWN = "down"
    LOADING = "loading"
    GOOD = "good"
    BUSY = "busy"
    WRONG = "wrong"
    SILENT = "silent"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Found:
    """A probe's result with a text for people."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Asks the engine over HTTP, on the head itself. ``timeout`` is in seconds."""

    live_url: str
    generate_url: str
    body: dict[str, Any]
    expect: str
    timeout: float
    key: str | None

    def live(self) -> Found:
        """Ask the health route: DOWN, LOADING or GOOD."""
        try:
            status, _ = self._ask(self.live_url, None)
        except (OSError, http.client.HTTPException) as error:
            return Found(Kind.DOWN, f"no answer from {self.live_url}: {_reason(error)}")
        if status == 200:
            return Found(Kind.GOOD, "the health route answers")
        return Found(Kind.LOADING, f"{self.live_url} answers {status}")

    def generate(self) -> Found:
        """Ask for a generation and judge its answer."""
        try:
            status, raw = self._ask(self.generate_url, json.dumps(self.body).encode())
        except (OSError, http.client.HTTPException) as error:
            return Found(Kind.SILENT, f"no generation from {self.generate_url}: {_reason(error)}")
        text = raw.decode(errors="replace")
        if status in (401, 403):
            return Found(Kind.REFUSED, f"{self.generate_url} refuses the API key ({status})")
        if status in (429, 503):
            return Found(Kind.BUSY, f"{self.generate_url} answers {status}")
        if status != 200:
            return Found(Kind.WRONG, f"{self.generate_url} answers {status}: {text[:200]}")
        answer = _answer(raw)
        if answer is None:
            return Found(Kind.WRONG, f"{self.generate_url} gives no chat completion: {text[:200]}")
        if not re.search(rf"(?<!\w){re.escape(self.expect)}(?!\w)", answer):
            return Found(Kind.WRONG, f"the answer lacks {self.expect!r}: {answer[:200]!r}")
        return Found(Kind.GOOD, "a generation gave the right answer")

    def tokens(self) -> float | None:
        """Return the sum of the engine's token counters, None where it publishes none."""
        parts = urlsplit(self.generate_url)
        try:
            status, raw = self._ask(f"{parts.scheme}://{parts.netloc}/metrics", None)
        except (OSError, http.client.HTTPException):
            return None
        counters = [float(value) for value in _TOKENS.findall(raw)] if status == 200 else []
        return sum(counters) if counters else None

    def _ask(self, url: str, body: bytes | None) -> tuple[int, bytes]:
        request = urllib.request.Request(url, data=body)  # noqa: S310 - http URL of the plan
        if body is not None:
            request.add_header("Content-Type", "application/json")
        if self.key is not None:
            request.add_header("Authorization", f"Bearer {self.key}")
        timeout = min(self.timeout, METRICS_SECONDS) if url.endswith("/metrics") else self.timeout
        # no proxy from the environment: the engine is on this very machine
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout) as answer:
                return answer.status, answer.read(MAX_BODY)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(MAX_BODY)


@dataclass(slots=True)
class Readiness:
    """Waits for the endpoint, then watches it. ``wait`` lets time pass and says whether to stop."""

    context: NodeContext
    probe: Probe
    clock: Clock
    wait: Callable[[float], bool]
    journal: Journal
    notifier: Notifier
    interval: float
    steady_interval: float
    ready_timeout: float

    def run(self) -> None:
        """Return when told to stop.

        Raises:
            NodeError: when the endpoint does not become ready or stops to generate.
        """
        flag = self.context.path(READY_FILE)
        remove(flag)
        try:
            if not self._become_ready():
                return
            write_atomic(flag, "")
            self._watch()
        finally:
            remove(flag)

    def _become_ready(self) -> bool:
        start = self.clock.now()
        wrong = 0
        last = ""
        while True:
            found = self.probe.live()
            if found.kind is Kind.GOOD:
                found = self.probe.generate()
            if found.kind is Kind.GOOD:
                text = f"ready after {self.clock.now() - start:.0f} s: {found.text}"
                self.notifier.ready(text)
                self.journal.notice(text)
                return True
            if found.kind is Kind.REFUSED:
                raise NodeError(found.text)
            wrong = wrong + 1 if found.kind is Kind.WRONG else 0
            if wrong >= WRONG_ANSWERS:
                raise NodeError(f"{wrong} wrong answers in a row; {found.text}")
            if self.clock.now() - start >= self.ready_timeout:
                raise NodeError(f"not ready after {self.ready_timeout:g} s; {found.text}")
            if found.text != last:
                self.journal.info(f"waiting: {found.text}")
                self.notifier.status(f"waiting: {found.text}")
                last = found.text
            if self.wait(self.interval):
                return False

    def _watch(self) -> None:
        stalled = unknown = wrong = 0
        before = self.probe.tokens()
        while not self.wait(self.steady_interval):
            found = self.probe.generate()
            after = self.probe.tokens()
            if found.kind is Kind.GOOD:
                stalled = unknown = wrong = 0
            elif found.kind in (Kind.WRONG, Kind.REFUSED):
                wrong += 1
            elif before is not None and after is not None:
                # restarted counters are progress as well
                stalled = stalled + 1 if after == before else 0
            elif self.probe.live().kind is Kind.GOOD:
                unknown += 1
            else:
                stalled += 1
            before = after if after is not None else before
            if found.kind is not Kind.GOOD:
                self.journal.warning(f"probe failed: {found.text}")
            self.notifier.status(f"serving; last probe: {found.text}")
            if stalled >= STALLED_PROBES or unknown >= UNKNOWN_PROBES:
                raise NodeError(f"the engine is wedged: it generates nothing; {found.text}")
            if wrong >= WRONG_ANSWERS:
                raise NodeError(f"{wrong} wrong answers in a row; {found.text}")


def probe_of(context: NodeContext, key: str | None) -> Probe:
    """Return the probe that the plan describes.

    Raises:
        PlanError: when the plan lacks a field.
    """
    health = context.plan.view("health")
    return Probe(
        live_url=health.text("live_url"),
        generate_url=health.text("generate_url"),
        body=health.mapping("generate_body"),
        expect=health.text("expect"),
        timeout=health.integer("probe_timeout"),
        key=key,
    )


def _answer(raw: bytes) -> str | None:
    """Return the text of a chat completion; the thoughts count where the answer is cut off."""
    try:
        message = json.loads(raw)["choices"][0]["message"]
        parts = [message.get("content"), message.get("reasoning_content")]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return "\n".join(part for part in parts if isinstance(part, str))


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception):
        error = error.reason
    if isinstance(error, TimeoutError):
        return "timed out"
    return str(error) or type(error).__name__
