"""DGX OS nodes: the engine's image by digest, and this project's files as a generation.

Everything goes over one SSH session: a shell script that carries the node program and the
bundle, both as text on its standard input.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from spark_appliance import node_zipapp
from spark_appliance.dgxos.render import ROUTER_FOLDER, bundle
from spark_appliance.fleet.crew import Crew
from spark_appliance.fleet.remote import Remote, StepError

PULL_SECONDS: Final = 3600.0
"""An engine image has some 20 GB."""

ROUTER_SECONDS: Final = 900.0
APPLY_SECONDS: Final = 300.0
UNINSTALL_SECONDS: Final = 600.0
FOLDER: Final = "var/lib/spark/generations"
MODULE: Final = "spark_appliance.node.generations"

_CONFLICT_STATUS: Final = 4

_SCRIPT: Final = """\
set -eu
umask 022
folder="{root}{folder}"
mkdir -p -- "$folder"
base64 -d > "$folder/incoming.pyz" <<'SPARK_END'
{program}
SPARK_END
sync -- "$folder/incoming.pyz"
{bundle}[ -e "$folder/program.pyz" ] || cp -- "$folder/incoming.pyz" "$folder/program.pyz"
PYTHONPATH="$folder/incoming.pyz" python3 -m {module} --root {root} {command}
[ ! -e "$folder/incoming.pyz" ] || mv -f -- "$folder/incoming.pyz" "$folder/program.pyz"
"""
"""program.pyz is what the timer and the boot call: it is replaced once the new one has worked."""

_BUNDLE: Final = """\
(umask 077; cat > "$folder/incoming.json") <<'SPARK_END'
{text}
SPARK_END
"""


_ROUTER_SCRIPT: Final = """\
set -eu
version=$("$1/bin/python3" -c \
  'import importlib.metadata as m, sys; print(m.version(sys.argv[1]))' "$2" 2>/dev/null || true)
[ "$version" != "$3" ] || exit 0
rm -rf -- "$1.new"
python3 -m venv "$1.new"
"$1.new/bin/python3" -m pip install --quiet --only-binary :all: "$2==$3"
rm -rf -- "$1"
mv -- "$1.new" "$1"
"""
"""A new environment is complete before it takes the place of the old one. Only its interpreter is
used, which finds the moved folder; the console scripts in it would not."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What an install did on a node."""

    generation: int
    changes: tuple[str, ...]
    warnings: tuple[str, ...]


def real_root(_: Remote) -> str:
    """Return the root of a real node; tests give each node a folder."""
    return "/"


