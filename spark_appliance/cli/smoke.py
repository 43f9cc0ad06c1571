"""``smoke``: a few questions with known answers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from spark_appliance.cli.fleet_options import cluster_argument, fleet_run, open_plan, runs_option

if TYPE_CHECKING:
    from spark_appliance.fleet.smoke import Result

_STYLES = {"ok": "green", "fail": "bold red", "skip": "dim"}


@click.command()
@cluster_argument
@click.option("--url", help="Endpoint instead of the plan's, for example through a tunnel.")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    help="File with the key; else the variable SPARK_API_KEY.",
)
@click.option("--only", multiple=True, metavar="TEST", help="Only this test; repeat.")
@click.option("--streams", type=click.IntRange(1, 64), default=8, show_default=True)
@click.option(
    "--words",
    type=click.IntRange(100, 1_000_000),
    default=8000,
    show_default=True,
    help="Length of the long prompt with the needle.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@runs_option
def smoke(
    cluster: Path,
    url: str | None,
    api_key_file: Path | None,
    only: tuple[str, ...],
    streams: int,
    words: int,
    as_json: bool,
    runs: Path,
) -> None:
    """Ask the endpoint: sums, JSON, a tool, streams, a long prompt, an image. Exit 1 on failure."""
    from dataclasses import asdict

    from spark_appliance.bench.endpoint import load_key
    from spark_appliance.errors import InputError
    from spark_appliance.fleet.smoke import Endpoint, cases
    from spark_appliance.fleet.smoke import smoke as run

    plan = open_plan(cluster)
    key, warnings = load_key(
        api_key_file, os.environ, Path(plan.api.key_file) if plan.api.key_file else None
    )
    for text in warnings:
        click.echo(f"warning: {text}", err=True)
    chosen = cases(streams=streams, words=words)
    unknown = set(only) - {case.name for case in chosen}
    if unknown:
        raise InputError.one(
            "smoke.unknown",
            f"there is no test {', '.join(sorted(unknown))}",
            f"use {', '.join(case.name for case in chosen)}",
        )
    chosen = [case for case in chosen if not only or case.name in only]
    endpoint = Endpoint(
        url or plan.api.url, plan.model.served_name, key.get_secret_value() if key else None
    )
    results: list[dict[str, object]] = []
    with fleet_run("smoke", plan, runs, live=False) as (_, folder):

        def tell(result: Result) -> None:
            results.append(asdict(result))
            if folder is not None:
                # after each: an interrupt leaves what was answered so far
                about = {"url": endpoint.url, "model": endpoint.model, "results": results}
                folder.keep("smoke.json", json.dumps(about, indent=1, sort_keys=True) + "\n")
            if not as_json:
                _show(result)

        run(endpoint, chosen, tell)
        if as_json:
            click.echo(json.dumps(results, indent=2))
        if any(result["outcome"] == "fail" for result in results):
            raise click.exceptions.Exit(1)


def _show(result: Result) -> None:
    from rich.text import Text

    from spark_appliance.cli.output import console

    line = Text(f"{result.outcome:<4} ", style=_STYLES[result.outcome])
    line.append(f"{result.name:<12}", style="bold")
    line.append(f" {result.seconds:6.1f} s  expected: {result.expected}; seen: {result.seen}")
    console().print(line)
