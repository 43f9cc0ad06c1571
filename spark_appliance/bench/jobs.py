"""What a measurement consists of: one job is one group of the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spark_appliance.bench.metrics import Prompt
from spark_appliance.bench.result import PromptKind, Round

# Makes the prompts of one round, one a stream; warm-up rounds have negative numbers.
PromptMaker = Callable[[int], Sequence[Prompt]]


@dataclass(frozen=True, slots=True)
class Job:
    """``warmup`` untimed and ``rounds`` timed rounds of ``concurrency`` requests at once."""

    prompt_kind: PromptKind
    concurrency: int
    rounds: int
    warmup: int
    max_tokens: int
    prompts: PromptMaker
    target_tokens: int | None = None
    after: Callable[[Round], None] | None = None

    @property
    def key(self) -> tuple[str, int, int | None]:
        """What tells two jobs of one run apart."""
        return (self.prompt_kind, self.concurrency, self.target_tokens)

    @property
    def title(self) -> str:
        """A short name for progress lines."""
        length = f" {self.target_tokens} tokens" if self.target_tokens else ""
        return f"{self.prompt_kind}{length} c{self.concurrency}"
