"""Bring a new plan to all nodes, and nothing half: a dead man's switch on every node.

Everything is built and copied first. Then requests finish, the engine stops, one node (the
canary) gets the new version and is looked at, then the others, then the cluster starts. Until it
has given a right answer every node holds a timer that takes it back to what it had; this program
winds the timers up again while it works. When it dies, or loses a node, the timers do the rest:
all nodes return to the old version, which belongs together. Only at the end the new version is
confirmed and becomes what boots.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from spark_appliance import lockfile
from spark_appliance.errors import InputError, Location, OperationError
from spark_appliance.fleet.crew import Crew, FleetError
from spark_appliance.fleet.evidence import RunFolder
from spark_appliance.fleet.install import APPLY_SECONDS, Installer, real_root
from spark_appliance.fleet.nixos import ACTIVATE_SECONDS, ARM_SECONDS, Nixos
from spark_appliance.fleet.remote import Remote, StepError, Stopped
from spark_appliance.fleet.report import ask
from spark_appliance.fleet.rolloutstate import NodeState, RolloutState, read, write
from spark_appliance.fleet.serve import Preflight, ServeError, Start
from spark_appliance.fleet.stop import DRAIN_LIMIT, stop
from spark_appliance.fleet.units import forget_failures, systemctl
from spark_appliance.names import PACK, TARGET
from spark_appliance.process import Sessions

HOLD_SECONDS: Final = 600
"""Seconds until a node returns by itself."""

TRIES: Final = 3
"""Windings in the time of a hold: two may be lost before a node returns."""

KEEP_SECONDS: Final = round(max(ACTIVATE_SECONDS, APPLY_SECONDS))
"""The longest deadline of keeping a version: no timer may run out while a node does that."""

NOTHING: Final = "0"
"""Generation of a DGX OS node that had nothing of ours before."""


class RolloutError(OperationError):
    """The rollout failed; the message says what the nodes have now."""


@dataclass(slots=True)
class Rollout:
    """A rollout or a rollback of one.

    ``start`` makes the start of the cluster (tests give a quick one); ``flake`` is needed for
    NixOS nodes.
    """

    crew: Crew
    state_file: Path
    flake: str | None = None
    evidence: RunFolder | None = None
    hold: int = HOLD_SECONDS
    drain_limit: float = DRAIN_LIMIT
    adopt: bool = False
    root: Callable[[Remote], str] = real_root
    preflight: Preflight | None = None
    start: Callable[[Crew], Start] | None = None
    paths: dict[str, str] = field(default_factory=dict)

    # -- forward ---------------------------------------------------------------------------

    def run(self, *, canary: str | None = None, resume: bool = False) -> RolloutState:
        """Roll out the crew's plan.

        Raises:
            InputError: when an unfinished rollout is in the way, or there is none to resume.
            RolloutError: when it failed and the nodes were returned.
        """
        old = self._interrupted(resume=resume)
        # first of all: the nodes' timers run
        if old is not None and old.phase == "confirming" and self._all_new(old):
            return self._confirm(old)
        state = self._begin(canary, old)
        try:
            state = self._stop(state)
            with self._winding(lambda: state):
                state = self._activate(state, "canary", [state.canary])
                rest = [remote.name for remote in self.crew if remote.name != state.canary]
                state = self._activate(state, "rest", rest)
                state = self._save(state.at("serving"))
                self._serve()
        except OperationError as error:
            raise RolloutError(self._after_failure(error)) from None
        return self._confirm(state)

    def _interrupted(self, *, resume: bool) -> RolloutState | None:
        """Return what is to be resumed."""
        old = None if self._dry else read(self.state_file)
        if old is not None and old.unfinished and not resume:
            raise InputError.one(
                "rollout.unfinished",
                f"a rollout was interrupted while {old.phase} ({self.state_file})",
                "go on with spark-appliance rollout --resume, or take it back with "
                "spark-appliance rollback",
            )
        if resume:
            if old is None or not old.unfinished:
                raise InputError.one(
                    "rollout.nothing",
                    "no rollout was interrupted",
                    "start one: spark-appliance rollout",
                )
            if old.plan_sha256 != lockfile.sha256(self.crew.plan):
                raise InputError.one(
                    "rollout.other-plan",
                    "the interrupted rollout was of another plan",
                    "take it back with spark-appliance rollback, then roll this one out",
                )
            return old
        return None

    def _begin(self, canary: str | None, old: RolloutState | None) -> RolloutState:
        self._prepare()
        if old is not None:
            self.paths = {
                name: node.new for name, node in old.nodes.items() if node.system == "nixos"
            } | self.paths
            return old
        names = [remote.name for remote in self.crew]
        # the last rank by default: a head that does not come back is the greater loss
        chosen = canary or names[-1]
        if chosen not in names:
            raise InputError.one(
                "rollout.unknown-canary",
                f"there is no node {chosen} in the plan",
                f"use one of {', '.join(names)}",
            )
        nodes = self.crew.each(self._node_state)
        return self._save(RolloutState(lockfile.sha256(self.crew.plan), chosen, "prepared", nodes))

    def _prepare(self) -> None:
        nixos, dgx = self._of("nixos"), self._of("dgx-os")
        if nixos.remotes:
            worker = self._nixos()
            self.paths = worker.build()
            worker.copy(self.paths)
        installer = self._installer()
        dgx.each(installer.pull)
        dgx.each(installer.router)

    def _node_state(self, remote: Remote) -> NodeState:
        if remote.plan.system == "nixos":
            running, default = self._nixos().current(remote)
            if running != default and not self._dry:
                raise StepError(
                    remote.name,
                    "look at the system",
                    "it runs another system than the one it boots",
                    "nixos-rebuild switch there, or reboot it, so that there is one to return to",
                )
            return NodeState("nixos", default, self.paths.get(remote.name, ""))
        listing = self._installer().state(remote)
        current = int(listing.get("current", 0))
        if current != int(listing.get("confirmed", current)):
            raise StepError(
                remote.name,
                "look at the generations",
                f"generation {current} is still on trial",
                "take it back with spark-appliance rollback",
            )
        return NodeState("dgx-os", str(current), "")

    def _stop(self, state: RolloutState) -> RolloutState:
        state = self._save(state.at("stopping"))
        stop(self.crew, drain_limit=self.drain_limit)
        # stopping can cut a mount or a start short; the health gate judges what comes after
        self.crew.each(lambda remote: forget_failures(remote, [u.name for u in remote.plan.units]))
        return state

    def _activate(self, state: RolloutState, phase: str, names: list[str]) -> RolloutState:
        if not names:
            return state
        for name in names:  # before anything changes there: a crash must not forget a node
            state = state.with_node(name)
        state = self._save(state.at("canary" if phase == "canary" else "rest"))
        chosen = self.crew.only(names)
        numbers = chosen.each(self._put)
        for name, new in numbers.items():
            state = state.with_node(name, new=new)
        state = self._save(state)
        chosen.each(self._gate)
        return state

    def _put(self, remote: Remote) -> str:
        if remote.plan.system == "nixos":
            path = self.paths[remote.name]
            self._nixos().arm(remote, self.hold)
            self._nixos().test(remote, path)
            return path
        applied = self._installer().apply(remote, adopt=self.adopt, return_after=self.hold)
        return str(applied.generation)

    def _gate(self, remote: Remote) -> None:
        """Look at a node over a connection of its own: the old one might outlive the network."""
        self.crew.board.work(remote.name, "health")
        fresh = replace(remote, host=replace(remote.host, shared=False))
        report = ask(fresh)
        if self._dry:
            return
        if report.plan != lockfile.own_sha256(self.crew.plan, remote.name):
            raise StepError(remote.name, "health", "the node does not have the new plan")
        failed = [unit for unit in report.failed_units if unit != PACK]
        if failed:
            raise StepError(remote.name, "health", f"{', '.join(failed)} failed")
        self.crew.board.done(remote.name, "healthy")

    def _serve(self) -> None:
        make = self.start or (lambda crew: Start(crew, self.evidence))
        make(self.crew).run(self.preflight)

    def _confirm(self, state: RolloutState) -> RolloutState:
        state = self._save(state.at("confirming"))

        def keep(remote: Remote) -> None:
            # nobody winds any more; a whole hold stays for a resume when this takes its longest
            self._wind(remote, KEEP_SECONDS + self.hold, ARM_SECONDS)
            if remote.plan.system == "nixos":
                self._nixos().keep(remote, state.nodes[remote.name].new)
            else:
                self._installer().call(remote, "keep", "confirm")
            self.crew.board.done(remote.name, "confirmed")

        try:
            self.crew.each(keep)
        except FleetError as error:
            raise RolloutError(
                f"{error}\n    the cluster serves the new version, but it is not confirmed "
                "everywhere\n    remedy: spark-appliance rollout --resume, before the nodes "
                f"return by themselves ({self.hold} s)"
            ) from None
        return self._save(state.at("done"))

    def _all_new(self, state: RolloutState) -> bool:
        def has_new(remote: Remote) -> bool:
            node = state.nodes[remote.name]
            if node.system == "nixos":
                return self._nixos().current(remote)[0] == node.new
            return str(self._installer().state(remote).get("current")) == node.new

        return all(self.crew.each(has_new).values())

    # -- the dead man's switch ---------------------------------------------------------------

    @contextmanager
    def _winding(self, state: Callable[[], RolloutState]) -> Iterator[None]:
        """Wind the timers of touched nodes up while something goes on."""
        if self._dry:
            yield
            return
        over = threading.Event()
        sessions = Sessions()
        interval = self.hold / TRIES

        def wind_all() -> None:
            touched = [name for name, node in state().nodes.items() if node.touched]
            self.crew.only(touched).gather(
                # over before the next round: a node that hangs costs no other node its turn
                lambda remote: self._wind(
                    replace(remote, sessions=sessions), self.hold, interval / 2
                )
            )

        def wind() -> None:
            pause = interval
            while not over.wait(pause):
                began = time.monotonic()
                wind_all()
                pause = max(0.0, interval - (time.monotonic() - began))

        thread = threading.Thread(target=wind, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            sessions.close()
            thread.join(timeout=10)

    def _wind(self, remote: Remote, seconds: int, deadline: float) -> None:
        """Set a node's timer to ``seconds``, trying for at most ``deadline`` seconds."""
        try:
            if remote.plan.system == "nixos":
                self._nixos().arm(remote, seconds, deadline=deadline)
            else:
                words = ("hold", "--return-after", str(seconds))
                self._installer().call(remote, "hold", *words, seconds=deadline)
        except (StepError, Stopped):
            # not reached: its timer runs on, and what waits for the node says so
            return

    # -- back --------------------------------------------------------------------------------

    def _after_failure(self, error: OperationError) -> str:
        lines = [str(error)]
        if self._dry:
            return lines[0]
        try:
            self._return(read(self.state_file))
            lines.append("    every node has its old version again and starts it")
        except OperationError as second:
            lines.append(str(second))
            lines.append(
                f"    what could not be reached returns by itself within {self.hold} s; then: "
                "spark-appliance rollback"
            )
        if isinstance(error, ServeError) and error.first is not None:
            lines.append(f"    look at {error.first.node} first")
        return "\n".join(lines)

    def rollback(self) -> RolloutState:
        """Take the last rollout back, finished or not.

        Raises:
            InputError: when there is none, or it was of other nodes; nothing is stopped then.
            FleetError: naming each node that could not be taken back; the command may be
                repeated.
        """
        state = read(self.state_file)
        if state is None or state.phase == "returned":
            raise InputError.one(
                "rollout.nothing",
                "there is no rollout to take back",
                "spark-appliance install puts a plan on the nodes",
            )
        return self._return(state)

    def _return(self, state: RolloutState | None) -> RolloutState:
        if state is None:
            raise RolloutError(f"{self.state_file} is gone: look with spark-appliance status")
        nodes, done = state.nodes, state.phase == "done"
        self._same_nodes(state)
        if any(node.system == "nixos" for node in nodes.values()):
            self._nixos()  # refuses before anything is stopped
        failures: dict[str, OperationError] = {}
        try:
            stop(self.crew, drain_limit=0)
        except FleetError as error:
            failures |= error.failures

        def back(remote: Remote) -> None:
            node = nodes[remote.name]
            self.crew.board.work(remote.name, "returning")
            if node.touched or done:
                self._back(remote, node)
            self.crew.board.done(remote.name, "old version")

        failures |= self.crew.gather(back)[1]
        if failures:
            raise FleetError(failures)
        state = self._save(state.at("returned"))
        installed = self.crew.only(name for name, node in nodes.items() if node.old != NOTHING)
        installed.each(
            lambda remote: systemctl(
                remote, "start again", "start", [TARGET], seconds=60, block=False
            )
        )
        return state

    def _same_nodes(self, state: RolloutState) -> None:
        here, there = {remote.name for remote in self.crew}, set(state.nodes)
        parts = [
            f"{', '.join(sorted(names))} only in {where}"
            for names, where in ((there - here, "the rollout"), (here - there, "the plan"))
            if names
        ]
        if parts:
            raise InputError.one(
                "rollout.other-nodes",
                f"the rollout was of other nodes than the plan has: {'; '.join(parts)}",
                "use the cluster file of that rollout",
                Location(str(self.state_file)),
            )

    def _back(self, remote: Remote, node: NodeState) -> None:
        if node.system == "nixos":
            self._nixos().go_back(remote, node.old)
            return
        listing = self._installer().state(remote)
        current, confirmed = str(listing.get("current")), str(listing.get("confirmed"))
        if current == confirmed == node.old and listing.get("switching") is None:
            if node.old != NOTHING:
                # nothing to take back; a timer that still runs would start the node later
                self._installer().call(remote, "return", "confirm")
            return
        if node.old == NOTHING:
            self._installer().call(remote, "return", "uninstall")
            return
        self._installer().call(remote, "return", "rollback", "--to", node.old, "--adopt")

    # -- parts -------------------------------------------------------------------------------

    @property
    def _dry(self) -> bool:
        return self.crew.rehearsal is not None

    def _save(self, state: RolloutState) -> RolloutState:
        return state if self._dry else write(self.state_file, state)

    def _of(self, system: str) -> Crew:
        return self.crew.only(r.name for r in self.crew if r.plan.system == system)

    def _installer(self) -> Installer:
        return Installer(self._of("dgx-os"), self.root)

    def _nixos(self) -> Nixos:
        if self.flake is None:
            raise InputError.one(
                "rollout.flake",
                "the plan has NixOS nodes, but no flake is given",
                "give it with --flake (the folder with flake.nix)",
            )
        return Nixos(self._of("nixos"), self.flake, self.evidence)
