"""The command line of ``spark-node``: parses, calls, and turns errors into one line."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from spark_appliance import __version__
from spark_appliance.names import CONTAINER, PLAN_PATH
from spark_appliance.node.clock import SystemClock
from spark_appliance.node.errors import NodeError, PlanError
from spark_appliance.node.journal import Journal
from spark_appliance.node.notify import Notifier
from spark_appliance.node.plan import NodeContext, read_context
from spark_appliance.node.process import replace_process, run

Command = Callable[[NodeContext, argparse.Namespace, Journal], None]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program; errors become one line and an exit status, never a traceback."""
    arguments = _parser().parse_args(argv)
    journal = Journal()
    command: Command = arguments.command
    try:
        if arguments.identity:
            _identity(arguments, journal)
            return
        if arguments.node is None:
            raise PlanError("--node is missing: the name of this node in the plan")
        plan = Path(arguments.plan) if arguments.plan else arguments.root / PLAN_PATH[1:]
        command(read_context(plan, arguments.node, arguments.root), arguments, journal)
    except NodeError as error:
        journal.error(str(error))
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spark-node", description="The programs of spark-appliance that run on every Spark."
    )
    parser.add_argument("--version", action="version", version=f"spark-node {__version__}")
    parser.add_argument("--plan", help=f"the plan (default: {PLAN_PATH} below --root)")
    parser.add_argument("--node", help="name of this node in the plan (all but identity)")
    parser.add_argument(
        "--root",
        type=Path,
        default=Path("/"),
        help="look up /sys, /proc, /run, /etc and all paths of the plan below this directory",
    )
    parser.set_defaults(identity=False, command=None)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    fabric = commands.add_parser("fabric", help="wait for the rails, resolve GIDs, warm ARP")
    fabric.add_argument("--deadline", type=_seconds, default=120.0, help="seconds (120)")
    fabric.set_defaults(command=_fabric)

    guard = commands.add_parser("guard", help="kill the engine before memory runs out")
    guard.add_argument("--container", help="name of the engine's container, where it has one")
    guard.add_argument("--container-runtime", default="docker", help="its runtime (docker)")
    guard.set_defaults(command=_guard)

    prepare = commands.add_parser("prepare", help="check files, write the config, free memory")
    prepare.add_argument("--user", required=True, help="the engine's user")
    prepare.set_defaults(command=_prepare)

    execute = commands.add_parser("exec", help="become the engine, with the plan's environment")
    execute.add_argument("--python", help="interpreter that replaces the plan's argv[0]")
    execute.add_argument("--container", help=f"run in a container of this name ({CONTAINER})")
    execute.add_argument("--container-runtime", default="docker", help="docker or podman")
    execute.add_argument("--image", help="image of the container, by digest")
    execute.add_argument("--user", help="user inside the container (default: root, no rights)")
    execute.add_argument("--writable-engram", action="store_true", help="for packing")
    execute.add_argument("rest", nargs="*", metavar="-- PROGRAM", help="instead of the engine")
    execute.set_defaults(command=_exec)

    ready = commands.add_parser("ready", help="ready once a generation is right; then watch")
    ready.set_defaults(command=_ready)

    supervise = commands.add_parser("supervise", help="start and stop all ranks together")
    supervise.add_argument("--heartbeat", type=_seconds, default=2.0, help="seconds (2)")
    supervise.add_argument(
        "--peer-deadline", type=_seconds, default=10.0, help="silence until a peer is lost (10)"
    )
    supervise.add_argument("--poll", type=_seconds, default=1.0, help="seconds (1)")
    supervise.add_argument("--reconnect", type=_seconds, default=5.0, help="seconds (5)")
    supervise.add_argument(
        "--settle", type=_seconds, default=5.0, help="listening for the cause of a failure (5)"
    )
    supervise.set_defaults(command=_supervise)

    status = commands.add_parser("status", help="print the state of this node as JSON")
    status.set_defaults(command=_status)

    router = commands.add_parser("router", help="become sglang-router")
    router.add_argument("--python", required=True, help="interpreter with sglang_router")
    router.set_defaults(command=_router)

    report = commands.add_parser("report", help="status, engine, GPU, counters as JSON")
    report.add_argument("--gpu", action="store_true", help="also ask nvidia-smi (slows the GPU)")
    report.set_defaults(command=_report)

    identity = commands.add_parser("identity", help="find out which node this is (first boot)")
    identity.add_argument("--esp", type=Path, required=True, help="where the ESP is mounted")
    identity.set_defaults(identity=True)
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 86400:
        raise argparse.ArgumentTypeError("must be more than 0 and less than a day")
    return value


