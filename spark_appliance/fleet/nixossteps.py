"""What runs on a NixOS node during a rollout: the commands as text, without how they get there.

``nixos.py`` sends them over SSH; the VM test of the rollout runs the same ones in its machines.
"""

from __future__ import annotations

import shlex
from typing import Final

from spark_appliance.names import TARGET

PROFILE: Final = "/nix/var/nix/profiles/system"
"""What boots by default."""

BIN: Final = "/run/current-system/sw/bin"
TIMER: Final = "spark-return"


def arm(seconds: int) -> str:
    """Return the script that arms the timer which goes back to the boot default by itself.

    An older one is replaced: arming again winds it up.
    """
    back = (
        f"{BIN}/systemctl stop {TARGET}; "
        f"{PROFILE}/bin/switch-to-configuration test; "
        f"{BIN}/systemctl start --no-block {TARGET}"
    )
    return (
        f"systemctl stop {TIMER}.timer 2>/dev/null || true\n"
        f"systemctl reset-failed {TIMER}.service 2>/dev/null || true\n"
        f"exec systemd-run --quiet --unit={TIMER} --on-active={seconds}s "
        f"--timer-property=AccuracySec=1s --collect -- /bin/sh -c {shlex.quote(back)}\n"
    )


def activate(path: str) -> list[str]:
    """Return the command that activates a system without making it the boot default.

    It runs in a unit of its own, so that a lost connection does not cut it off.
    """
    argv = ["systemd-run", "--quiet", "--wait", "--collect", "--pipe"]
    argv += ["--service-type=exec", "--unit=spark-activate", "--"]
    return [*argv, f"{path}/bin/switch-to-configuration", "test"]


def keep(path: str) -> str:
    """Return the script that makes a system the boot default and then takes the timer away."""
    return (
        "set -eu\n"
        f"nix-env --profile {PROFILE} --set {shlex.quote(path)}\n"
        f"{shlex.quote(path)}/bin/switch-to-configuration boot\n"
        f"systemctl stop {TIMER}.timer 2>/dev/null || true\n"
    )
