"""Learn how many characters a token has, from the endpoint's own count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spark_appliance.bench.client import Client, EndpointError
from spark_appliance.bench.corpus import Corpus, Ruler
from spark_appliance.bench.prompts import new_nonce, with_nonce
from spark_appliance.bench.result import Failure
from spark_appliance.bench.sse import parse
from spark_appliance.bench.wire import ChatRequest

# About 15k tokens: a few seconds of prefill, and close enough to begin with.
_PROBE_CHARACTERS = 48_000
_PIECES = 16


async def calibrate(
    client: Client,
    model: str,
    corpus: Corpus,
    ruler: Ruler,
    *,
    region: int,
    shortest: int,
    extra: Mapping[str, Any],
) -> None:
    """Send one untimed prompt made of pieces from all over ``region`` (characters) of the text.

    ``shortest`` (tokens) is the shortest prompt that will follow: the probe is not longer, since
    the context length may be just above it. Raises EndpointError.
    """
    size = min(_PROBE_CHARACTERS, shortest * 2)
    step = max(1, min(region, len(corpus.text)) // _PIECES)
    text = "".join(corpus.cut(i * step, max(1, size // _PIECES)) for i in range(_PIECES))
    request = ChatRequest(model, with_nonce(new_nonce(), text), max_tokens=1, extra=extra)
    recording = await client.stream(request)
    tokens = (parse(recording.reads).usage or {}).get("prompt_tokens")
    if not isinstance(tokens, int) or tokens <= 0:
        raise EndpointError(
            recording.failure
            or Failure(
                kind="no-usage",
                message="the endpoint sends no usage in its stream, so the length of a prompt "
                "is unknown",
                remedy="use an endpoint that obeys stream_options.include_usage",
            )
        )
    ruler.learn(len(text), tokens)