def _fabric(context: NodeContext, arguments: argparse.Namespace, journal: Journal) -> None:
    from spark_appliance.node.fabric import Fabric

    Fabric(context, run, SystemClock(), journal, arguments.deadline).run()


def _guard(context: NodeContext, arguments: argparse.Namespace, journal: Journal) -> None:
    from spark_appliance.node.guard import Guard, Killer, lock_memory

    lock_memory(journal)
    killer = Killer(context, run, arguments.container, arguments.container_runtime)
    Guard(context, killer, journal, Notifier(), _wait_for_signal()).run()


def _prepare(context: NodeContext, arguments: argparse.Namespace, journal: Journal) -> None:
    from spark_appliance.node.prepare import Preparation, owner_of

    Preparation(context, journal, owner_of(arguments.user), os.environ).run()


def _exec(context: NodeContext, arguments: argparse.Namespace, _: Journal) -> None:
    from spark_appliance.node.execute import engine_command, engine_environment

    # packing must work before the cables do
    environment = engine_environment(context, os.environ, fabric=not arguments.writable_engram)
    if arguments.container is None:
        command = engine_command(context, arguments.python, arguments.rest)
        replace_process(command, environment)
    if arguments.image is None:
        raise PlanError("exec --container needs --image")
    from spark_appliance.node.container import (
        LOADER_VARIABLES,
        SECCOMP_FILE,
        Container,
        seccomp_text,
    )
    from spark_appliance.node.files import write_atomic
    from spark_appliance.node.prepare import owner_of

    container = Container(
        name=arguments.container,
        runtime=arguments.container_runtime,
        image=arguments.image,
        owner=None if arguments.user is None else owner_of(arguments.user),
        writable_engram=arguments.writable_engram,
    )
    write_atomic(context.path(SECCOMP_FILE), seccomp_text())
    for name in LOADER_VARIABLES:
        environment.pop(name, None)
    replace_process(container.argv(context, arguments.rest), environment)


def _ready(context: NodeContext, _: argparse.Namespace, journal: Journal) -> None:
    from spark_appliance.node.prepare import read_key
    from spark_appliance.node.ready import Readiness, probe_of

    key = None
    if context.plan.view("api").optional_text("key_file") is not None:
        key = read_key(context, os.environ)
    health = context.plan.view("health")

    def leave(*_: object) -> None:
        # also out of the middle of a probe, which may take minutes
        sys.exit(0)

    def wait(seconds: float) -> bool:
        time.sleep(seconds)
        return False

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    Readiness(
        context=context,
        probe=probe_of(context, key),
        clock=SystemClock(),
        wait=wait,
        journal=journal,
        notifier=Notifier(),
        interval=health.integer("interval"),
        steady_interval=health.integer("steady_interval"),
        ready_timeout=health.integer("ready_timeout"),
    ).run()


def _supervise(context: NodeContext, arguments: argparse.Namespace, journal: Journal) -> None:
    from spark_appliance.node.supervisor.protocol import Timing
    from spark_appliance.node.supervisor.service import supervise
    from spark_appliance.node.systemctl import Systemctl

    timing = Timing(
        heartbeat=arguments.heartbeat,
        deadline=arguments.peer_deadline,
        poll=arguments.poll,
        reconnect=arguments.reconnect,
        settle=arguments.settle,
    )
    asyncio.run(supervise(context, Systemctl(), journal, Notifier(), timing))


def _status(context: NodeContext, _: argparse.Namespace, __: Journal) -> None:
    from spark_appliance.node.status import status

    print(json.dumps(status(context, run), sort_keys=True))


def _router(context: NodeContext, arguments: argparse.Namespace, _: Journal) -> None:
    from spark_appliance.node.router import router_argv

    replace_process(router_argv(context, arguments.python), dict(os.environ))


def _report(context: NodeContext, arguments: argparse.Namespace, _: Journal) -> None:
    from spark_appliance.node.report import report

    print(json.dumps(report(context, run, gpu=arguments.gpu), sort_keys=True))


def _identity(arguments: argparse.Namespace, journal: Journal) -> None:
    from spark_appliance.node.identity import Identity

    Identity(arguments.root, arguments.esp, run, SystemClock(), journal).take()


def _wait_for_signal() -> Callable[[float], bool]:
    """Return a wait that SIGTERM and SIGINT end; it says whether one came."""
    stop = threading.Event()

    def handle(*_: object) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return stop.wait
