"""The command line: a table of sub-commands that are imported only when they are used.

Each command module parses, calls the library below it and prints; it takes no decisions.
"""

from __future__ import annotations

import io
import os
import sys

import click

from spark_appliance import __version__
from spark_appliance.cli.lazy import Entry, LazyGroup
from spark_appliance.errors import SparkError

# One row a command: ``--help`` prints the summaries without importing any of the modules.
_COMMANDS: dict[str, Entry] = {
    "init": Entry("init:init", "Write a commented cluster file to start from."),
    "check": Entry("check:check", "Report every problem of a cluster file, with line and remedy."),
    "render": Entry("render:render", "Write the plan, cluster.lock.json."),
    "show": Entry("show:show", "Show what a node will run."),
    "topology": Entry("topology:topology", "Draw which cable goes where."),
    "schema": Entry("schema:schema", "Print the JSON Schema of a file format."),
    "build": Entry("install:build", "Build NixOS nodes' systems here."),
    "install": Entry("install:install", "Put the plan on the nodes."),
    "uninstall": Entry("install:uninstall", "Remove everything of ours from DGX OS nodes."),
    "share": Entry("share:share", "Make the checkpoint readable on every node."),
    "pack": Entry("pack:pack", "Pack every node's Engram rows onto its NVMe."),
    "serve": Entry("serve:serve", "Start all ranks; ends when the endpoint answers."),
    "stop": Entry("serve:stop", "Let requests finish, stop all ranks."),
    "restart": Entry("serve:restart", "Stop and start all ranks."),
    "status": Entry("status:status", "Show ranks, speed, memory, clocks and drift."),
    "logs": Entry("logs:logs", "Show the journals of the ranks."),
    "smoke": Entry("smoke:smoke", "Ask the endpoint questions with known answers."),
    "rollout": Entry("rollout:rollout", "Bring a new plan to all nodes, with a way back."),
    "rollback": Entry("rollout:rollback", "Take the last rollout back."),
    "doctor": Entry("doctor:doctor", "Check every node: may this cluster boot?"),
    "image": Entry("image:image", "Build the container image, write the disk image."),
    "bench": Entry("bench:bench", "Measure an endpoint so that others can check the numbers."),
}


@click.group(
    cls=LazyGroup, table=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]}
)
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
