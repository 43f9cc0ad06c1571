"""Three guests and the ``spark-appliance`` of this tree that operates them over OpenSSH."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness import base_image, cluster, engine_image
from harness.driver import Driver
from harness.keys import KeyPair, make_key
from harness.log import say
from harness.machine import Machine
from spark_appliance import lockfile
from spark_appliance.model.plan import NodePlan, Plan

ROOT = Path(__file__).parents[3]
API_KEY = "not-a-secret-in-a-test"  # also in ../scripts/engine.py


@dataclass(frozen=True)
class Done:
    """A command that ended: exit status, both outputs, seconds."""

    status: int
    text: str
    errors: str
    seconds: float

    @property
    def said(self) -> str:
        """Everything that the user sees."""
        return self.text + self.errors

    def ok(self) -> str:
        """Return the output of a command that must have succeeded."""
        assert self.status == 0, self.said
        return self.text

    def failed(self, *words: str) -> str:
        """Return what a command that must have failed said; all ``words`` must be in it."""
        assert self.status != 0, self.said
        for word in words:
            assert word in self.said, f"{word!r} is not in:\n{self.said}"
        return self.said


class Running:
    """A command that goes on."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._began = time.monotonic()

    def kill(self) -> None:
        """End it as a power cut of the control machine would."""
        self.process.kill()
        self.process.communicate()

    def end(self, timeout: float = 900) -> Done:
        """Wait for its end."""
        text, errors = self.process.communicate(timeout=timeout)
        return Done(self.process.returncode, text, errors, time.monotonic() - self._began)


class Fleet:
    """The guests, the plan, and how to reach them. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        self.base = base_image.base_image()
        self.image = engine_image.engine_image(self.base)
        self.plan = cluster.make_plan(self.image)
        self.plan_file = self.write_plan("plan.json", self.plan)
        self._runtime = Path(tempfile.mkdtemp(prefix="spvm-"))  # sockets want a short path
        self.user = make_key(folder / "user")
        self.hosts = {node.name: make_key(folder / f"host-{node.name}") for node in self.plan.nodes}
        ports = {node.name: _free_port() for node in self.plan.nodes}
        self.ssh_config = self._write_ssh(ports)
        specs = cluster.guests(self.plan, self.image, self.user, self.hosts, ports)
        self.driver = Driver(specs, self.base, folder / "guests")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.driver.__exit__(kind, error, trace)
        shutil.rmtree(self._runtime)

    # -- nodes -------------------------------------------------------------------------------

    @property
    def machines(self) -> list[Machine]:
        """All guests in rank order."""
        return self.driver.machines

    def machine(self, name: str) -> Machine:
        """Return a guest by name."""
        return next(machine for machine in self.machines if machine.name == name)

    def node(self, name: str) -> NodePlan:
        """Return a node of the plan."""
        node = self.plan.node(name)
        assert node is not None
        return node

    def cable(self, name: str, netdev: str) -> str:
        """Return the name of the cable in a node's socket, for cut() and join()."""
        return cluster.cable_of(self.node(name), netdev)

    # -- commands ----------------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        """Return the environment of the command line."""
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "SPARK_SSH_CONFIG": str(self.ssh_config),
            "XDG_RUNTIME_DIR": str(self._runtime),
            "COLUMNS": "200",
        }

    def begin(self, *words: str) -> Running:
        """Start ``spark-appliance WORDS``."""
        say("control", f"spark-appliance {' '.join(words)}")
        process = subprocess.Popen(
            [sys.executable, "-m", "spark_appliance", *words],
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return Running(process)

    def run(self, *words: str, timeout: float = 900) -> Done:
        """Run ``spark-appliance WORDS`` to its end."""
        done = self.begin(*words).end(timeout)
        say("control", f"  exit {done.status} after {done.seconds:.1f} s")
        return done

    def do(self, command: str, *options: str, plan: Path | None = None) -> Done:
        """Run a command that takes the plan."""
        return self.run(command, str(plan or self.plan_file), *options)

    def status(self) -> dict[str, Any]:
        """Return what ``status --json`` says, whatever it thinks of it."""
        done = self.do("status", "--json", "--no-gpu")
        assert done.text, done.said
        return dict(json.loads(done.text))

    def newest_run(self) -> Path:
        """Return the run folder of the last command that kept one."""
        folders = [path.parent for path in self.folder.glob("runs/*/commands.jsonl")]
        return max(folders, key=lambda path: path.stat().st_mtime)

    def ssh(self, name: str, command: str, text: str | None = None) -> str:
        """Run a command on a node as its owner would."""
        argv = ["ssh", "-F", str(self.ssh_config), name, command]
        done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def write_plan(self, name: str, plan: Plan) -> Path:
        """Write a plan into the folder of the test."""
        path = self.folder / name
        path.write_text(lockfile.dump(plan), encoding="utf-8")
        return path

    # -- what an owner does before install -------------------------------------------------------

    def set_up(self, name: str) -> None:
        """Format the disk, load the image; on the head put checkpoint and key in their places."""
        machine = self.machine(name)
        device = f"/dev/disk/by-id/nvme-QEMU_NVMe_Ctrl_{cluster.ENGRAM_SERIAL}"
        machine.wait_until_succeeds(f"test -b {device}")
        machine.succeed(f"mkfs.ext4 -q {device}")
        loaded = machine.succeed("podman load <$(readlink -f /dev/disk/by-id/virtio-IMAGE) 2>&1")
        assert self.image.identity in loaded, loaded
        head = self.plan.nodes[0]
        if name != head.name:
            return
        path = self.plan.model.path
        fake = f"spark-engram fake-checkpoint /out --rows-per-column {cluster.ROWS_PER_COLUMN}"
        machine.succeed(
            f"mkdir -p {path} /etc/spark && podman run --rm --network none -v {path}:/out "
            f"{self.image.identity} {fake}"
        )
        machine.succeed(f"(umask 077; printf {API_KEY} >{cluster.KEY_FILE})")

    def _write_ssh(self, ports: Mapping[str, int]) -> Path:
        known = self.folder / "known_hosts"
        lines = [f"{name} {key.public.rsplit(' ', 1)[0]}\n" for name, key in self.hosts.items()]
        known.write_text("".join(lines))
        blocks = [
            f"Host {name}\n  HostName 127.0.0.1\n  Port {port}\n  HostKeyAlias {name}\n"
            for name, port in ports.items()
        ]
        blocks.append(
            f"Host *\n  User root\n  IdentityFile {self.user.path}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {known}\n  StrictHostKeyChecking yes\n"
        )
        path = self.folder / "ssh_config"
        path.write_text("".join(blocks))
        return path


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


__all__ = ["API_KEY", "Done", "Fleet", "KeyPair", "Running"]
