"""The command line: answers are one JSON document on stdout, errors one line on stderr."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from spark_appliance.node.errors import NodeError
from spark_appliance.node.generations import activate
from spark_appliance.node.generations.bundle import Manifest, read_bundle
from spark_appliance.node.generations.store import State, Store
from spark_appliance.node.generations.switch import (
    Preview,
    confirm,
    describe,
    difference,
    drift,
    preview,
    remove_folders,
    same_generation,
    switch,
    warnings,
)
from spark_appliance.node.process import Runner, run

_UNITS = "/etc/systemd/system/"
_UNIT_SUFFIXES = (".service", ".target", ".mount", ".automount")


class ActivationError(NodeError):
    """The files are in place, but a command after them failed: exit status 5."""

    exit_status = 5


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit."""
    try:
        answer = execute(_parser().parse_args(argv), run)
    except NodeError as error:
        sys.stderr.write(f"spark-generations: error: {error}\n")
        sys.exit(error.exit_status)
    json.dump(answer, sys.stdout, sort_keys=True)
    sys.stdout.write("\n")


def execute(args: argparse.Namespace, runner: Runner) -> dict[str, Any]:
    """Run one parsed command; returns its answer.

    Raises:
        NodeError: when it fails.
    """
    store = Store(args.root)
    live = args.root == Path("/")
    if args.command == "list":
        return _listing(store)
    with store.locked():
        match args.command:
            case "diff":
                return _diff(store, args.bundle)
            case "apply":
                return _apply(store, args, runner, live=live)
            case "confirm":
                if live:
                    activate.disarm(runner)
                state = confirm(store)
                return {"current": state.current, "confirmed": state.confirmed}
            case "hold":
                return _hold(store, args.return_after, runner, live=live)
            case "rollback":
                return _rollback(store, args.to, args.adopt, runner, live=live)
            case "return":
                return _go_back(store, runner, live=live, serving=True)
            case "recover":
                return _go_back(store, runner, live=live, serving=False)
            case _:
                return _uninstall(store, runner, live=live)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spark-generations", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path("/"), help="prefix of every path")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="what is installed, as JSON")
    diff = commands.add_parser("diff", help="what applying a bundle would change")
    diff.add_argument("--bundle", type=Path, required=True)
    apply = commands.add_parser("apply", help="install a bundle as the next generation")
    apply.add_argument("--bundle", type=Path, required=True)
    apply.add_argument("--adopt", action="store_true", help="replace foreign files, kept aside")
    apply.add_argument(
        "--return-after",
        type=int,
        metavar="SECONDS",
        help="go back by itself unless 'confirm' comes within this time, or at the next boot",
    )
    commands.add_parser("confirm", help="keep the current generation")
    hold = commands.add_parser("hold", help="arm the timer that goes back anew")
    hold.add_argument("--return-after", type=int, metavar="SECONDS", required=True)
    rollback = commands.add_parser("rollback", help="go back to an earlier generation")
    rollback.add_argument("--to", type=int, metavar="N", help="default: the one before")
    rollback.add_argument("--adopt", action="store_true")
    commands.add_parser("return", help="go back to the confirmed generation and serve again")
    commands.add_parser("recover", help="the same without starting anything, at boot")
    commands.add_parser("uninstall", help="remove every file")
    return parser


def _listing(store: Store) -> dict[str, Any]:
    state = store.state()
    generations = [
        {"number": number, "label": store.manifest(number).label} for number in store.numbers()
    ]
    return {
        "current": state.current,
        "confirmed": state.confirmed,
        "switching": state.switching,
        "activated": state.activated,
        "generations": generations,
        "drift": drift(store, state),
    }


def _diff(store: Store, path: Path) -> dict[str, Any]:
    bundle = read_bundle(_read(path))
    plan = preview(store, store.state(), bundle.manifest)
    return {
        "changes": describe(plan),
        "conflicts": [{"path": c.path, "reason": c.reason} for c in plan.conflicts],
        "warnings": warnings(store.root, bundle.manifest),
        "diff": difference(store, bundle, plan),
    }


def _apply(store: Store, args: argparse.Namespace, runner: Runner, *, live: bool) -> dict[str, Any]:
    bundle = read_bundle(_read(args.bundle))
    state = store.state()
    redo = _unfinished(state)
    number = same_generation(store, state, bundle.manifest)
    if number is None:
        number = state.next
        state = store.add(bundle, state)
    old = _manifests(store, state)
    pending = args.return_after is not None

    def before() -> None:
        if live and pending:
            activate.arm(runner, args.return_after)

    state, plan = switch(store, number, adopt=args.adopt, before=before)
    if not pending:
        state = confirm(store)
    answer = _answer(store, state, plan, bundle.manifest)
    if live:
        state = _activate(store, state, plan, [*old, bundle.manifest], runner, redo=redo)
    store.prune(state)
    return answer


