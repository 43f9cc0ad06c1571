"""All guests of a test, their cables, and the functions that a test script is given."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.base_image import BaseImage
from harness.cables import Cable
from harness.log import say
from harness.machine import Machine
from harness.spec import Spec


class Driver:
    """Guests; leaving the context switches them off."""

    def __init__(self, specs: Sequence[Spec], image: BaseImage, folder: Path) -> None:
        if folder.exists():
            shutil.rmtree(folder)
        members: dict[str, int] = {}
        for spec in specs:
            for nic in spec.nics:
                members[nic.cable] = members.get(nic.cable, 0) + 1
        self._cables = {name: Cable(count) for name, count in members.items()}
        self._members: dict[str, list[Machine]] = {name: [] for name in members}
        ends = {name: iter(cable.ends) for name, cable in self._cables.items()}
        self.machines: list[Machine] = []
        for spec in specs:
            sockets = {at: next(ends[nic.cable]).fileno() for at, nic in enumerate(spec.nics)}
            machine = Machine(spec, image, folder / spec.name, sockets)
            self.machines.append(machine)
            for nic in spec.nics:
                self._members[nic.cable].append(machine)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for machine in self.machines:
            if machine.running:
                machine.crash()
        for cable in self._cables.values():
            cable.close()

    def start_all(self) -> None:
        """Switch every guest on; returns at once."""
        for machine in self.machines:
            machine.start()

    @contextlib.contextmanager
    def subtest(self, name: str) -> Iterator[None]:
        """Say what goes on and how long it took."""
        began = time.monotonic()
        say("subtest", name)
        try:
            yield
        except BaseException:
            say("subtest", f"{name}: FAILED after {time.monotonic() - began:.1f} s")
            raise
        say("subtest", f"{name}: {time.monotonic() - began:.1f} s")

    def cut(self, cable: str) -> None:
        """Pull a cable out at all its ends."""
        say("cable", f"{cable} is cut")
        for machine in self._members[cable]:
            machine.plug(cable, connected=False)

    def join(self, cable: str) -> None:
        """Put a cable in again."""
        say("cable", f"{cable} is back")
        for machine in self._members[cable]:
            machine.plug(cable, connected=True)

    def run_script(self, path: Path, **names: object) -> None:
        """Run a test script as the NixOS driver does: machines and functions are globals."""
        scope: dict[str, object] = {
            **{machine.name: machine for machine in self.machines},
            "machines": self.machines,
            "start_all": self.start_all,
            "subtest": self.subtest,
            **names,
        }
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), scope)  # noqa: S102
