"""Several nodes at once: every failure is kept with its node, an interrupt ends all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TypeVar

from spark_appliance.errors import InputError, OperationError
from spark_appliance.fleet.board import Board
from spark_appliance.fleet.evidence import RunFolder
from spark_appliance.fleet.remote import Rehearsal, Remote, StepError, Stopped
from spark_appliance.model.plan import Plan
from spark_appliance.process import Sessions
from spark_appliance.ssh import Host

T = TypeVar("T")


class FleetError(OperationError):
    """One or more nodes failed; ``failures`` has the reason of each by name."""

    def __init__(self, failures: dict[str, OperationError]) -> None:
        self.failures = failures
        super().__init__("\n".join(str(error) for error in failures.values()))


@dataclass(frozen=True, slots=True)
class Crew:
    """The nodes that a command works on, in rank order."""

    plan: Plan
    remotes: tuple[Remote, ...]
    board: Board
    sessions: Sessions
    rehearsal: Rehearsal | None = None

    @classmethod
    def of(
        cls,
        plan: Plan,
        *,
        nodes: Sequence[str] = (),
        evidence: RunFolder | None = None,
        board: Board | None = None,
        rehearsal: Rehearsal | None = None,
    ) -> Crew:
        """Return the crew of a plan, or of some of its nodes.

        Raises:
            InputError: for a name that is not in the plan.
        """
        for name in nodes:
            if plan.node(name) is None:
                raise InputError.one(
                    "fleet.unknown-node",
                    f"there is no node {name} in the plan",
                    f"use one of {', '.join(node.name for node in plan.nodes)}",
                )
        sessions = Sessions()
        remotes = tuple(
            Remote(node, Host(node.ssh), evidence, sessions, rehearsal)
            for node in plan.nodes
            if not nodes or node.name in nodes
        )
        names = [remote.name for remote in remotes]
        return cls(plan, remotes, board or Board(names), sessions, rehearsal)

    def __iter__(self) -> Iterator[Remote]:
        return iter(self.remotes)

    def only(self, names: Iterable[str]) -> Crew:
        """Return the crew of some of these nodes."""
        wanted = set(names)
        return replace(self, remotes=tuple(r for r in self.remotes if r.name in wanted))

    @property
    def head(self) -> Remote | None:
        """The node of rank 0, when it is among these."""
        return next((remote for remote in self.remotes if remote.plan.rank == 0), None)

    def get(self, name: str) -> Remote:
        """Return a node by name, which must be among these."""
        return next(remote for remote in self.remotes if remote.name == name)

    def groups(self, order: Sequence[Sequence[str]]) -> list[Crew]:
        """Return the nodes in groups of an order of the plan, empty ones left out."""
        crews = [self.only(group) for group in order]
        return [crew for crew in crews if crew.remotes]

    def gather(self, work: Callable[[Remote], T]) -> tuple[dict[str, T], dict[str, OperationError]]:
        """Run ``work`` on all nodes at once; returns results and failures by node.

        A KeyboardInterrupt ends every session before it goes on.
        """
        results: dict[str, T] = {}
        failures: dict[str, OperationError] = {}
        if self.rehearsal is not None:  # a dry run prints in one order
            return {remote.name: work(remote) for remote in self.remotes}, failures
        with ThreadPoolExecutor(max_workers=max(1, len(self.remotes))) as pool:
            try:
                futures: dict[Future[T], str] = {
                    pool.submit(work, remote): remote.name for remote in self.remotes
                }
                pending = set(futures)
                while pending:
                    # bounded, so that an interrupt that came just before is seen
                    done, pending = wait(pending, 0.2, return_when=FIRST_COMPLETED)
                    for future in done:
                        name = futures[future]
                        try:
                            results[name] = future.result()
                        except Stopped:
                            failures[name] = StepError(name, "stopped", "ended from here")
                        except OperationError as error:
                            failures[name] = error
                            self.board.fail(name, _short(error))
            except BaseException:
                self.sessions.close()
                raise
        ordered = [remote.name for remote in self.remotes]
        return (
            {name: results[name] for name in ordered if name in results},
            {name: failures[name] for name in ordered if name in failures},
        )

    def each(self, work: Callable[[Remote], T]) -> dict[str, T]:
        """Run ``work`` on all nodes at once and wait for all.

        Raises:
            FleetError: when any failed, after all ended.
        """
        results, failures = self.gather(work)
        if failures:
            raise FleetError(failures)
        return results


def _short(error: OperationError) -> str:
    if isinstance(error, StepError):
        return f"{error.step}: {error.reason}"
    return str(error).splitlines()[0]
