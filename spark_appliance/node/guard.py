"""``guard``: kill the engine before memory runs out.

On unified memory an allocation that fails inside the driver does not end in an OOM kill: the
host answers pings and nothing else until the power is cut (NVIDIA/open-gpu-kernel-modules#1358),
and memory can fall from 28 to 6 GiB in 12 s (vllm#56824). So the kill is a single write to a
cgroup file whose name is known beforehand; everything else comes after it.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from spark_appliance.names import CONTAINER_SLICE, ENGINE
from spark_appliance.node.errors import NodeError
from spark_appliance.node.files import write_json
from spark_appliance.node.journal import Journal, gib
from spark_appliance.node.memory import MemInfo
from spark_appliance.node.notify import Notifier
from spark_appliance.node.plan import NodeContext
from spark_appliance.node.process import Runner
from spark_appliance.node.systemctl import kill_argv, show

READY_FILE: Final = "/run/spark/ready"
STATE_FILE: Final = "/run/spark/guard.json"
CGROUPS: Final = "/sys/fs/cgroup"

RESOLVE_EVERY: Final = 10
"""Samples between attempts to find the engine's cgroup while it is not known."""

KILL_SECONDS: Final = 20.0

_MCL_CURRENT, _MCL_FUTURE = 1, 2  # sys/mman.h, the same on aarch64 and x86_64


@dataclass(slots=True)
class Killer:
    """Knows where the engine's processes are and kills them.

    ``container`` is the engine's container where it runs in one; ``runtime`` its program.
    """

    context: NodeContext
    runner: Runner
    container: str | None = None
    runtime: str = "docker"
    _groups: list[str] = field(default_factory=list)

    def resolve(self) -> bool:
        """Look up the cgroups to kill; returns whether the engine's is known."""
        groups = []
        if self.container is not None:
            # the container's processes are not in the unit's cgroup; exec puts them here
            groups.append(str(self.context.path(f"{CGROUPS}/{CONTAINER_SLICE}/cgroup.kill")))
        try:
            state = show(self.runner, [ENGINE]).get(ENGINE)
        except NodeError:
            state = None
        if state is not None and state.cgroup:
            groups.append(str(self.context.path(f"{CGROUPS}{state.cgroup}/cgroup.kill")))
        self._groups = groups
        return self.known

    @property
    def known(self) -> bool:
        """Whether a cgroup of the engine is there."""
        return any(Path(group).exists() for group in self._groups)

    def kill(self, *, programs: bool) -> list[str]:
        """Kill the engine the fastest way that works; returns what was killed, for the log.

        ``programs`` allows to start programs where writing to the known cgroups killed nothing.
        """
        killed = self._kill_groups()
        if not programs:
            return killed
        if not killed and self.resolve():
            killed = self._kill_groups()
        if self.container is not None and not any(CONTAINER_SLICE in name for name in killed):
            killed += self._try([self.runtime, "kill", "--signal=KILL", self.container])
        if not killed:
            killed += self._try(kill_argv(ENGINE))
        return killed

    def _kill_groups(self) -> list[str]:
        killed = []
        for group in self._groups:
            try:
                handle = os.open(group, os.O_WRONLY | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                os.write(handle, b"1")
                killed.append(f"cgroup {Path(group).parent}")
            except OSError:
                continue
            finally:
                os.close(handle)
        return killed

    def _try(self, argv: list[str]) -> list[str]:
        try:
            done = self.runner(argv, seconds=KILL_SECONDS)
        except NodeError:
            return []
        return [] if done.status else [" ".join(argv)]


@dataclass(slots=True)
class Guard:
    """Samples MemAvailable and acts. ``wait`` lets a time pass and says whether to stop."""

    context: NodeContext
    killer: Killer
    journal: Journal
    notifier: Notifier
    wait: Callable[[float], bool]
    _armed: bool = False
    _below: int = 0
    _killed: bool = False

    def run(self) -> None:
        """Sample until told to stop.

        Raises:
            NodeError: when the kernel does not say how much memory is available.
        """
        thresholds = self.context.node.view("guard")
        start, steady = thresholds.integer("start_bytes"), thresholds.integer("steady_bytes")
        interval = thresholds.integer("interval")
        ready = str(self.context.path(READY_FILE))
        count = 0
        with MemInfo(self.context.path("/proc/meminfo")) as meminfo:
            while True:
                # os.stat costs no path objects; the sample must stay cheap
                serving = os.access(ready, os.F_OK)
                self._sample(meminfo, steady if serving else start, serving=serving)
                if count % RESOLVE_EVERY == 0 and not self.killer.known:
                    self.killer.resolve()
                count += 1
                self.notifier.alive()
                if self.wait(interval):
                    return

    def _sample(self, meminfo: MemInfo, threshold: int, *, serving: bool) -> None:
        available = meminfo.available()
        if available >= threshold:
            if not self._armed:
                self._armed = True
                text = f"armed: MemAvailable {gib(available)}, threshold {gib(threshold)}"
                self.notifier.ready(text)
                self.journal.notice(text)
            if self._below:
                self._below, self._killed = 0, False
                self.journal.notice(f"MemAvailable is back at {gib(available)}")
            return
        killed = self.killer.kill(programs=self._below % RESOLVE_EVERY == 0)
        self._below += 1
        # say it once: when memory first falls below, and for every engine that is killed
        news = self._below == 1 or (killed and not self._killed)
        self._killed = bool(killed)
        if not news:
            return
        phase = "serving" if serving else "starting"
        what = f"killed {', '.join(killed)}" if killed else "no engine runs, nothing to kill"
        text = (
            f"MemAvailable {gib(available)} is below the threshold {gib(threshold)} ({phase}): "
            f"{what}"
        )
        if killed:
            self.journal.error(text)
        else:
            self.journal.warning(text)
        self.notifier.status(text)
        self._record(available, threshold, killed)

    def _record(self, available: int, threshold: int, killed: list[str]) -> None:
        try:
            write_json(
                self.context.path(STATE_FILE),
                {
                    "time": time.time(),
                    "available_bytes": available,
                    "threshold_bytes": threshold,
                    "killed": killed,
                },
            )
        except NodeError as error:
            self.journal.warning(str(error))


def lock_memory(journal: Journal) -> None:
    """Keep this process in memory: reading its code back from disk is slow when memory is short."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(_MCL_CURRENT | _MCL_FUTURE):
        reason = os.strerror(ctypes.get_errno())
        journal.warning(f"memory is not locked ({reason}): set LimitMEMLOCK=infinity in the unit")
