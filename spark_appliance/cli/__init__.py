"""The command line: a table of sub-commands that are imported only when they are used.

Each command module parses, calls the library below it and prints; it takes no decisions.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from typing import NamedTuple

import click

from spark_appliance import __version__
from spark_appliance.errors import SparkError


class _Entry(NamedTuple):
    target: str  # "module:attribute" below this package
    summary: str


# One row a command: ``--help`` prints the summaries without importing any of the modules.
_COMMANDS: dict[str, _Entry] = {
    "init": _Entry("init:init", "Write a commented cluster file to start from."),
    "check": _Entry("check:check", "Report every problem of a cluster file, with line and remedy."),
    "render": _Entry("render:render", "Write the plan, cluster.lock.json."),
    "show": _Entry("show:show", "Show what a node will run."),
    "topology": _Entry("topology:topology", "Draw which cable goes where."),
    "schema": _Entry("schema:schema", "Print the JSON Schema of a file format."),
    "build": _Entry("install:build", "Build NixOS nodes' systems here."),
    "install": _Entry("install:install", "Put the plan on the nodes."),
    "uninstall": _Entry("install:uninstall", "Remove everything of ours from DGX OS nodes."),
    "share": _Entry("share:share", "Make the checkpoint readable on every node."),
    "pack": _Entry("pack:pack", "Pack every node's Engram rows onto its NVMe."),
    "serve": _Entry("serve:serve", "Start all ranks; ends when the endpoint answers."),
    "stop": _Entry("serve:stop", "Let requests finish, stop all ranks."),
    "restart": _Entry("serve:restart", "Stop and start all ranks."),
    "status": _Entry("status:status", "Show ranks, speed, memory, clocks and drift."),
    "logs": _Entry("logs:logs", "Show the journals of the ranks."),
    "smoke": _Entry("smoke:smoke", "Ask the endpoint questions with known answers."),
    "rollout": _Entry("rollout:rollout", "Bring a new plan to all nodes, with a way back."),
    "rollback": _Entry("rollout:rollback", "Take the last rollout back."),
    "doctor": _Entry("doctor:doctor", "Check every node: may this cluster boot?"),
    "image": _Entry("image:image", "Build the container image, write the disk image."),
    "bench": _Entry("bench:bench", "Measure an endpoint so that others can check the numbers."),
}


class LazyGroup(click.Group):
    """A click group whose sub-commands are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the command names in the order of the table."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import and return one command, or None for an unknown name."""
        entry = _COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module, attribute = entry.target.split(":")
        command = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{entry.target} is not a click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the commands from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in _COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="spark-appliance")
def cli() -> None:
    """Turn DGX Sparks into one endpoint: describe them once, render a plan, roll it out."""


def main() -> None:
    """Run the console script; errors become lines on stderr and an exit status, no tracebacks."""
    # pydantic searches every installed distribution for plugins: a fifth of a command's time
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a terminal that cannot show a character shows '?', it does not end the program
            stream.reconfigure(errors="replace")
    try:
        # without its own exit handling click returns the status of an Exit
        status = cli.main(prog_name="spark-appliance", standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except SparkError as error:
        click.echo(str(error), err=True)
        sys.exit(error.exit_status)
    except BrokenPipeError:
        # the reader has seen enough; nothing may be flushed into the closed pipe at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        click.echo(f"error: {error.strerror or error}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
