"""A whole measurement: look, ask, warm up, measure, and keep what was found."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

from pydantic import SecretStr

from spark_appliance import __version__
from spark_appliance.bench import (
    compare,
    context,
    corpus,
    engine,
    evidence,
    preflight,
    speed,
    store,
)
from spark_appliance.bench.calibrate import calibrate
from spark_appliance.bench.client import Client, EndpointError
from spark_appliance.bench.endpoint import Address
from spark_appliance.bench.findings import findings
from spark_appliance.bench.jobs import Job
from spark_appliance.bench.nodes import Sampler
from spark_appliance.bench.result import Endpoint, Failure, Group, Protocol, Result
from spark_appliance.bench.runner import Progress, Runner
from spark_appliance.bench.settings import Outcome, Settings
from spark_appliance.errors import InputError

_READY_POLL_S = 2.0
_NODES_POLL_S = 0.05


def run(settings: Settings, progress: Progress) -> Outcome:
    """Measure. The result file is written after every round and at the end.

    Raises InputError for settings that contradict each other or the endpoint, and EndpointError
    when nothing at all could be measured. After Ctrl-C it returns what was finished.
    """
    session = _Session(settings, progress)
    failure: Failure | None = None
    interrupted = False
    try:
        asyncio.run(session.measure())
    except KeyboardInterrupt:
        interrupted = True
    except EndpointError as error:
        if not session.groups():
            raise
        failure = error.failure
    finally:
        session.stop()
    result = session.result(failure, interrupted=interrupted, final=True)
    if result.groups:
        store.save(result, settings.out)
    return Outcome(result, failure, interrupted)


async def check(
    address: Address, key: SecretStr | None, *, strict: bool, model: str | None = None
) -> tuple[engine.Engine, list[str]]:
    """Look at an endpoint without measuring: returns its identity and warnings.

    Raises EndpointError when it cannot be used or is busy.
    """
    async with Client(address, key) as client:
        found = await engine.identify(client, model, _secrets(key))
        warnings = await preflight.require_idle(client, strict=strict)
        return found, warnings + preflight.place_warnings(address)


class _Session:
    def __init__(self, settings: Settings, progress: Progress) -> None:
        self._settings = settings
        self._progress = progress
        self._problems = list(settings.warnings)
        self._started = datetime.now(UTC)
        self._engine = engine.Engine(model=settings.model or "")
        self._protocol: Protocol | None = None
        self._corpus: corpus.Corpus | None = None
        self._jobs: list[Job] = []
        self._runner: Runner | None = None
        self._sampler = Sampler(settings.hosts, settings.interval_s)
        # A resumed run's clock goes on where the first one ended.
        earlier = settings.resume.groups if settings.resume else []
        last = max((r.ended_s for g in earlier for r in g.rounds), default=0.0)
        self._origin = time.perf_counter() - last

    async def measure(self) -> None:
        settings = self._settings
        async with Client(settings.address, settings.key, settings.limits) as client:
            if settings.wait_s > 0:
                await self._wait(client)
            self._engine = await engine.identify(client, settings.model, _secrets(settings.key))
            for warning in self._doubts():
                self._problem(warning)
            if settings.check is not False:
                strict = settings.check is True
                for warning in await preflight.require_idle(client, strict=strict):
                    self._problem(warning)
            if settings.mode in ("speed", "sweep"):
                self._prepare_speed()
            else:
                await self._prepare_context(client)
            done = self._earlier_groups()
            await self._watch_nodes()
            counters = None if self._engine.is_sglang else await engine.spec_counters(client)
            self._runner = Runner(
                client,
                self._engine.model,
                extra=self._extra(),
                allowed_cached=settings.allowed_cached,
                progress=self._progress,
                origin=self._origin,
                changed=self._save,
                count_drafts=counters is not None,
                need_decode=settings.mode in ("speed", "sweep"),
            )
            await self._runner.run(self._jobs, done)

    def stop(self) -> None:
        self._sampler.stop()

    def groups(self) -> list[Group]:
        """Return every group that has at least one round, from this run or the resumed one."""
        earlier = self._settings.resume.groups if self._settings.resume else []
        groups = [record.group() for record in self._runner.records] if self._runner else []
        begun = {_key(g) for g in groups}
        groups += [g for g in earlier if _key(g) not in begun]
        return [g for g in groups if g.rounds]

    def result(self, failure: Failure | None, *, interrupted: bool, final: bool) -> Result:
        settings = self._settings
        groups = self.groups()
        loads = self._runner.loads if self._runner else []
        whole = [g for g in groups if _good(g) >= settings.rounds]
        complete = final and not interrupted and failure is None
        complete = complete and bool(whole) and len(whole) == len(self._jobs)
        problems = self._problems + findings(
            groups, loads, mode=settings.mode, max_tokens=settings.max_tokens
        )
        if failure is not None:
            problems.append(f"stopped: {failure.message} [{failure.kind}]")
        if interrupted:
            problems.append("stopped: interrupted by the user")
        earlier = settings.resume
        return Result(
            tool_version=__version__,
            status="complete" if complete else "partial",
            problems=list(dict.fromkeys(problems)),
            started=earlier.started if earlier else _iso(self._started),
            finished=_iso(datetime.now(UTC)),
            resumed=[*earlier.resumed, _iso(self._started)] if earlier else [],
            endpoint=Endpoint(url=settings.address.api, model=self._engine.model),
            protocol=self._protocol or self._make_protocol({}),
            groups=groups,
            evidence=evidence.collect(
                settings,
                self._engine,
                groups,
                nodes=self._sampler.nodes(evidence.windows(groups)),
                loads=loads,
                corpus=self._corpus,
                on_serving_machine=bool(preflight.place_warnings(settings.address)),
            ),
        )

    async def _wait(self, client: Client) -> None:
        end = time.monotonic() + self._settings.wait_s
        while True:
            state = await preflight.readiness(client)
            if state is None:
                return
            if time.monotonic() >= end:
                self._problem(f"not ready after {self._settings.wait_s:g} s: {state}")
                return
            self._progress.note(f"waiting for the endpoint: {state}")
            await asyncio.sleep(_READY_POLL_S)

    def _doubts(self) -> list[str]:
        found = preflight.place_warnings(self._settings.address)
        known = self._engine
        if known.models and known.model not in known.models:
            found.append(f"{known.model} is not in /v1/models ({', '.join(known.models)})")
        if self._settings.check is False:
            found.append("it was not checked whether other requests ran (--no-check)")
        return found

    def _prepare_speed(self) -> None:
        settings = self._settings
        self._protocol = self._make_protocol({k: p.sha256 for k, p in settings.prompts.items()})
        self._jobs = speed.jobs(
            settings.prompts,
            settings.concurrency,
            rounds=settings.rounds,
            warmup=settings.warmup,
            max_tokens=settings.max_tokens,
        )

    async def _prepare_context(self, client: Client) -> None:
        settings = self._settings
        limit = self._engine.context_length
        targets = [tokens for _, tokens in settings.lengths]
        fitting, notes = context.fit(targets, settings.max_tokens, limit)
        for note in notes:
            self._problem(note)
        if not fitting:
            raise InputError.one(
                "bench.context-length",
                f"no prompt length fits into the endpoint's context length of {limit}",
                "give shorter ones with --tokens",
            )
        by_target = {length.target: length for length in fitting}
        needed = context.text_room(settings.lengths, settings.rounds + settings.warmup)
        folders = settings.text_folders or corpus.default_folders(settings.text_kind)
        self._progress.note(f"reading {settings.text_kind} text")
        text = await asyncio.to_thread(corpus.load, settings.text_kind, folders, needed)
        self._corpus = text
        if len(text.text) < needed:
            self._problem(
                f"the text has {len(text.text)} characters, {needed} would never repeat: prompts "
                "may share text (a larger --text-dir avoids it)"
            )
        self._protocol = self._make_protocol({settings.text_kind: text.sha256})
        ruler = corpus.Ruler()
        self._progress.note("asking the endpoint how long its tokens are")
        await calibrate(
            client,
            self._engine.model,
            text,
            ruler,
            region=needed,
            shortest=min(length.tokens for length in fitting),
            extra=self._extra(),
        )
        shape = context.Shape(
            entries=tuple((c, by_target[t]) for c, t in settings.lengths if t in by_target),
            rounds=settings.rounds,
            warmup=settings.warmup,
            max_tokens=settings.max_tokens,
            hide_needle=settings.mode == "longcheck",
        )
        self._jobs = context.jobs(shape, text, ruler)

    def _make_protocol(self, digests: dict[Any, str]) -> Protocol:
        settings = self._settings
        streams = [c for c, _ in settings.lengths] or list(settings.concurrency)
        return Protocol(
            mode=settings.mode,
            prompts={str(kind): digest for kind, digest in digests.items()},
            concurrency=streams,
            target_tokens=[t for _, t in settings.lengths],
            max_tokens=settings.max_tokens,
            warmup=settings.warmup,
            rounds=settings.rounds,
            allowed_cached_tokens=settings.allowed_cached,
            extra_body=dict(settings.extra_body),
        )

    def _extra(self) -> dict[str, Any]:
        # SGLang 0.5.23 then adds sglext.spec_tokens_details to the stream, and nothing else.
        ask = {"return_spec_tokens_details": True} if self._engine.is_sglang else {}
        return {**ask, **self._settings.extra_body}

    def _earlier_groups(self) -> dict[tuple[Any, ...], Group]:
        earlier = self._settings.resume
        if earlier is None or self._protocol is None:
            return {}
        different = compare.protocol_differences(earlier.protocol, self._protocol)
        if earlier.endpoint.model != self._engine.model:
            different.append(f"model: {earlier.endpoint.model} / {self._engine.model}")
        if different:
            raise InputError.one(
                "bench.resume",
                "the result to resume was measured differently: " + "; ".join(different),
                "give the same options as then, or start a new result",
            )
        return {_key(g): g for g in earlier.groups}

    async def _watch_nodes(self) -> None:
        if not self._settings.hosts:
            return
        self._progress.note("reading the nodes")
        self._sampler.start(self._origin)
        while not self._sampler.ready:
            await asyncio.sleep(_NODES_POLL_S)
        for node in self._sampler.nodes([]):
            if node.error:
                self._problem(f"node {node.name}: {node.error}")

    def _save(self) -> None:
        store.save(self.result(None, interrupted=False, final=False), self._settings.out)

    def _problem(self, text: str) -> None:
        if text not in self._problems:
            self._problems.append(text)
            self._progress.note(f"warning: {text}")


def _key(group: Group) -> tuple[Any, ...]:
    return (group.prompt_kind, group.concurrency, group.target_tokens)


def _good(group: Group) -> int:
    return sum(r.status == "ok" for r in group.rounds)


def _secrets(key: SecretStr | None) -> tuple[str, ...]:
    return (key.get_secret_value(),) if key is not None else ()


def _iso(time_: datetime) -> str:
    return time_.isoformat(timespec="seconds").replace("+00:00", "Z")
