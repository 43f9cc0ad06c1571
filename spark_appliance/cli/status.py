"""``status``: the whole cluster at a glance."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from spark_appliance.cli.fleet_options import cluster_argument, fleet_run, open_plan

if TYPE_CHECKING:
    from rich.console import RenderableType

    from spark_appliance.fleet.crew import Crew
    from spark_appliance.fleet.status import NodeStatus, Overview

_STYLES = {
    "serving": "green",
    "starting": "cyan",
    "stopped": "yellow",
    "failed": "bold red",
    "gone": "bold red",
}


@click.command()
@cluster_argument
@click.option("--watch", is_flag=True, help="Refresh until interrupted, every --interval seconds.")
@click.option(
    "--interval",
    type=click.IntRange(10, 3600),
    default=10,
    show_default=True,
    help="Not less than 10: asking the GPU slows generation.",
)
@click.option("--no-gpu", is_flag=True, help="Do not ask nvidia-smi.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document a look.")
def status(cluster: Path, watch: bool, interval: int, no_gpu: bool, as_json: bool) -> None:
    """Show ranks, speed, requests, memory, clocks and drift; exit 1 unless all is well."""
    from spark_appliance.fleet.status import look

    plan = open_plan(cluster)
    with fleet_run("status", plan, None, live=False) as (crew, _):
        if watch:
            _watch(crew, interval, gpu=not no_gpu, as_json=as_json)
            return
        overview = look(crew, gpu=not no_gpu)
    _print(overview, as_json=as_json)
    if not overview.good:
        raise click.exceptions.Exit(1)


def _watch(crew: Crew, interval: int, *, gpu: bool, as_json: bool) -> None:
    from rich.live import Live

    from spark_appliance.cli.output import console
    from spark_appliance.fleet.status import look

    pause = threading.Event()
    out = console()
    if as_json or not out.is_terminal:
        while True:
            _print(look(crew, gpu=gpu), as_json=as_json)
            pause.wait(interval)
    with Live(console=out, auto_refresh=False, screen=True) as live:
        while True:
            live.update(render(look(crew, gpu=gpu)), refresh=True)
            pause.wait(interval)


def _print(overview: Overview, *, as_json: bool) -> None:
    from spark_appliance.cli.output import console

    if as_json:
        click.echo(json.dumps(overview.as_json(), sort_keys=True))
    else:
        console().print(render(overview))


def render(overview: Overview) -> RenderableType:
    """Return the table of a look at the cluster."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = Table(box=None, title=_title(overview), title_justify="left")
    for column in ("rank", "node", "state", "supervisor", "memory free", "GPU", "rails", "version"):
        rows.add_column(column)
    notes: list[Text] = []
    for item in overview.nodes:
        report = item.report
        style = _STYLES[item.state]
        if report is None:
            rows.add_row(str(item.node.rank), item.node.name, Text(item.state, style=style))
            notes.append(Text(f"{item.node.name}: {item.error}", style="red"))
            continue
        memory = report.part("status", "memory", "MemAvailable")
        rows.add_row(
            str(item.node.rank),
            item.node.name,
            Text(item.state, style=style),
            report.phase,
            f"{memory / 2**30:.1f} GiB" if isinstance(memory, int) else "",
            _gpu(item),
            _rails(item),
            _version(item),
        )
        notes += [Text(f"{item.node.name}: drift: {text}", style="yellow") for text in item.drift]
        notes += [Text(f"{item.node.name}: {text}", style="red") for text in item.troubles]
    return Group(rows, *notes)


def _title(overview: Overview) -> str:
    head = overview.nodes[0].report if overview.nodes else None
    text = f"{overview.name}: {'ready' if overview.ready else 'not ready'}, {overview.url}"
    if head is None:
        return text
    shown = (
        ("tokens_per_second", "{:.1f} tokens/s"),
        ("running", "{:.0f} running"),
        ("waiting", "{:.0f} waiting"),
        ("kv_use", "KV {:.0%}"),
        ("accept_length", "{:.2f} accepted a step"),
    )
    parts = [form.format(value) for name, form in shown if (value := head.metric(name)) is not None]
    reads = head.part("engram_metrics") or {}
    rows = [value for name, value in reads.items() if "rows_total" in name]
    parts += [f"{sum(rows):,.0f} Engram rows read"] if rows else []
    router = head.part("router")
    if isinstance(router, dict):
        parts.append(f"router: {router.get('healthy')} of {router.get('of')} replicas")
    return ", ".join([text, *parts])


def _gpu(item: NodeStatus) -> str:
    gpu = item.report.part("gpu") if item.report else None
    if not isinstance(gpu, dict):
        return ""
    return f"{gpu.get('temperature.gpu')} °C, {gpu.get('clocks.sm')} MHz, {gpu.get('power.draw')} W"


def _rails(item: NodeStatus) -> str:
    rails = (item.report.part("status", "rails") if item.report else None) or []
    up = sum(1 for rail in rails if not rail.get("missing"))
    counters = (item.report.part("counters") if item.report else None) or {}
    bad = sum(
        value
        for values in counters.values()
        for name, value in values.items()
        if name not in ("port_xmit_data", "port_rcv_data")
    )
    text = f"{up} of {len(item.node.rails)} up" if item.node.rails else "none"
    return text + (f", {bad} errors" if bad else "")


def _version(item: NodeStatus) -> str:
    if item.report is None:
        return ""
    generation = item.report.part("versions", "generation")
    system = item.report.part("versions", "system")
    if generation is not None:
        return f"generation {generation}"
    return str(system).rsplit("-", 1)[-1] if system else ""
