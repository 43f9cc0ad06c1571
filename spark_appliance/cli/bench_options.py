"""Options that several ``bench`` commands share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from spark_appliance.bench import endpoint, prompts, speed
from spark_appliance.bench.nodes import MIN_INTERVAL_S
from spark_appliance.bench.wire import Limits

_F = TypeVar("_F", bound=Callable[..., Any])
_LIMITS = Limits()
FILE = click.Path(path_type=Path, dir_okay=False)


class DefaultGroup(click.Group):
    """A group that runs ``speed`` when the first word is not a sub-command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the default command in front of anything that is not one of the group's words."""
        own = {*self.commands, *ctx.help_option_names}
        if args and args[0] not in own:
            args = ["speed", *args]
        return super().parse_args(ctx, args)


def parse_integers(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[int, ...]:
    """Parse ``1,2,4``."""
    try:
        numbers = tuple(int(word) for word in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list such as 1,2,4") from None
    if min(numbers) < 1 or len(set(numbers)) != len(numbers):
        raise click.BadParameter(f"{value!r}: every number must be positive and occur once")
    return numbers


def parse_shapes(
    _ctx: click.Context, _param: click.Parameter, value: str
) -> tuple[tuple[int, int], ...]:
    """Parse ``1x208000,4x46000``."""
    pairs = []
    for word in value.split(","):
        left, mark, right = word.partition("x")
        if not (mark and left.isdecimal() and right.isdecimal() and int(left) and int(right)):
            raise click.BadParameter(f"{word!r} is not STREAMSxTOKENS, such as 4x46000")
        pairs.append((int(left), int(right)))
    return tuple(pairs)


def _options(*options: Callable[[_F], _F]) -> Callable[[_F], _F]:
    return lambda function: functools.reduce(lambda f, o: o(f), reversed(options), function)


TARGET = _options(
    click.argument("url", required=False),
    click.option("--plan", type=FILE, help="cluster.lock.json: URL, model, nodes; its sha256."),
    click.option("--model", help="Model name; the endpoint's first one by default."),
    click.option(
        "--api-key-file",
        type=FILE,
        help=f"File with the API key. Else the variable {endpoint.KEY_VARIABLE} is used.",
    ),
    click.option(
        "--check/--no-check",
        default=None,
        help="Refuse to measure beside other requests. By default: refuse when other requests "
        "are seen, warn when the endpoint does not tell. --check refuses then, too.",
    ),
)

RUN = _options(
    click.option("--out", type=FILE, help="Result file. [bench-MODE-TIME.json]"),
    click.option("--resume", type=FILE, help="Finish this partial result, in the same file."),
    click.option(
        "--warmup",
        type=click.IntRange(0),
        default=speed.WARMUP,
        show_default=True,
        help="Untimed rounds.",
    ),
    click.option(
        "--allow-cached",
        type=click.IntRange(0),
        default=0,
        show_default=True,
        help="Prompt tokens that may come from the prefix cache.",
    ),
    click.option(
        "--extra-body",
        default="{}",
        metavar="JSON",
        help="More request fields, for example chat_template_kwargs.",
    ),
    click.option(
        "--ignore-eos",
        is_flag=True,
        help="Ask for exactly max_tokens (SGLang and vLLM know the field).",
    ),
    click.option(
        "--wait",
        "wait_s",
        type=click.FloatRange(0),
        default=0.0,
        metavar="SECONDS",
        help="Wait so long for the endpoint to become ready.",
    ),
    click.option(
        "--connect-timeout",
        type=click.FloatRange(0.1),
        default=_LIMITS.connect,
        show_default=True,
        metavar="SECONDS",
    ),
    click.option(
        "--first-token-timeout",
        type=click.FloatRange(0.1),
        default=_LIMITS.first_token,
        show_default=True,
        metavar="SECONDS",
    ),
    click.option(
        "--stall-timeout",
        type=click.FloatRange(0.1),
        default=_LIMITS.stall,
        show_default=True,
        metavar="SECONDS",
    ),
    click.option(
        "--request-timeout",
        type=click.FloatRange(0.1),
        default=_LIMITS.total,
        show_default=True,
        metavar="SECONDS",
    ),
    click.option(
        "--node",
        "nodes",
        multiple=True,
        metavar="NAME=DESTINATION",
        help="A node to read over SSH; instead of the plan's.",
    ),
    click.option("--no-nodes", is_flag=True, help="Do not read the plan's nodes."),
    click.option(
        "--sample-interval",
        type=click.IntRange(MIN_INTERVAL_S),
        default=MIN_INTERVAL_S,
        show_default=True,
        metavar="SECONDS",
        help="Between two readings of a node.",
    ),
    click.option("--image-digest", help="Digest of the engine's image, where no node tells it."),
    click.option("--plot", "plot_file", type=FILE, help="Draw a .png or .svg (extra: plot)."),
    click.option("--quiet", is_flag=True, help="No progress."),
)

EXPORT = _options(
    click.option("--hf-id", help="Model on the hub, OWNER/NAME. [the plan's]"),
    click.option("--quantization", help="As the site names it, for example FP8."),
    click.option("--hardware", type=FILE, help="Your hardware.json. [made from the nodes]"),
    click.option(
        "--lmx-class",
        type=click.Choice(["DISCRETE_GPU", "UNIFIED"]),
        default="DISCRETE_GPU",
        show_default=True,
    ),
    click.option(
        "--export-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder for the exported files. [beside the result]",
    ),
)

KIND = click.Choice(prompts.CANONICAL)


TEXT = _options(
    click.option(
        "--kind", "kind", type=KIND, default="code", show_default=True, help="Kind of text."
    ),
    click.option(
        "--text-dir",
        "text_dirs",
        multiple=True,
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder with real text; may be repeated. "
        "[code: Python's standard library; else /usr/share/doc and /usr/share]",
    ),
)
