"""``doctor``: may this cluster boot? Asks every node once, judges, says what to do."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spark_appliance.doctor.registry import Facts
    from spark_appliance.doctor.result import Level, Result
    from spark_appliance.ssh import Host


@click.command()
@click.argument("cluster", type=click.Path(path_type=Path), default=Path("cluster.yaml"))
@click.option("--config", "config_only", is_flag=True, help="Judge the files only, ask no node.")
@click.option("--deep", is_flag=True, help="Also measure rails, GPU and memory: loads the nodes.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before loading the nodes.")
@click.option("--node", "nodes", multiple=True, metavar="NAME", help="Ask only this node; repeat.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of the report and end.")
@click.option("-v", "--verbose", is_flag=True, help="Print what is fine or was skipped, too.")
@click.option(
    "--runs",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Folder for the evidence; each run makes its own below it.",
)
@click.option("--no-evidence", is_flag=True, help="Keep no run folder.")
@click.option(
    "--replay",
    type=click.Path(path_type=Path),
    help="Judge the documents of an earlier run folder again; CLUSTER is not read.",
)
def doctor(
    cluster: Path,
    config_only: bool,
    deep: bool,
    yes: bool,
    nodes: tuple[str, ...],
    as_json: bool,
    schema: bool,
    verbose: bool,
    runs: Path,
    no_evidence: bool,
    replay: Path | None,
) -> None:
    """Check whether the cluster of CLUSTER (a cluster file or a plan) may boot.

    Exit status: 0 fine (warnings allowed), 1 a check failed, 2 a bad file or command line.
    """
    if schema:
        _print_schema()
        return
    if config_only and (deep or nodes):
        raise click.UsageError("--config asks no node; leave out --deep and --node")
    from spark_appliance.doctor import evidence, examine
    from spark_appliance.doctor.evaluate import evaluate
    from spark_appliance.doctor.report import make_report

    started = time.time()
    if replay is not None:
        facts = evidence.recall(replay)
        levels: list[Level] = ["probe"]
        if facts.deep:
            levels.append("deep")
        file, no_evidence = str(replay), True
    else:
        facts = _open(cluster)
        file = str(cluster)
        levels = ["config"]
        if not config_only:
            levels.append("probe")
            if deep:
                levels.append("deep")
            where = examine.hosts(facts.plan, nodes or None)
            if deep and not yes:
                _ask(len(where))
            facts = _look(facts, where, deep=deep)
    results = evaluate(facts, levels, nodes=nodes or None)
    report = make_report(facts, results, file=file, started=started, levels=levels)
    kept = None
    if not (no_evidence or config_only):
        kept = evidence.keep(runs, facts, report, started)
    if as_json:
        click.echo(json.dumps(report.model_dump(mode="json"), indent=2, sort_keys=True))
    else:
        _print_results(facts, results, verbose=verbose)
    counts = report.counts
    click.echo(
        f"{facts.plan.name}: {counts['fail']} failed, {counts['warn']} warnings, "
        f"{counts['ok']} ok, {counts['skip']} not judged"
        + (f"; evidence in {kept}" if kept is not None else ""),
        err=True,
    )
    if report.verdict == "fail":
        raise click.exceptions.Exit(1)


def _print_schema() -> None:
    from spark_appliance.doctor.report import report_schema

    click.echo(report_schema(), nl=False)


def _open(cluster: Path) -> Facts:
    from spark_appliance import lockfile
    from spark_appliance.cli.output import print_problems
    from spark_appliance.doctor.examine import base
    from spark_appliance.workspace import open_cluster

    if cluster.suffix == ".json":
        return base(lockfile.load(cluster))
    opened = open_cluster(cluster)
    if opened.plan is None:
        print_problems(opened.problems)
        raise click.exceptions.Exit(2)
    return base(opened.plan, opened.problems, cluster.parent / lockfile.LOCK_NAME)


def _ask(count: int) -> None:
    click.echo(
        f"--deep loads {count} nodes for some minutes: the GPU for 2 s with 2 GiB, each rail with "
        "full traffic for 3 s in both directions. Nothing else should run there.",
        err=True,
    )
    if not sys.stdin.isatty():
        raise click.UsageError("--deep needs --yes when nobody can be asked")
    click.confirm("Measure now?", abort=True, err=True)


def _look(facts: Facts, where: Mapping[str, Host], *, deep: bool) -> Facts:
    from spark_appliance.cli.doctor_live import progress
    from spark_appliance.doctor import examine

    with progress(list(where)) as shown:
        facts = examine.examine(facts, where, tell=shown.tell)
        if not deep:
            return facts
        reason = examine.obstacle(facts)
        if reason is None:
            shown.again()
            return examine.measure(facts, where, tell=shown.tell, step=shown.step)
    click.echo(f"not measured: {reason}", err=True)
    return facts


_STYLES = {"fail": "bold red", "warn": "yellow", "ok": "green", "skip": "dim"}


def _print_results(facts: Facts, results: list[Result], *, verbose: bool) -> None:
    from rich.text import Text

    from spark_appliance.cli.output import console

    out = console()
    silent = [
        node.name
        for node in facts.plan.nodes
        if node.name in facts.answers and facts.answers[node.name].document is None
    ]
    hidden = dict.fromkeys(silent, 0)
    for status in ("skip", "ok", "warn", "fail") if verbose else ("warn", "fail"):
        for result in results:
            if result.status != status:
                continue
            if result.node in silent and result.check != "ACCESS.SSH":
                hidden[str(result.node)] += 1
                continue
            line = Text(f"{status:<4} ", style=_STYLES[status])
            line.append(result.check, style="bold")
            if result.node is not None:
                line.append(f" {result.node}", style="cyan")
            if result.subject is not None:
                line.append(f" [{result.subject}]", style="dim")
            line.append(f": {result.seen}")
            out.print(line)
            if result.means:
                out.print(Text(f"     means: {result.means}"))
            if result.do:
                out.print(Text(f"     do:    {result.do}", style="green"))
    for name, count in hidden.items():
        if count:
            line = Text("fail ", style=_STYLES["fail"])
            line.append(f"{count} further checks of {name}: it gave no answer")
            out.print(line)