def _hold(store: Store, seconds: int, runner: Runner, *, live: bool) -> dict[str, Any]:
    state = store.state()
    if state.current == state.confirmed and state.switching is None:
        raise NodeError("nothing is on trial: the node went back, or the change was confirmed")
    if live:
        activate.arm(runner, seconds)
    return {"current": state.current, "confirmed": state.confirmed}


def _rollback(
    store: Store, to: int | None, adopt: bool, runner: Runner, *, live: bool
) -> dict[str, Any]:
    state = store.state()
    number = _before(store, state) if to is None else to
    old = _manifests(store, state)
    target = store.manifest(number)
    redo = _unfinished(state)
    if live:
        activate.disarm(runner)
    tried = _on_trial(state) - {number}
    _, plan = switch(store, number, adopt=adopt)
    state = confirm(store)
    store.drop(tried)
    answer = _answer(store, state, plan, target)
    if live:
        _activate(store, state, plan, [*old, target], runner, redo=redo)
    return answer


def _go_back(store: Store, runner: Runner, *, live: bool, serving: bool) -> dict[str, Any]:
    state = store.state()
    if state.switching is None and state.current == state.confirmed:
        # a change of the cluster that is none here: the others go back, and this node, which was
        # stopped for it, serves again with them
        if live and serving and state.current:
            activate.start_serving(runner)
        return {"current": state.current, "confirmed": state.confirmed, "changes": []}
    old = _manifests(store, state)
    target = store.manifest(state.confirmed)
    if live and serving:
        activate.stop_serving(runner)
    tried = _on_trial(state)
    # edits made while the change was on trial must not keep the node from returning
    state, plan = switch(store, state.confirmed, adopt=True)
    store.drop(tried)
    answer = _answer(store, state, plan, target)
    if live:
        try:
            _activate(store, state, plan, [*old, target], runner, redo=True, boot=not serving)
        finally:
            if serving and state.current:
                activate.start_serving(runner)
    return answer


def _uninstall(store: Store, runner: Runner, *, live: bool) -> dict[str, Any]:
    state = store.state()
    old = _manifests(store, state)
    units = sorted(
        {
            entry.path.removeprefix(_UNITS)
            for manifest in old
            for entry in manifest.entries
            if entry.path.startswith(_UNITS)
            and entry.path.count("/") == _UNITS.count("/")
            and entry.path.endswith(_UNIT_SUFFIXES)
        }
    )
    if live:
        activate.disarm(runner)
        if units:
            activate.stop_serving(runner)
            runner(["systemctl", "stop", "--", *units], seconds=300)
    state, plan = switch(store, 0, aside=True)
    state = confirm(store)
    remove_folders(store, state)
    answer = _answer(store, state, plan, store.manifest(0))
    if live:
        _activate(store, state, plan, old, runner, redo=True)
    shutil.rmtree(store.folder, ignore_errors=True)
    return answer


def _activate(
    store: Store,
    state: State,
    plan: Preview,
    manifests: Sequence[Manifest],
    runner: Runner,
    *,
    redo: bool,
    boot: bool = False,
) -> State:
    actions = [
        action
        for manifest in reversed(manifests)
        for action in manifest.actions
        if action.boot or not boot
    ]
    changed = plan.changed
    if redo:
        changed = tuple(entry.path for m in manifests for entry in m.entries)
    failures = activate.run_all(runner, activate.due(actions, changed))
    if failures:
        raise ActivationError(
            "the files are in place, but: " + "; ".join(failures) + "; apply again to retry"
        )
    return store.write_state(replace(state, activated=True))


def _answer(store: Store, state: State, plan: Preview, target: Manifest) -> dict[str, Any]:
    return {
        "current": state.current,
        "confirmed": state.confirmed,
        "changes": describe(plan),
        "warnings": warnings(store.root, target),
    }


def _on_trial(state: State) -> set[int]:
    """Return the generations that were tried and not confirmed."""
    return {state.current, *state.mixed} - {state.confirmed}


def _unfinished(state: State) -> bool:
    """Whether the commands after the last switch failed or were cut off: then all run again."""
    return not state.activated or state.switching is not None


def _manifests(store: Store, state: State) -> list[Manifest]:
    return [store.manifest(number) for number in sorted({state.current, *state.mixed})]


def _before(store: Store, state: State) -> int:
    if state.switching is not None or state.current != state.confirmed:
        return state.confirmed
    earlier = [number for number in store.numbers() if number < state.current]
    if not earlier:
        raise NodeError(
            "there is no earlier generation to go back to; spark-appliance uninstall removes this"
        )
    return earlier[-1]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NodeError(f"cannot read {path}: {error}") from None
