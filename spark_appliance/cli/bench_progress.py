"""Live progress on stderr: one moving line on a terminal, one line a round elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from spark_appliance.bench.jobs import Job
from spark_appliance.bench.result import Round
from spark_appliance.bench.wire import Recording

_REFRESH_PER_SECOND = 2  # the drawing thread must not disturb the clock of the streams


class ConsoleProgress:
    """Implements ``spark_appliance.bench.runner.Progress``; a context around the run."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        console = Console(stderr=True)
        self._live = console.is_terminal and not quiet
        self._streams = _Streams()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            _StreamsColumn(self._streams),
            console=console,
            refresh_per_second=_REFRESH_PER_SECOND,
            transient=True,
            disable=not self._live,
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> ConsoleProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def job(self, job: Job, number: int, total: int) -> None:
        """Announce a job."""
        self._bar.update(
            self._task,
            description=f"[{number}/{total}] {job.title}".replace("[", "\\["),
            total=job.warmup + job.rounds,
            completed=0,
        )

    def round(self, job: Job, number: int) -> None:
        """Announce a round."""
        self._streams.begin("warm-up" if number < 0 else f"round {number + 1}/{job.rounds}")

    def reading(self, stream: int, recording: Recording) -> None:
        """Note how far a stream is; the drawing thread shows it."""
        self._streams.events[stream] = recording.events

    def finished(self, job: Job, number: int, done: Round) -> None:
        """Print a line about a finished round."""
        self._bar.advance(self._task)
        if number < 0:
            self.note(f"{job.title}: warm-up done in {done.ended_s - done.started_s:.1f} s")
            return
        good = [s for s in done.samples if s.status == "ok"]
        if len(good) < len(done.samples):
            kinds = sorted({s.failure.kind for s in done.samples if s.failure})
            self.note(
                f"{job.title} {number + 1}/{job.rounds}: {len(done.samples) - len(good)} of "
                f"{len(done.samples)} requests failed: {', '.join(kinds)}"
            )
            return
        rates = [s.decode_tok_s for s in good if s.decode_tok_s is not None]
        ttfts = [s.ttft_s for s in good if s.ttft_s is not None]
        tokens = sum(s.completion_tokens or 0 for s in good)
        text = f"{job.title} {number + 1}/{job.rounds}: {tokens} tokens"
        if done.aggregate_wall_tok_s is not None and job.concurrency > 1:
            text += f", {done.aggregate_wall_tok_s:.1f} tok/s together"
        if rates and ttfts:
            text += f", {sum(rates) / len(rates):.1f} tok/s a stream, TTFT {max(ttfts):.2f} s"
        self.note(text)

    def note(self, text: str) -> None:
        """Print a line."""
        if self._quiet:
            return
        if self._live:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            click.echo(text, err=True)


class _Streams:
    """What the streams of the present round have received."""

    def __init__(self) -> None:
        self.events: dict[int, int] = {}
        self.name = ""
        self.since = time.monotonic()

    def begin(self, name: str) -> None:
        self.events = {}
        self.name = name
        self.since = time.monotonic()


class _StreamsColumn(ProgressColumn):
    def __init__(self, streams: _Streams) -> None:
        self._streams = streams
        super().__init__()

    def render(self, task: Task) -> Text:  # noqa: ARG002 - rich's signature
        streams = self._streams
        if not streams.name:
            return Text("")
        # Events, not tokens: one event can carry several.
        events = sum(dict(streams.events).values())
        seconds = time.monotonic() - streams.since
        return Text(f"{streams.name}: {events} events, {seconds:.0f} s")
