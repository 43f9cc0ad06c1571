"""The fleet of ``fleet_world`` with NixOS nodes: a system is a folder, Nix builds and copies it.

A node's files ``current-system`` and ``profile`` are what runs and what boots. A script on standard
input goes to the real shell; only the store paths that it runs lead into the node's folder.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from fleet_world import _LOG, World, make_plan, write_program

from spark_appliance import lockfile
from spark_appliance.fleet.nixossteps import BIN, PROFILE
from spark_appliance.model.plan import Plan

_NIX = """\
#!/bin/sh
printf '%s\\n' "NIX_SSHOPTS=$NIX_SSHOPTS nix $*" >> "$FAKE_FLEET/nix.log"
for last; do :; done
case " $* " in
  *" build "*)
    name=${last#*nixosConfigurations.}
    cat "$FAKE_FLEET/built/${name%%.*}" ;;
  *" copy "*)
    for word; do case "$word" in ssh-ng://*) node=${word#ssh-ng://} ;; esac; done
    cp -r "$FAKE_FLEET$last" "$FAKE_FLEET/nodes/$node/nix/store/" ;;
esac
"""

_SH = """\
#!/bin/sh
[ "$1" = -s ] || exec /bin/sh "$@"
text=$(cat)
printf '%s\\n' "$text" | sed "s#^/nix/store/#$FAKE_ROOT&#" | /bin/sh -s
"""

_SYSTEMD_RUN = f"""\
#!/bin/sh
{_LOG}case " $* " in
  *" --on-active="*)
    if [ -e "$FAKE_ROOT/active/spark-return.timer" ]; then
      echo "Unit spark-return.timer was already loaded." >&2
      exit 1
    fi
    for last; do :; done
    mkdir -p "$FAKE_ROOT/active"
    echo active > "$FAKE_ROOT/active/spark-return.timer"
    printf '%s\\n' "$last" > "$FAKE_ROOT/return" ;;
  *)
    while [ "$1" != -- ]; do shift; done
    program=$FAKE_ROOT$2
    shift 2
    exec "$program" "$@" ;;
esac
"""

_NIX_ENV = f"""\
#!/bin/sh
{_LOG}[ -e "$FAKE_ROOT/fail-nix-env" ] && {{ echo "error: disk full" >&2; exit 1; }}
[ -d "$FAKE_ROOT$4" ] || exit 1
printf '%s\\n' "$4" > "$FAKE_ROOT/profile"
"""

_READLINK = f"""\
#!/bin/sh
{_LOG}[ "$*" = "-f /run/current-system {PROFILE}" ] || exit 1
exec cat "$FAKE_ROOT/current-system" "$FAKE_ROOT/profile"
"""

_SWITCH = """\
#!/bin/sh
folder=${0%/bin/*}
system=/nix/store/${folder##*/}
printf '%s\\n' "$system/bin/switch-to-configuration $*" >> "$FAKE_ROOT/calls"
[ "$1" = test ] || exit 0
printf '%s\\n' "$system" > "$FAKE_ROOT/current-system"
cp "$folder/plan.json" "$FAKE_ROOT/etc/spark/plan.json"
if [ -e "$folder/broken" ]; then echo "units failed" >&2; exit 4; fi
"""


def system_of(label: str, name: str) -> str:
    """Return the store path of a node's system."""
    return f"/nix/store/{label}-nixos-system-{name}"


@dataclass(frozen=True)
class Nodes:
    """The NixOS nodes of a world."""

    world: World

    def build(self, plan: Plan, label: str) -> None:
        """Make the systems of a plan what ``nix build`` gives from now on."""
        (self.world.base / "built").mkdir(exist_ok=True)
        for node in plan.nodes:
            path = system_of(label, node.name)
            folder = self.world.base / path.lstrip("/")
            (folder / "bin").mkdir(parents=True)
            (folder / "plan.json").write_text(lockfile.dump_own(plan, node.name))
            write_program(folder / "bin/switch-to-configuration", _SWITCH)
            (self.world.base / "built" / node.name).write_text(f"{path}\n")

    def nix_log(self) -> list[str]:
        path = self.world.base / "nix.log"
        return path.read_text().splitlines() if path.exists() else []

    def running(self) -> list[str]:
        """Return the label of the system that runs, by node."""
        return self._labels("current-system")

    def booting(self) -> list[str]:
        """Return the label of the system that boots, by node."""
        return self._labels("profile")

    def timers(self) -> list[bool]:
        """Return whether the timer is armed, by node."""
        names = [node.name for node in self.world.plan.nodes]
        return [(self.world.node(name) / "active/spark-return.timer").exists() for name in names]

    def fire(self, name: str) -> None:
        """Let a node's timer fire: run what systemd was given."""
        node = self.world.node(name)
        (node / "active/spark-return.timer").unlink()
        system = (node / "profile").read_text().strip()
        text = (node / "return").read_text().replace(f"{BIN}/", f"{self.world.base}/bin/")
        text = text.replace(PROFILE, f"{node}{system}")
        path = f"{self.world.base / 'bin'}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "FAKE_ROOT": str(node), "PATH": path}
        subprocess.run(["/bin/sh", "-c", text], env=env, check=True, timeout=60)

    def _labels(self, file: str) -> list[str]:
        found = []
        for node in self.world.plan.nodes:
            path = (self.world.node(node.name) / file).read_text().strip()
            label, _, name = Path(path).name.partition("-nixos-system-")
            assert name == node.name
            found.append(label)
        return found


def nixos_plan(port: int = 8888) -> Plan:
    return make_plan(system="nixos", api={"port": port, "key_file": "/etc/spark/api-key"})


def add_nixos(world: World) -> Nodes:
    """Give each node of the world the system ``old``, which runs, boots and serves."""
    write_program(world.base / "here/nix", _NIX)
    for name, text in {
        "sh": _SH,
        "systemd-run": _SYSTEMD_RUN,
        "nix-env": _NIX_ENV,
        "readlink": _READLINK,
    }.items():
        write_program(world.base / "bin" / name, text)
    nodes = Nodes(world)
    nodes.build(world.plan, "old")
    world.put_plan()
    for node in world.plan.nodes:
        path = system_of("old", node.name)
        store = world.node(node.name) / "nix/store"
        store.mkdir(parents=True)
        (world.base / path.lstrip("/")).rename(store / Path(path).name)
        for file in ("current-system", "profile"):
            world.set(node.name, file, f"{path}\n")
        world.set(node.name, "active/spark.target", "active")
    return nodes


__all__ = ["Nodes", "add_nixos", "nixos_plan", "system_of"]
