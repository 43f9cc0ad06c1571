"""Single-stream speed and the concurrency sweep: the same requests, one or many at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spark_appliance.bench.jobs import Job
from spark_appliance.bench.metrics import Prompt
from spark_appliance.bench.result import PromptKind

# The published protocol of the four-Spark run: one untimed warm-up and three timed requests of
# at most 1024 tokens; and the stream counts of the published tables (field notes 7.1, 7.3).
ROUNDS = 3
WARMUP = 1
MAX_TOKENS = 1024
SWEEP = (1, 2, 3, 4, 8, 16)


def jobs(
    prompts: Mapping[PromptKind, Prompt],
    concurrency: Sequence[int],
    *,
    rounds: int,
    warmup: int,
    max_tokens: int,
) -> list[Job]:
    """Return one job for each prompt kind and stream count.

    All streams get the same prompt, each with its own nonce in front.
    """

    def job(kind: PromptKind, streams: int) -> Job:
        return Job(
            prompt_kind=kind,
            concurrency=streams,
            rounds=rounds,
            warmup=warmup,
            max_tokens=max_tokens,
            prompts=lambda _round: [prompts[kind]] * streams,
        )

    return [job(kind, streams) for kind in prompts for streams in concurrency]
