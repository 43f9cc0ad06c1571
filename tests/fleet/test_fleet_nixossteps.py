"""What runs on a NixOS node during a rollout, word for word; the VM test runs the same."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from spark_appliance.fleet.nixossteps import activate, arm, keep

SYSTEM = "/nix/store/0-nixos-system-spark1"


def test_the_return_goes_to_the_boot_default_and_starts_it() -> None:
    assert arm(600) == (
        "systemctl stop spark-return.timer 2>/dev/null || true\n"
        "systemctl reset-failed spark-return.service 2>/dev/null || true\n"
        "exec systemd-run --quiet --unit=spark-return --on-active=600s "
        "--timer-property=AccuracySec=1s --collect -- /bin/sh -c "
        "'/run/current-system/sw/bin/systemctl stop spark.target; "
        "/nix/var/nix/profiles/system/bin/switch-to-configuration test; "
        "/run/current-system/sw/bin/systemctl start --no-block spark.target'\n"
    )


def test_a_system_is_activated_in_a_unit_of_its_own() -> None:
    assert activate(SYSTEM) == [
        *["systemd-run", "--quiet", "--wait", "--collect", "--pipe", "--service-type=exec"],
        *["--unit=spark-activate", "--", f"{SYSTEM}/bin/switch-to-configuration", "test"],
    ]


def test_the_timer_goes_only_after_the_system_is_the_boot_default() -> None:
    assert keep(SYSTEM).splitlines() == [
        "set -eu",
        f"nix-env --profile /nix/var/nix/profiles/system --set {SYSTEM}",
        f"{SYSTEM}/bin/switch-to-configuration boot",
        "systemctl stop spark-return.timer 2>/dev/null || true",
    ]


@pytest.mark.parametrize("script", [arm(1), keep("/nix/store/a b")])
def test_sh_reads_the_scripts(script: str) -> None:
    shell = shutil.which("dash") or shutil.which("sh")
    assert shell is not None
    subprocess.run([shell, "-n"], input=script, text=True, check=True)
