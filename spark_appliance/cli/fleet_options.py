"""What the commands that work on nodes have in common: arguments, run folder, live table."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from spark_appliance.doctor.result import Level
    from spark_appliance.fleet.crew import Crew
    from spark_appliance.fleet.evidence import RunFolder
    from spark_appliance.fleet.remote import Rehearsal
    from spark_appliance.fleet.serve import Preflight
    from spark_appliance.model.plan import Plan

F = TypeVar("F", bound=Callable[..., Any])


def cluster_argument(function: F) -> F:
    """Add the argument CLUSTER."""
    return click.argument("cluster", type=click.Path(path_type=Path), default=Path("cluster.yaml"))(
        function
    )


def node_option(function: F) -> F:
    """Add --node."""
    return click.option(
        "--node", "nodes", multiple=True, metavar="NAME", help="Only this node; repeat."
    )(function)


def runs_option(function: F) -> F:
    """Add --runs."""
    return click.option(
        "--runs",
        type=click.Path(path_type=Path),
        default=Path("runs"),
        show_default=True,
        help="Folder for the evidence; each run makes its own below it.",
    )(function)


def dry_run_option(function: F) -> F:
    """Add --dry-run."""
    return click.option(
        "--dry-run", is_flag=True, help="Print every command that would run, and run none."
    )(function)


def open_plan(cluster: Path) -> Plan:
    """Return the plan of a cluster file or a plan file.

    Raises:
        InputError: when there is none, or the plan file beside the cluster file is stale: what
            is on the nodes must be what was looked at.
    """
    from spark_appliance import lockfile
    from spark_appliance.errors import InputError, Location
    from spark_appliance.workspace import open_cluster

    if cluster.suffix == ".json":
        return lockfile.load(cluster)
    opened = open_cluster(cluster)
    plan = opened.require_plan()
    lock = cluster.parent / lockfile.LOCK_NAME
    with contextlib.suppress(FileNotFoundError):
        if lock.read_text(encoding="utf-8") != lockfile.dump(plan):
            raise InputError.one(
                "plan.stale",
                f"{lock} does not follow from {cluster}",
                f"look at it and write it anew: spark-appliance render {shlex.quote(str(cluster))}",
                Location(str(lock)),
            )
    return plan


@contextlib.contextmanager
def fleet_run(
    command: str,
    plan: Plan,
    runs: Path | None,
    nodes: Sequence[str] = (),
    *,
    rehearsal: Rehearsal | None = None,
    live: bool = True,
) -> Iterator[tuple[Crew, RunFolder | None]]:
    """Open a run folder, show the board, and write down how it ended."""
    from spark_appliance.cli.live import showing
    from spark_appliance.fleet.crew import Crew, FleetError
    from spark_appliance.fleet.evidence import RunFolder

    folder = None
    if runs is not None and rehearsal is None:
        folder = RunFolder.create(runs, command, plan, sys.argv)
    crew = Crew.of(plan, nodes=nodes, evidence=folder, rehearsal=rehearsal)
    outcome, failures = "failed", dict[str, str]()
    try:
        with showing(crew.board) if live and rehearsal is None else contextlib.nullcontext():
            yield crew, folder
        outcome = "done"
    except KeyboardInterrupt:
        outcome = "interrupted"
        crew.sessions.close()
        raise
    except click.exceptions.Exit:
        raise  # the command has said and kept what failed
    except FleetError as error:
        failures = {name: str(failure) for name, failure in error.failures.items()}
        raise
    except Exception as error:
        failures = {"": str(error)}
        raise
    finally:
        if folder is not None:
            folder.finish(outcome, failures)
            click.echo(f"evidence: {folder.path}", err=True)


def print_rehearsal(rehearsal: Rehearsal) -> None:
    """Print the commands of a dry run, ready to be pasted; what goes to stdin is described."""
    import shlex

    for node, step, argv, text in rehearsal.commands:
        click.echo(f"# {node}: {step}")
        line = shlex.join(argv)
        if text is None:
            click.echo(line)
        elif len(text) > 4000:
            click.echo(f"{line}  # with {len(text)} characters on standard input")
        else:
            click.echo(f"{line} <<'END'\n{text.rstrip()}\nEND")


def doctor_preflight(plan: Plan, folder: RunFolder | None) -> Preflight:
    """Return the probe level of ``doctor`` as a check before a start.

    What it saw is kept in the run folder, which ``doctor --replay`` can judge again.
    """

    def check() -> None:
        from spark_appliance.doctor import evidence, examine
        from spark_appliance.doctor.evaluate import evaluate
        from spark_appliance.doctor.report import make_report
        from spark_appliance.errors import OperationError

        started = time.time()
        levels: list[Level] = ["config", "probe"]
        facts = examine.examine(examine.base(plan), examine.hosts(plan))
        results = evaluate(facts, levels)
        if folder is not None:
            judged = str(folder.path / "plan.json")
            report = make_report(facts, results, file=judged, started=started, levels=levels)
            evidence.keep(folder.path, facts, report, started)
        failed = [r for r in results if r.status == "fail"]
        if failed:
            lines = [
                f"    {r.check} {r.node or ''} {r.subject or ''}: {r.seen}; do: {r.do}"
                for r in failed[:20]
            ]
            raise OperationError(
                f"doctor: {len(failed)} checks failed, nothing was started\n"
                + "\n".join(lines)
                + "\n    remedy: see spark-appliance doctor, or start with --no-doctor"
            )

    return check
