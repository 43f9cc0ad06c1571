"""From the options of a ``bench`` command to a run, and from its outcome to the terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import click

from spark_appliance.bench import endpoint, lmx, planfile, plot, prompts, store, table
from spark_appliance.bench.metrics import Prompt
from spark_appliance.bench.result import Mode, PromptKind, Result
from spark_appliance.bench.settings import Outcome, Settings
from spark_appliance.bench.wire import Limits
from spark_appliance.cli.bench_progress import ConsoleProgress
from spark_appliance.errors import InputError, OperationError
from spark_appliance.ssh import Host

# What the tool itself sets; --extra-body may not change it behind the protocol's back.
_OWN_FIELDS = frozenset(
    {"model", "messages", "stream", "stream_options", "max_tokens", "temperature", "n"}
)


def measure(mode: Mode, options: dict[str, Any], **specific: Any) -> None:
    """Measure and report. ``specific`` are the settings that only one mode has."""
    from spark_appliance.bench import session  # needs the extra, the other commands do not

    facts = planfile.read(options["plan"]) if options["plan"] else None
    key, warnings = endpoint.load_key(
        options["api_key_file"], os.environ, facts.api_key_file if facts else None
    )
    resume = store.load(options["resume"]) if options["resume"] else None
    out = options["out"] or options["resume"] or _default_out(mode)
    store.check_writable(out)
    if options["plot_file"] is not None:
        plot.check_path(options["plot_file"])
    described = lmx_facts(options, facts) if options.get("export") else None
    settings = Settings(
        address=endpoint.parse_url(chosen_url(options["url"], facts)),
        mode=mode,
        out=out,
        warmup=options["warmup"],
        model=options["model"] or (facts.served_model_name if facts else None),
        key=key,
        extra_body=_extra_body(options["extra_body"], ignore_eos=options["ignore_eos"]),
        allowed_cached=options["allow_cached"],
        limits=Limits(
            connect=options["connect_timeout"],
            first_token=options["first_token_timeout"],
            stall=options["stall_timeout"],
            total=options["request_timeout"],
        ),
        check=options["check"],
        wait_s=options["wait_s"],
        hosts=() if options["no_nodes"] else _hosts(options["nodes"], facts),
        interval_s=options["sample_interval"],
        plan_sha256=facts.sha256 if facts else None,
        image_digest=options["image_digest"],
        resume=resume,
        warnings=tuple(warnings),
        **specific,
    )
    with ConsoleProgress(quiet=options["quiet"]) as progress:
        outcome = session.run(settings, progress)
    _report(outcome, settings, options, described)


def _report(
    outcome: Outcome, settings: Settings, options: dict[str, Any], described: lmx.Facts | None
) -> None:
    result = outcome.result
    if not result.groups:
        click.echo("interrupted before the first sample: nothing was written", err=True)
        raise click.Abort
    click.echo(table.render(result))
    click.echo(f"\nresult: {settings.out}")
    if options["plot_file"] is not None and any(g.summary for g in result.groups):
        plot.draw(result, options["plot_file"])
        click.echo(f"plot: {options['plot_file']}")
    if described is not None and any("decode_tok_s" in g.summary for g in result.groups):
        export(result, described, options["export_dir"] or settings.out.parent, settings.out.stem)
    resume = f"    remedy: finish it with --resume {settings.out}"
    if outcome.interrupted:
        click.echo(f"finished samples are kept\n{resume}", err=True)
        raise click.Abort
    samples = [x for g in result.groups for r in g.rounds for x in r.samples]
    failure = outcome.failure or next((x.failure for x in reversed(samples) if x.failure), None)
    if failure is not None and result.status == "partial":
        raise OperationError(
            f"the result is partial: {failure.message} [{failure.kind}]\n"
            + (f"    remedy: {failure.remedy}\n" if failure.remedy else "")
            + f"    then: finish it with --resume {settings.out}"
        )
    lost = [x for x in samples if x.status == "ok" and x.needle and not x.needle.found]
    if lost:
        raise OperationError(
            f"{len(lost)} needles were not found: the model or the engine loses long contexts"
        )
    if result.status == "partial":
        raise OperationError(f"the result is partial: it lacks rounds or lengths\n{resume}")


def export(result: Result, facts: lmx.Facts, folder: Path, stem: str) -> None:
    """Write one lmx payload a group, and hardware.json, into ``folder``."""
    made = lmx.payloads(result, facts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OperationError(f"cannot make {folder}: {error.strerror or error}") from None
    for name, payload in made:
        path = folder / f"{stem}.{name}.lmx.json"
        store.write_text(path, lmx.dumps(payload))
        click.echo(f"lmx: {path}")
    hardware = folder / "hardware.json"
    store.write_text(hardware, lmx.dumps(made[0][1].hardware))
    click.echo(f"lmx: {hardware}")


def lmx_facts(options: dict[str, Any], plan: planfile.PlanFacts | None) -> lmx.Facts:
    """Collect what a result does not say, before anything is measured. Raises InputError."""
    hf_id = options["hf_id"] or (plan.hf_id if plan else None)
    if not hf_id or not options["quantization"]:
        missing = [
            n for n, v in (("--hf-id", hf_id), ("--quantization", options["quantization"])) if not v
        ]
        raise InputError.one(
            "bench.lmx",
            f"an lmx record needs {' and '.join(missing)}",
            "give the model's name on the hub and how its weights are quantized",
        )
    return lmx.Facts(
        hf_id=hf_id,
        quantization=options["quantization"],
        hardware=lmx.read_hardware(options["hardware"]) if options["hardware"] else None,
        hardware_class=cast(Literal["DISCRETE_GPU", "UNIFIED"], options["lmx_class"]),
    )


def chosen_prompts(kinds: Sequence[PromptKind], file: Path | None) -> dict[PromptKind, Prompt]:
    """Return the user's prompt, or the canonical ones."""
    if file is not None:
        return {"file": prompts.from_file(file)}
    return {kind: prompts.canonical(kind) for kind in kinds}


def _extra_body(text: str, *, ignore_eos: bool) -> dict[str, Any]:
    def fail(message: str) -> NoReturn:
        raise InputError.one(
            "bench.extra-body", message, "give a JSON object, such as '{\"top_k\": 1}'"
        )

    try:
        value = json.loads(text)
    except ValueError as error:
        fail(f"--extra-body is not JSON: {error}")
    if not isinstance(value, dict):
        fail("--extra-body is not a JSON object")
    own = sorted(_OWN_FIELDS & value.keys())
    if own:
        fail(f"--extra-body may not set {', '.join(own)}: the protocol does")
    return {**value, "ignore_eos": True} if ignore_eos else value


def chosen_url(url: str | None, plan: planfile.PlanFacts | None) -> str:
    """Return the URL that was given, or the plan's. Raises InputError without either."""
    if url:
        return url
    if plan is not None:
        return plan.api_url
    raise InputError.one("bench.url", "no endpoint is given", "give its URL, or a --plan")


def _hosts(nodes: Sequence[str], plan: planfile.PlanFacts | None) -> tuple[tuple[str, Host], ...]:
    if not nodes:
        return tuple((name, Host(ssh)) for name, ssh in plan.nodes) if plan else ()
    hosts = []
    for text in nodes:
        name, mark, destination = text.partition("=")
        if not mark or not name:
            raise InputError.one(
                "bench.node", f"{text!r} is not NAME=DESTINATION", "write --node spark1=user@host"
            )
        hosts.append((name, Host(destination)))
    return tuple(hosts)


def _default_out(mode: Mode) -> Path:
    return Path(f"bench-{mode}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json")
