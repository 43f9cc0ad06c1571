"""Read a recorded chat-completion stream: bytes with arrival times in, facts out.

The client only records; this runs after the round, so that decoding JSON never delays the
arrival time of another stream's bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

# Fields of a streamed delta that carry generated text. OpenAI: content, refusal, tool_calls;
# SGLang and vLLM: reasoning_content; newer vLLM: reasoning.
_REASONING = ("reasoning_content", "reasoning")


@dataclass(slots=True)
class Transcript:
    """What one stream said. Times are those of the reads, in the reads' own clock."""

    events: int = 0
    text_times: list[float] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    finish_time: float | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    extension: dict[str, Any] | None = None
    error: str | None = None
    malformed: str | None = None
    done: bool = False


def data_lines(reads: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yield the payload of every ``data:`` line with the time at which the line was complete."""
    rest = b""
    time = 0.0
    for time, block in reads:
        lines = (rest + block).split(b"\n")
        rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                yield time, line[5:].strip()
    if rest.startswith(b"data:"):
        yield time, rest[5:].strip()


def parse(reads: Sequence[tuple[float, bytes]]) -> Transcript:
    """Read the events of a stream up to ``[DONE]``, its end, or an event that is not JSON."""
    result = Transcript()
    for time, payload in data_lines(reads):
        if payload == b"[DONE]":
            result.done = True
            break
        if not payload:
            continue
        try:
            event = json.loads(payload)
        except ValueError:
            result.malformed = payload[:200].decode(errors="replace")
            break
        result.events += 1
        if isinstance(event, dict):
            _take(result, time, event)
    return result


def _take(result: Transcript, time: float, event: dict[str, Any]) -> None:
    error = event.get("error")
    if error:
        message = error.get("message") if isinstance(error, dict) else error
        result.error = str(message or error)
        return
    if isinstance(event.get("usage"), dict):
        result.usage = event["usage"]
    if isinstance(event.get("sglext"), dict):
        result.extension = event["sglext"]
    choices = event.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return
    delta = choice.get("delta")
    if isinstance(delta, dict) and _take_delta(result, delta):
        result.text_times.append(time)
    if choice.get("finish_reason"):
        result.finish_time = time
        result.finish_reason = str(choice["finish_reason"])


def _take_delta(result: Transcript, delta: dict[str, Any]) -> bool:
    """Collect a delta's text; return whether it had any (the role event has none)."""
    found = False
    for name in _REASONING:
        text = delta.get(name)
        if isinstance(text, str) and text:
            result.reasoning.append(text)
            found = True
            break
    for name in ("content", "refusal"):
        text = delta.get(name)
        if isinstance(text, str) and text:
            result.content.append(text)
            found = True
    calls = delta.get("tool_calls")
    if calls:
        result.content.append(json.dumps(calls, sort_keys=True))
        found = True
    return found
