"""Run jobs against an endpoint, keeping every finished sample whatever happens next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from spark_appliance.bench import engine, failures, metrics, prompts
from spark_appliance.bench.client import Client, EndpointError
from spark_appliance.bench.jobs import Job
from spark_appliance.bench.metrics import Prompt
from spark_appliance.bench.result import Group, LoadReading, Round, Sample
from spark_appliance.bench.wire import ChatRequest, Recording

_PROMPT_SAMPLE = 2000  # characters; the limits of the lmx record (field notes 7.6)
_OUTPUT_SAMPLE = 4000
_LOAD_INTERVAL_S = 10.0
# Rounds in a row that may fail for a passing reason (a cut stream, a 500) before giving up.
_MAX_FAILED_IN_A_ROW = 2


class Progress(Protocol):
    """What a user interface is told; calls come from the event loop and must return at once."""

    def job(self, job: Job, number: int, total: int) -> None:
        """Announce a job."""

    def round(self, job: Job, number: int) -> None:
        """Announce a round; negative numbers are warm-ups."""

    def reading(self, stream: int, recording: Recording) -> None:
        """Report that a stream received something."""

    def finished(self, job: Job, number: int, done: Round) -> None:
        """Report a finished round."""

    def note(self, text: str) -> None:
        """Report anything else."""


@dataclass(slots=True)
class GroupRecord:
    """The growing record of one job."""

    job: Job
    rounds: list[Round] = field(default_factory=list)
    prompt_sample: str = ""
    output_sample: str = ""

    def group(self) -> Group:
        """Return what is known now."""
        return metrics.group_of(
            self.job.prompt_kind,
            self.job.concurrency,
            self.rounds,
            target_tokens=self.job.target_tokens,
            prompt_sample=self.prompt_sample,
            output_sample=self.output_sample,
        )


class Runner:
    """Runs jobs one after another.

    ``origin`` is the ``perf_counter`` time that a round's ``started_s`` counts from;
    ``changed`` is called after every round, outside any timed request.
    """

    def __init__(
        self,
        client: Client,
        model: str,
        *,
        extra: Mapping[str, Any],
        allowed_cached: int,
        progress: Progress,
        origin: float,
        changed: Callable[[], None],
        count_drafts: bool = False,
        need_decode: bool = True,
    ) -> None:
        self._client = client
        self._model = model
        self._extra = dict(extra)
        self._allowed_cached = allowed_cached
        self._progress = progress
        self._origin = origin
        self._changed = changed
        self._count_drafts = count_drafts
        self._need_decode = need_decode
        self._failed_in_a_row = 0
        self.records: list[GroupRecord] = []
        self.loads: list[LoadReading] = []

    async def run(self, jobs: Sequence[Job], done: Mapping[tuple[Any, ...], Group]) -> None:
        """Run every job; rounds that ``done`` (by job key) already has are not repeated.

        Raises EndpointError when going on is useless; ``records`` keeps what was finished.
        """
        watch = asyncio.create_task(self._watch_load())
        try:
            for number, job in enumerate(jobs):
                self._progress.job(job, number + 1, len(jobs))
                await self._run_job(job, done.get(job.key))
        finally:
            watch.cancel()

    async def _run_job(self, job: Job, earlier: Group | None) -> None:
        record = GroupRecord(job)
        self.records.append(record)
        if earlier is not None:
            record.rounds = [r for r in earlier.rounds if r.status == "ok"]
            record.prompt_sample = earlier.prompt_sample
            record.output_sample = earlier.output_sample
        missing = range(len(record.rounds), job.rounds)
        if not missing:
            return
        for number in range(-job.warmup, 0):
            await self._round(job, number, record)
        for number in missing:
            await self._round(job, number, record)

    async def _round(self, job: Job, number: int, record: GroupRecord) -> None:
        timed = number >= 0
        self._progress.round(job, number)
        made = job.prompts(number)
        before = await engine.spec_counters(self._client) if self._count_drafts and timed else None
        started = time.perf_counter()
        streams = [
            asyncio.create_task(self._stream(index, prompt, job.max_tokens))
            for index, prompt in enumerate(made)
        ]
        interrupted = False
        try:
            await asyncio.wait(streams)
        except asyncio.CancelledError:
            interrupted = True
            for stream in streams:
                stream.cancel()
            await asyncio.wait(streams)
        ended = time.perf_counter()
        whole = [s.result() for s in streams if not s.cancelled() and s.exception() is None]
        # JSON is decoded here, after the last byte, so that it delays no stream's clock.
        read = [
            metrics.sample(
                recording,
                prompt,
                stream=index,
                nonce=nonce,
                origin=started,
                allowed_cached=self._allowed_cached,
                need_decode=self._need_decode,
            )
            for index, prompt, nonce, recording in whole
        ]
        samples = [sample for sample, _ in read]
        after = await engine.spec_counters(self._client) if before and not interrupted else None
        made_round = metrics.round_of(
            samples,
            started_s=round(started - self._origin, 6),
            ended_s=round(ended - self._origin, 6),
            interrupted=interrupted,
            acceptance=engine.acceptance_between(before, after),
        )
        if timed and samples:
            record.rounds.append(made_round)
            if not record.prompt_sample:
                record.prompt_sample = made[0].text[:_PROMPT_SAMPLE]
                record.output_sample = read[0][1][:_OUTPUT_SAMPLE]
            self._changed()
        if interrupted:
            raise asyncio.CancelledError
        for stream in streams:
            stream.result()  # a fault of ours must not pass for one of the endpoint's
        self._progress.finished(job, number, made_round)
        if job.after is not None:
            job.after(made_round)
        self._give_up_if_useless(samples, timed=timed)

    def _give_up_if_useless(self, samples: Sequence[Sample], *, timed: bool) -> None:
        found = [s.failure for s in samples if s.failure is not None]
        if not found:
            self._failed_in_a_row = 0
            return
        self._failed_in_a_row += 1
        fatal = next((f for f in found if f.kind in failures.FATAL), None)
        if fatal is not None:
            raise EndpointError(fatal)
        if not timed or self._failed_in_a_row >= _MAX_FAILED_IN_A_ROW:
            raise EndpointError(found[0])

    async def _stream(
        self, index: int, prompt: Prompt, max_tokens: int
    ) -> tuple[int, Prompt, str, Recording]:
        nonce = prompts.new_nonce()
        request = ChatRequest(
            model=self._model,
            prompt=prompts.with_nonce(nonce, prompt.text),
            max_tokens=max_tokens,
            extra=self._extra,
        )
        recording = await self._client.stream(
            request, lambda current: self._progress.reading(index, current)
        )
        return index, prompt, nonce, recording

    async def _watch_load(self) -> None:
        """Note how many requests the engine sees: more than ours means that others use it."""
        while True:
            await asyncio.sleep(_LOAD_INTERVAL_S)
            try:
                found = await engine.load(self._client)
            except EndpointError:
                continue
            if found is None:
                return
            self.loads.append(
                LoadReading(
                    t=round(time.perf_counter() - self._origin, 3),
                    running=found.running,
                    waiting=found.waiting,
                )
            )
