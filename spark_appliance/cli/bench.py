"""``spark-appliance bench``: measure an endpoint, compare, check and export results."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from spark_appliance.bench import (
    compare,
    context,
    endpoint,
    planfile,
    plot,
    prompts,
    speed,
    store,
    table,
    verify,
)
from spark_appliance.bench.result import PromptKind, Result
from spark_appliance.cli import bench_run
from spark_appliance.cli.bench_options import (
    EXPORT,
    FILE,
    KIND,
    RUN,
    TARGET,
    TEXT,
    DefaultGroup,
    parse_integers,
    parse_shapes,
)
from spark_appliance.errors import OperationError


@click.group("bench", cls=DefaultGroup, context_settings={"max_content_width": 100})
def bench() -> None:
    """Measure an OpenAI-compatible endpoint so that others can check the numbers.

    `bench URL` is `bench speed URL`, the single-stream test. Every run writes a result file
    (JSON) with raw timings and evidence and prints a table.
    """


@bench.command("speed", short_help="Single-stream speed (the default).")
@TARGET
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=speed.ROUNDS,
    show_default=True,
    help="Timed requests.",
)
@click.option("--max-tokens", type=click.IntRange(2), default=speed.MAX_TOKENS, show_default=True)
@click.option(
    "--kind",
    "kinds",
    type=KIND,
    multiple=True,
    default=("prose",),
    show_default=True,
    help="Canonical prompt; may be repeated.",
)
@click.option("--prompt-file", type=FILE, help="Your prompt instead of a canonical one.")
@RUN
@click.option("--export", "export", type=click.Choice(["lmx"]), help="Also write lmx records.")
@EXPORT
def speed_command(
    *,
    samples: int,
    max_tokens: int,
    kinds: Sequence[PromptKind],
    prompt_file: Path | None,
    **options: Any,
) -> None:
    """Measure one stream: 1 untimed warm-up and 3 timed requests, greedy, max_tokens 1024."""
    bench_run.measure(
        "speed",
        options,
        prompts=bench_run.chosen_prompts(kinds, prompt_file),
        rounds=samples,
        max_tokens=max_tokens,
    )


@bench.command("sweep", short_help="1, 2, 3, 4, 8 and 16 streams.")
@TARGET
@click.option(
    "--streams",
    default=",".join(map(str, speed.SWEEP)),
    show_default=True,
    callback=parse_integers,
    metavar="N,N,...",
    help="Streams at once.",
)
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=speed.ROUNDS,
    show_default=True,
    help="Timed rounds for each number of streams.",
)
@click.option("--max-tokens", type=click.IntRange(2), default=speed.MAX_TOKENS, show_default=True)
@click.option(
    "--kind",
    "kinds",
    type=KIND,
    multiple=True,
    default=prompts.CANONICAL,
    help="Canonical prompt; may be repeated. [all]",
)
@click.option("--prompt-file", type=FILE, help="Your prompt instead of the canonical ones.")
@RUN
@click.option("--export", "export", type=click.Choice(["lmx"]), help="Also write lmx records.")
@EXPORT
def sweep_command(
    *,
    streams: tuple[int, ...],
    samples: int,
    max_tokens: int,
    kinds: Sequence[PromptKind],
    prompt_file: Path | None,
    **options: Any,
) -> None:
    """Measure aggregate and per-stream decode and TTFT for several numbers of streams."""
    bench_run.measure(
        "sweep",
        options,
        prompts=bench_run.chosen_prompts(kinds, prompt_file),
        concurrency=streams,
        rounds=samples,
        max_tokens=max_tokens,
    )


@bench.command("context", short_help="Prompts of 4k to 262k tokens.")
@TARGET
@click.option(
    "--tokens",
    default=",".join(map(str, context.SWEEP)),
    show_default=True,
    callback=parse_integers,
    metavar="N,N,...",
    help="Prompt lengths.",
)
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=context.SWEEP_ROUNDS,
    show_default=True,
    help="Timed requests for each length.",
)
@click.option(
    "--max-tokens", type=click.IntRange(2), default=context.SWEEP_MAX_TOKENS, show_default=True
)
@TEXT
@RUN
def context_command(
    *,
    tokens: tuple[int, ...],
    samples: int,
    max_tokens: int,
    kind: PromptKind,
    text_dirs: tuple[Path, ...],
    **options: Any,
) -> None:
    """Measure prefill rate and TTFT over the prompt's length, with real text of this machine."""
    bench_run.measure(
        "context",
        options,
        lengths=tuple((1, t) for t in tokens),
        text_kind=kind,
        text_folders=text_dirs,
        rounds=samples,
        max_tokens=max_tokens,
    )


