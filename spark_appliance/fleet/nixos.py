"""NixOS nodes: build here, copy, activate there, and only later make it the boot default.

The steps are those of ``nixos-rebuild --target-host``, taken apart: everything is built once and
before anything stops, the very same store path is tried and later kept, and a timer on the node
goes back to the boot default unless somebody who reached the node takes it away. What runs on the
node is in ``nixossteps``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from spark_appliance import ssh
from spark_appliance.fleet import nixossteps
from spark_appliance.fleet.crew import Crew
from spark_appliance.fleet.evidence import RunFolder
from spark_appliance.fleet.local import run_local
from spark_appliance.fleet.remote import Remote, StepError

BUILD_SECONDS: Final = 6 * 3600.0
COPY_SECONDS: Final = 2 * 3600.0
ACTIVATE_SECONDS: Final = 600.0
ARM_SECONDS: Final = 60.0

_STORE: Final = "/nix/store/"


@dataclass(frozen=True, slots=True)
class Nixos:
    """Works on the NixOS nodes of a crew, from the flake that has them."""

    crew: Crew
    flake: str
    evidence: RunFolder | None = None

    def build(self) -> dict[str, str]:
        """Build every node's system; returns the store paths by node.

        One call a node: the order in which ``nix build`` prints several results is not promised.

        Raises:
            StepError: with nix's last line.
            InputError: when ``copy`` could not be given the SSH configuration.
        """
        ssh.nix_options()  # refuses before hours of building
        paths = {}
        for remote in self.crew:
            self.crew.board.work(remote.name, "building")
            toplevel = f"nixosConfigurations.{remote.name}.config.system.build.toplevel"
            argv = ["nix", "--extra-experimental-features", "nix-command flakes", "build"]
            argv += ["--no-link", "--print-out-paths", "--", f"{self.flake}#{toplevel}"]
            text = run_local(
                self.crew,
                self.evidence,
                f"build {remote.name}",
                argv,
                seconds=BUILD_SECONDS,
                rehearsed=f"{_STORE}HASH-nixos-system-{remote.name}\n",
            )
            path = text.strip()
            if not path.startswith(_STORE) or "\n" in path:
                raise StepError("control", f"build {remote.name}", "nix gave no single store path")
            paths[remote.name] = path
            self.crew.board.done(remote.name, "built")
        return paths

    def copy(self, paths: dict[str, str]) -> None:
        """Copy each system to its node, all at once.

        Raises:
            FleetError: naming each node that failed.
            InputError: when SPARK_SSH_CONFIG cannot be given to Nix.
        """
        env = {"NIX_SSHOPTS": ssh.nix_options()}

        def work(remote: Remote) -> None:
            self.crew.board.work(remote.name, "copying")
            argv = ["nix", "--extra-experimental-features", "nix-command", "copy"]
            argv += ["--to", f"ssh-ng://{remote.host.destination}", "--", paths[remote.name]]
            run_local(
                self.crew,
                self.evidence,
                f"copy to {remote.name}",
                argv,
                seconds=COPY_SECONDS,
                env=env,
            )
            self.crew.board.done(remote.name, "copied")

        self.crew.each(work)

    def current(self, remote: Remote) -> tuple[str, str]:
        """Return the running system and the boot default.

        Raises:
            StepError: when the node cannot be asked.
        """
        argv = ["readlink", "-f", "/run/current-system", nixossteps.PROFILE]
        text = remote.run("look at the system", argv, seconds=30, rehearsed="old\nold\n").stdout
        running, default = (*text.splitlines(), "", "")[:2]
        return running, default

    def arm(self, remote: Remote, seconds: int, *, deadline: float = ARM_SECONDS) -> None:
        """Arm the timer that goes back to the boot default; an older one is replaced.

        It fires after ``seconds``; arming may take ``deadline`` seconds.

        Raises:
            StepError: when it cannot be armed.
        """
        text = nixossteps.arm(seconds)
        remote.run("arm the return", ["sh", "-s"], seconds=deadline, root=True, text=text)

    def test(self, remote: Remote, path: str) -> None:
        """Activate a system without making it the boot default.

        Raises:
            StepError: when the activation fails.
        """
        self.crew.board.work(remote.name, "activating")
        argv = nixossteps.activate(path)
        remote.run("activate", argv, seconds=ACTIVATE_SECONDS, root=True)

    def keep(self, remote: Remote, path: str) -> None:
        """Make a system the boot default and take the timer away.

        Raises:
            StepError: when it fails; the timer is taken away only after the rest worked.
        """
        text = nixossteps.keep(path)
        remote.run("keep", ["sh", "-s"], seconds=ACTIVATE_SECONDS, root=True, text=text)

    def go_back(self, remote: Remote, path: str) -> None:
        """Return to an earlier system now, for good.

        Raises:
            StepError: when it fails; an armed timer stays armed then.
        """
        self.test(remote, path)
        self.keep(remote, path)
