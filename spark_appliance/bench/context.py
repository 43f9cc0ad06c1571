"""Long prompts: the context sweep, and the long-context checks with a needle to find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spark_appliance.bench import needle
from spark_appliance.bench.corpus import CHARS_PER_TOKEN_ROOM, Corpus, Ruler
from spark_appliance.bench.jobs import Job
from spark_appliance.bench.metrics import Prompt
from spark_appliance.bench.result import Round

# 4k .. 262k tokens, as the published prefill tables (field notes 7.3).
SWEEP = (4096, 8192, 16384, 32768, 65536, 131072, 262144)
SWEEP_MAX_TOKENS = 64
SWEEP_ROUNDS = 3
# One prompt of 208k tokens and four at once of 46k each.
CHECKS = ((1, 208_000), (4, 46_000))
CHECK_MAX_TOKENS = 1024
CHECK_ROUNDS = 1

# Room in the context length for the chat template, the nonce and the error of the estimate.
_MARGIN_TOKENS = 128
_MARGIN = 0.03
# A target that would have to shrink by more than this is left out instead.
_MAX_SHRINK = 0.10

_TASK = "\n\nSummarise the text above in one paragraph."


@dataclass(frozen=True, slots=True)
class Length:
    """A prompt length: what was asked for, and what fits into the context length."""

    target: int
    tokens: int


def fit(
    targets: Sequence[int], max_tokens: int, context_length: int | None
) -> tuple[list[Length], list[str]]:
    """Return the lengths that fit and a sentence for each one that is shortened or left out."""
    lengths: list[Length] = []
    notes: list[str] = []
    for target in targets:
        tokens = target
        if context_length is not None:
            most = int((context_length - max_tokens - _MARGIN_TOKENS) * (1 - _MARGIN))
            tokens = min(target, most)
        if tokens < target * (1 - _MAX_SHRINK):
            notes.append(
                f"{target} tokens left out: the context length is {context_length}, "
                f"the answer needs {max_tokens}"
            )
            continue
        if tokens < target:
            notes.append(f"{target} tokens shortened to {tokens} to fit {context_length}")
        lengths.append(Length(target, tokens))
    return lengths, notes


def text_room(shape: Sequence[tuple[int, int]], repeats: int) -> int:
    """Return the characters of text that (concurrency, tokens) pairs need without repetition."""
    return sum(streams * tokens for streams, tokens in shape) * repeats * CHARS_PER_TOKEN_ROOM


@dataclass(frozen=True, slots=True)
class Shape:
    """Which long prompts to send."""

    entries: tuple[tuple[int, Length], ...]  # (concurrency, length)
    rounds: int
    warmup: int  # untimed rounds, before the first job only
    max_tokens: int
    hide_needle: bool


def jobs(shape: Shape, corpus: Corpus, ruler: Ruler) -> list[Job]:
    """Return one job an entry. ``ruler`` must have learnt something before the first round runs.

    Every prompt is another part of the text: its place depends on the protocol alone, so the
    same folder gives the same text wherever the endpoint is.
    """
    made = []
    offset = 0
    for index, (streams, length) in enumerate(shape.entries):
        room = length.target * CHARS_PER_TOKEN_ROOM
        warmup = shape.warmup if index == 0 else 0
        made.append(_job(shape, corpus, ruler, streams, length, offset, room, warmup))
        offset += room * streams * (shape.rounds + warmup)
    return made


def _job(
    shape: Shape,
    corpus: Corpus,
    ruler: Ruler,
    streams: int,
    length: Length,
    offset: int,
    room: int,
    warmup: int,
) -> Job:
    characters: dict[str, int] = {}

    def prompts(number: int) -> list[Prompt]:
        size = ruler.characters(length.tokens)
        made = []
        for stream in range(streams):
            place = offset + room * ((number + warmup) * streams + stream)
            text = corpus.cut(place, size)
            if shape.hide_needle:
                made.append(needle.hide(text, (stream + 0.5) / streams))
            else:
                made.append(Prompt(text + _TASK))
            characters[made[-1].sha256] = len(made[-1].text)
        return made

    def learn(done: Round) -> None:
        for sample in done.samples:
            size = characters.get(sample.prompt_sha256)
            if sample.prompt_tokens and size:
                ruler.learn(size, sample.prompt_tokens)

    return Job(
        prompt_kind=corpus.kind,
        concurrency=streams,
        rounds=shape.rounds,
        warmup=warmup,
        max_tokens=shape.max_tokens,
        prompts=prompts,
        target_tokens=length.target,
        after=learn,
    )
