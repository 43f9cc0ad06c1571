"""Everything a bad endpoint does, with a stable name, a message and a remedy.

``FATAL`` kinds end the run at once: another request would fail in the same way.
"""

from __future__ import annotations

import json
from typing import Any

from spark_appliance.bench.result import Failure

FATAL = frozenset(
    {
        "refused", "unresolved", "unreachable", "tls", "auth", "not-found", "rejected", "loading",
        "not-sse", "no-usage", "cached", "endless",
    }
)  # fmt: skip

_BODY_CHARS = 300


def from_status(status: int, body: bytes, url: str) -> Failure:
    """Describe an HTTP error answer; ``body`` is its beginning."""
    said = _said(body)
    if status in (401, 403):
        return Failure(
            kind="auth",
            message=f"{url} answered {status}: the API key is missing or wrong{said}",
            remedy="give the key with --api-key-file FILE or in the variable SPARK_API_KEY",
        )
    if status == 404:
        return Failure(
            kind="not-found",
            message=f"{url} answered 404{said}",
            remedy="check the URL, and the model's name with --model (see /v1/models)",
        )
    if status == 503:
        return Failure(
            kind="loading",
            message=f"{url} answered 503: the server is not ready, it may still load the "
            f"model{said}",
            remedy="wait until its /health answers 200, or use --wait SECONDS",
        )
    if status == 429:
        return Failure(
            kind="overloaded",
            message=f"{url} answered 429: too many requests{said}",
            remedy="run fewer streams, or raise the server's queue limit",
        )
    if 400 <= status < 500:
        return Failure(
            kind="rejected",
            message=f"{url} answered {status}: it does not accept this request{said}",
            remedy="a prompt longer than the context length is the usual cause; an unknown "
            "field in --extra-body is another",
        )
    return Failure(
        kind="server-error",
        message=f"{url} answered {status}{said}",
        remedy="read the engine's log (journalctl -u spark-engine)",
    )


def not_sse(content_type: str, body: bytes, url: str) -> Failure:
    """Describe a 200 answer whose body is not a stream of events."""
    try:
        plain = json.loads(body)
    except ValueError:
        plain = None
    if isinstance(plain, dict) and "choices" in plain:
        what = 'a whole answer instead of a stream: it ignores "stream": true'
        remedy = "use an endpoint (or proxy setting) that streams"
    else:
        what = f"{content_type or 'no content type'} that is not server-sent events" + _said(body)
        remedy = "check that the URL is the one of an OpenAI-compatible API (…/v1)"
    return Failure(kind="not-sse", message=f"{url} sent {what}", remedy=remedy)


def _said(body: bytes) -> str:
    """Return ``: text`` from an error body, or nothing."""
    text = body.decode(errors="replace").strip()
    try:
        value: Any = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, dict):
        error = value.get("error", value)
        if isinstance(error, dict):
            error = error.get("message") or error.get("detail") or error
        text = str(error)
    text = " ".join(text.split())[:_BODY_CHARS]
    return f": {text}" if text else ""