@dataclass(frozen=True, slots=True)
class Installer:
    """Installs on the DGX OS nodes of a crew. ``root`` gives a node's prefix of every path."""

    crew: Crew
    root: Callable[[Remote], str] = real_root

    def diff(self) -> dict[str, dict[str, Any]]:
        """Return by node what an install would change; nothing is changed.

        Raises:
            FleetError: naming each node that cannot be asked.
        """
        return self.crew.each(lambda remote: self._send(remote, "compare files", ["diff"]))

    def install(self, *, adopt: bool = False) -> dict[str, Applied]:
        """Pull the image and apply the files on every node.

        Raises:
            FleetError: naming each node that failed and why.
        """

        def work(remote: Remote) -> Applied:
            self.pull(remote)
            self.router(remote)
            return self.apply(remote, adopt=adopt)

        return self.crew.each(work)

    def pull(self, remote: Remote) -> None:
        """Make sure that the image is on the node.

        Raises:
            StepError: when it cannot be had.
        """
        image = self.crew.plan.image
        if image is None:
            raise StepError(
                remote.name,
                "look for the image",
                "the plan names no image for the engine",
                "add image: {reference, digest} to the cluster file and render again",
            )
        runtime = image.runtime
        self.crew.board.work(remote.name, "image", image.digest[:19])
        look = [runtime, "image", "inspect", "--format", "{{.Id}}", image.name]
        if remote.run("look for the image", look, seconds=60, root=True, check=False).status == 0:
            return
        if image.reference is None:
            raise StepError(
                remote.name,
                "look for the image",
                f"{image.name} is not on the node",
                f"load it there ({image.runtime} load), or give image.reference to pull it",
            )
        self.crew.board.work(remote.name, "pulling the image", image.digest[:19])
        pull = [runtime, "pull", "--quiet", image.name]
        remote.run("pull the image", pull, seconds=PULL_SECONDS, root=True)

    def router(self, remote: Remote) -> None:
        """Make sglang-router's virtual environment on the head of a plan that has a router.

        The node's own pip configuration says where packages come from.

        Raises:
            StepError: when it cannot be made.
        """
        router = self.crew.plan.router
        if router is None or remote.plan.rank != 0:
            return
        self.crew.board.work(remote.name, "router", f"{router.package} {router.version}")
        remote.run(
            "install the router",
            ["sh", "-s", "--", ROUTER_FOLDER, router.package, router.version],
            seconds=ROUTER_SECONDS,
            root=True,
            text=_ROUTER_SCRIPT,
        )

    def apply(
        self, remote: Remote, *, adopt: bool = False, return_after: int | None = None
    ) -> Applied:
        """Apply the files; with ``return_after`` they stay on trial until ``confirm``.

        Raises:
            StepError: when foreign files are in the way or a step fails.
        """
        self.crew.board.work(remote.name, "writing files")
        words = ["apply", *(["--adopt"] if adopt else [])]
        words += [] if return_after is None else ["--return-after", str(return_after)]
        answer = self._send(remote, "apply files", words)
        applied = Applied(
            int(answer.get("current", 0)),
            tuple(str(change["path"]) for change in answer.get("changes", [])),
            tuple(map(str, answer.get("warnings", []))),
        )
        count = len(applied.changes)
        self.crew.board.done(
            remote.name,
            f"generation {applied.generation}, "
            + (f"{count} files changed" if count else "nothing to change"),
        )
        return applied

    def state(self, remote: Remote) -> dict[str, Any]:
        """Return which generations a node has; one without any has number 0.

        Raises:
            StepError: when it cannot be asked.
        """
        return self._send(remote, "look at the generations", ["list"], with_bundle=False)

    def call(
        self, remote: Remote, step: str, *words: str, seconds: float = APPLY_SECONDS
    ) -> dict[str, Any]:
        """Run the program that is on the node already (confirm, hold, return, rollback).

        ``seconds`` is its deadline.

        Raises:
            StepError: when it fails.
        """
        root = self.root(remote)
        program = f"{root}{FOLDER}/program.pyz"
        argv = ["env", f"PYTHONPATH={program}", "python3", "-m", MODULE, "--root", root]
        data = remote.json(
            step, [*argv, *words], seconds=seconds, root=True, rehearsed={"current": 0}
        )
        return data if isinstance(data, dict) else {}

    def uninstall(self, *, purge: bool = False) -> dict[str, Applied]:
        """Remove every file of ours; ``purge`` also compiled kernels and packed Engram rows.

        Raises:
            FleetError: naming each node that failed.
        """

        def work(remote: Remote) -> Applied:
            self.crew.board.work(remote.name, "removing files")
            answer = self._send(remote, "remove files", ["uninstall"], with_bundle=False)
            if self.root(remote) == "/":
                self._remove_user(remote)
            if self.crew.plan.router is not None and remote.plan.rank == 0:
                argv = ["rm", "-rf", "--", ROUTER_FOLDER]
                remote.run("remove the router", argv, seconds=120, root=True)
            if purge:
                self._purge(remote)
            changes = tuple(str(change["path"]) for change in answer.get("changes", []))
            self.crew.board.done(remote.name, f"{len(changes)} files removed")
            return Applied(0, changes, ())

        return self.crew.each(work)

    def _send(
        self, remote: Remote, step: str, words: list[str], *, with_bundle: bool = True
    ) -> dict[str, Any]:
        text = ""
        root = self.root(remote)
        program = node_zipapp.build()
        if with_bundle:
            data = bundle(self.crew.plan, remote.plan, program)
            text = _BUNDLE.format(text=json.dumps(data))
            words = [*words, "--bundle", f"{root}{FOLDER}/incoming.json"]
        script = _SCRIPT.format(
            root=shlex.quote(root),
            folder=FOLDER,
            program=base64.encodebytes(program).decode().strip(),
            bundle=text,
            module=MODULE,
            command=shlex.join(words),
        )
        answer = remote.run(
            step,
            ["sh", "-s"],
            seconds=UNINSTALL_SECONDS if words[0] == "uninstall" else APPLY_SECONDS,
            root=True,
            check=False,
            text=script,
            rehearsed='{"current": 0, "changes": []}',
        )
        if answer.status != 0:
            raise _failure(remote, step, answer.stderr or answer.stdout, answer.status)
        try:
            parsed = json.loads(answer.stdout)
        except ValueError:
            raise StepError(
                remote.name, step, "the answer is no JSON", "the node needs Python 3.11 or newer"
            ) from None
        return parsed if isinstance(parsed, dict) else {}

    def _remove_user(self, remote: Remote) -> None:
        # only the system user that sysusers made: no login, no home
        script = (
            "entry=$(getent passwd spark) || exit 0\n"
            'case "$entry" in\n'
            "  */nologin|*/false) userdel spark ;;\n"
            "esac\n"
        )
        remote.run("remove the user", ["sh", "-s"], seconds=60, root=True, text=script)

    def _purge(self, remote: Remote) -> None:
        paths = [remote.plan.cache_directory]
        if remote.plan.engram is not None:
            folder = remote.plan.engram.directory
            for file in remote.plan.engram.files:
                for suffix in ("", ".receipt.json", ".partial", ".partial.journal"):
                    paths.append(f"{folder}/{file.name}{suffix}")
        argv = ["rm", "-rf", "--", *(f"{self.root(remote).rstrip('/')}{path}" for path in paths)]
        remote.run("remove caches and packed files", argv, seconds=300, root=True)


def _failure(remote: Remote, step: str, said: str, status: int) -> StepError:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    reason = lines[-1].removeprefix("spark-generations: error: ") if lines else f"status {status}"
    remedy = ""
    if status == _CONFLICT_STATUS:
        remedy = f"spark-appliance install --diff --node {remote.name}, then --adopt if it is right"
    elif "python3: not found" in said or "python3: command not found" in said:
        remedy = "install Python 3.11 or newer on the node"
    elif "a password is required" in said:
        remedy = "let your user use sudo there without a password, or log in as root"
    return StepError(remote.name, step, reason, remedy)
