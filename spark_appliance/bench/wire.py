"""What is sent and what is recorded, without the library that does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spark_appliance.bench.result import Failure


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines in seconds. A 1M-token prompt was seen to take 324 s to its first token."""

    connect: float = 10.0
    first_token: float = 900.0
    stall: float = 120.0
    total: float = 3600.0


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One streaming chat completion: greedy, with usage."""

    model: str
    prompt: str
    max_tokens: int
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Return the JSON body; ``extra`` adds to it and may override the sampling fields."""
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
            **self.extra,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(slots=True)
class Recording:
    """What arrived and when (``time.perf_counter`` seconds); nothing is interpreted yet."""

    started: float
    connected: float | None = None
    ended: float = 0.0
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    events: int = 0
    failure: Failure | None = None