@bench.command("longcheck", short_help="Long prompts with a needle to find.")
@TARGET
@click.option(
    "--prompts",
    "shapes",
    default=",".join(f"{c}x{t}" for c, t in context.CHECKS),
    show_default=True,
    callback=parse_shapes,
    metavar="CxT,CxT,...",
    help="Streams x tokens of each prompt.",
)
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=context.CHECK_ROUNDS,
    show_default=True,
    help="Times that each is sent.",
)
@click.option(
    "--max-tokens", type=click.IntRange(2), default=context.CHECK_MAX_TOKENS, show_default=True
)
@TEXT
@RUN
def longcheck_command(
    *,
    shapes: tuple[tuple[int, int], ...],
    samples: int,
    max_tokens: int,
    kind: PromptKind,
    text_dirs: tuple[Path, ...],
    **options: Any,
) -> None:
    """Send one prompt of 208k tokens and four of 46k at once; the answer must have the needle.

    Exit status 1 when a needle was not found.
    """
    source = click.get_current_context().get_parameter_source("warmup")
    if source is click.core.ParameterSource.DEFAULT:
        options["warmup"] = 0
    bench_run.measure(
        "longcheck",
        options,
        lengths=shapes,
        text_kind=kind,
        text_folders=text_dirs,
        rounds=samples,
        max_tokens=max_tokens,
    )


@bench.command("check")
@TARGET
def check_command(
    *,
    url: str | None,
    plan: Path | None,
    model: str | None,
    api_key_file: Path | None,
    check: bool | None,
) -> None:
    """Say whether the endpoint can be measured now; measure nothing.

    Exit status 1 when it cannot be reached or other requests run.
    """
    from spark_appliance.bench import session  # needs the extra, the other commands do not

    facts = planfile.read(plan) if plan else None
    address = endpoint.parse_url(bench_run.chosen_url(url, facts))
    key, warnings = endpoint.load_key(
        api_key_file, os.environ, facts.api_key_file if facts else None
    )
    found, more = asyncio.run(
        session.check(
            address,
            key,
            strict=check is True,
            model=model or (facts.served_model_name if facts else None),
        )
    )
    for warning in [*warnings, *more]:
        click.echo(f"warning: {warning}", err=True)
    length = f", context length {found.context_length}" if found.context_length else ""
    click.echo(f"{found.model}: {found.name or 'engine unknown'}{length}")


@bench.command("show")
@click.argument("result", type=FILE)
@click.option("--plot", "plot_file", type=FILE, help="Draw a .png or .svg (extra: plot).")
def show_command(result: Path, plot_file: Path | None) -> None:
    """Print the tables of a result file."""
    loaded = store.load(result)
    click.echo(table.render(loaded))
    if plot_file is not None:
        plot.draw(loaded, plot_file)


@bench.command("verify", short_help="Recompute every number of a result from its raw data.")
@click.argument("result", type=FILE)
def verify_command(result: Path) -> None:
    """Recompute every number of a result from its raw timings and token counts.

    Exit status 1 when a number does not follow from them.
    """
    loaded = store.load(result)
    problems = verify.verify(loaded)
    if problems:
        raise OperationError("\n".join(f"{result}: {problem}" for problem in problems))
    requests = sum(len(r.samples) for g in loaded.groups for r in g.rounds)
    click.echo(f"{result}: every number follows from the raw data of {requests} requests")


@bench.command("compare")
@click.argument("a", type=FILE)
@click.argument("b", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def compare_command(a: Path, b: Path, *, as_json: bool) -> None:
    """Compare two results of the same protocol.

    A verdict is given only when the 95 % confidence intervals separate. Results of different
    protocols are refused (exit status 2), with the name of every difference.
    """
    left, right = store.load(a), store.load(b)
    lines = compare.compare(left, right)
    for name, one in ((a, left), (b, right)):
        if one.status == "partial":
            click.echo(f"warning: {name} is partial", err=True)
        for problem in one.problems:
            click.echo(f"note: {name}: {problem}", err=True)
    if as_json:
        click.echo(json.dumps([compare.as_dict(line) for line in lines], indent=1))
    else:
        click.echo(table.render_comparison(lines, str(a), str(b)))


@bench.command("export")
@click.argument("result", type=FILE)
@click.option("--plan", type=FILE, help="cluster.lock.json: the model's hub id.")
@EXPORT
def export_command(result: Path, plan: Path | None, **options: Any) -> None:
    """Write the lmx run payloads and hardware.json of a result file."""
    facts = planfile.read(plan) if plan else None
    described = bench_run.lmx_facts(options, facts)
    bench_run.export(
        store.load(result), described, options["export_dir"] or result.parent, result.stem
    )


@bench.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of a result file."""
    click.echo(json.dumps(Result.model_json_schema(), indent=1))
