"""What the scripts in ../scripts are given on Debian guests beside the driver's own names."""

from __future__ import annotations

from pathlib import Path

from harness.fleet import Fleet
from harness.machine import Machine

SCRIPTS = Path(__file__).parents[1] / "scripts"


def engine_process(machine: Machine) -> str:
    """Return the process ID of the engine itself, inside its container."""
    return machine.succeed("pgrep --exact --uid spark python3").strip()


class Stranger:
    """A machine on the management network that belongs to nobody.

    It is a network namespace of a guest with a MAC address of its own; ``parent`` may also be a
    rail, then it is a stranger on the fabric. Three guests are all that two cores can carry.
    """

    def __init__(self, host: Machine, parent: str, address: str) -> None:
        self.name = "stranger"
        self._host = host
        self._space = f"x-{parent}"
        link = f"x{abs(hash(parent)) % 10**6}"
        host.succeed(
            f"ip netns add {self._space}; "
            f"ip link add {link} link {parent} type macvlan mode bridge; "
            f"ip link set {link} netns {self._space}; "
            f"ip netns exec {self._space} sh -c "
            f"'ip addr add {address}/24 dev {link}; ip link set {link} up; ip link set lo up'"
        )

    def _inside(self, command: str) -> str:
        quoted = command.replace("'", "'\\''")
        return f"ip netns exec {self._space} bash -c '{quoted}'"

    def wait_for_unit(self, unit: str) -> None:
        """Do nothing: a namespace is there at once."""
        del unit

    def execute(self, command: str) -> tuple[int, str]:
        """Run a command; returns its exit status and output."""
        return self._host.execute(self._inside(command))

    def succeed(self, command: str) -> str:
        """Run a command that must succeed; returns its output."""
        return self._host.succeed(self._inside(command))

    def fail(self, command: str) -> str:
        """Run a command that must fail; returns its output."""
        return self._host.fail(self._inside(command))

    def leave(self) -> None:
        """Take the namespace away."""
        self._host.succeed(f"ip netns delete {self._space}")


def rails_to(fleet: Fleet, name: str, other: str) -> list[str]:
    """Return the netdevs of a node whose cable leads to another."""
    rails = fleet.node(name).rails
    return [rail.netdev for rail in rails if any(peer.node == other for peer in rail.peers)]


def run_script(fleet: Fleet, name: str, **more: object) -> None:
    """Run one of the scripts on the guests of a fleet."""

    def cut(machine: Machine, netdev: str) -> None:
        fleet.driver.cut(fleet.cable(machine.name, netdev))

    def join(machine: Machine, netdev: str) -> None:
        fleet.driver.join(fleet.cable(machine.name, netdev))

    names: dict[str, object] = {"engine_process": engine_process, "cut": cut, "join": join, **more}
    fleet.driver.run_script(SCRIPTS / f"{name}.py", **names)
