"""Generations under a real systemd: activation, the timer that returns, recovery at boot.

The machine is that of the node programs' tests: systemd as PID 1 of its own namespaces over this
machine's /usr. Here /etc, /usr/local/sbin and /var/lib/spark are folders that outlive it, so that
a machine can lose its power and boot again.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dgxos_plans import dgx_plan, example
from node.test_real_systemd import MASKED, PYTHON, SECONDS, SYSTEMD, Machine, cgroup2, missing

from spark_appliance import node_zipapp
from spark_appliance.dgxos.render import bundle

pytestmark = pytest.mark.slow

ENTER = r"""
set -eu
folder=$1
mount --make-rprivate /
mount -t proc proc /proc
ip link set lo up
umount -l /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
mkdir -p "$folder/disk/var/lib/spark" "$folder/disk/sbin"
if [ ! -e "$folder/disk/etc" ]; then
  cp -a /etc "$folder/disk/etc"
  etc=$folder/disk/etc
  rm -rf "$etc"/systemd/system/* "$etc/spark" "$etc/exports.d" "$etc/nfs.conf.d"
  : > "$etc/fstab"
  for unit in $MASKED; do ln -sf /dev/null "$etc/systemd/system/$unit"; done
  # these would act on the machine outside
  for unit in systemd-sysctl.service systemd-modules-load.service; do
    rm -f "$etc/systemd/system/$unit"
    printf '[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\n' \
      > "$etc/systemd/system/$unit"
  done
  printf '[Unit]\nRequires=sysinit.target\nAfter=sysinit.target\nAllowIsolate=yes\n' \
    > "$etc/systemd/system/multi-user.target"
  ln -s multi-user.target "$etc/systemd/system/default.target"
fi
mkdir -p /var/lib/spark /usr/local/sbin
mount --bind "$folder/disk/etc" /etc
mount --bind "$folder/disk/sbin" /usr/local/sbin
mount --bind "$folder/disk/var/lib/spark" /var/lib/spark
for path in /run /var/log /var/cache /var/tmp /srv; do mount -t tmpfs tmpfs "$path"; done
mkdir -p /run/test /run/log/journal
printf '#!/bin/sh\nexit 0\n' > /run/test/udevadm
chmod 755 /run/test/udevadm
mount --make-rshared /
exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin "$SYSTEMD" --system --show-status=no
"""


class Box(Machine):
    """A machine whose disk outlives it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.group = Path(cgroup2()) / f"spark-box-{os.getpid()}"
        self.group.mkdir()
        join = f'echo $$ > "{self.group}/cgroup.procs"; exec "$@"'
        namespaces = ["--mount", "--pid", "--cgroup", "--uts", "--ipc", "--net"]
        unshare = ["unshare", *namespaces, "--fork", "--kill-child"]
        self.log = (folder / "boot.log").open("wb")
        self.outer = subprocess.Popen(
            ["sh", "-c", join, "sh", *unshare, "sh", "-c", ENTER, "sh", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            env={**os.environ, "MASKED": MASKED, "SYSTEMD": str(SYSTEMD)},
        )
        end = time.monotonic() + SECONDS
        up = ("running", "degraded")  # the engine's units have no container runtime here
        while self.run("systemctl is-system-running --wait", check=False).strip() not in up:
            assert time.monotonic() < end and self.outer.poll() is None, (
                folder / "boot.log"
            ).read_text()

    def generations(self, *words: str) -> dict[str, object]:
        program = self.folder / "program.pyz"
        line = " ".join(words)
        text = self.run(
            f"PATH=/run/test:$PATH PYTHONPATH={program} {PYTHON} "
            f"-m spark_appliance.node.generations {line}"
        )
        return dict(json.loads(text))

    def apply(self, name: str, *words: str) -> dict[str, object]:
        keep = "/var/lib/spark/generations"
        self.run(f"mkdir -p {keep}; cp {self.folder}/program.pyz {keep}/program.pyz")
        return self.generations("apply", "--bundle", str(self.folder / name), *words)

    def state(self) -> dict[str, object]:
        path = self.folder / "disk/var/lib/spark/generations/state.json"
        return dict(json.loads(path.read_text()))

    def port(self) -> int:
        plan = json.loads((self.folder / "disk/etc/spark/plan.json").read_text())
        return int(plan["api"]["port"])


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    reason = missing()
    if reason is not None:
        pytest.skip(f"real systemd: {reason}")
    program = node_zipapp.build()
    (tmp_path / "program.pyz").write_bytes(program)
    for name, port in (("one.json", 8888), ("two.json", 9000)):
        plan = dgx_plan(example("single-spark"), api={"port": port})
        (tmp_path / name).write_text(json.dumps(bundle(plan, plan.nodes[0], program)))
    yield tmp_path


def files(folder: Path) -> set[str]:
    etc = folder / "disk/etc"
    names = {str(path.relative_to(etc)) for path in etc.rglob("*") if "spark" in path.name}
    return names | {path.name for path in (folder / "disk/sbin").iterdir()}


def test_a_node_from_nothing_through_trial_power_cut_and_back_to_nothing(folder: Path) -> None:
    machine = Box(folder)
    try:
        assert files(folder) == set()
        machine.apply("one.json")
        assert machine.show("spark-engine.service", "LoadState") == "loaded"
        assert machine.show("spark-recover.service", "UnitFileState") == "enabled"
        assert machine.run("getent passwd spark").split(":")[6].strip().endswith("nologin")
        assert machine.run("stat -c '%U %a' /var/cache/spark-engine").split() == ["spark", "750"]

        # on trial and nobody confirms: the real timer takes it back and serves the old version
        machine.apply("two.json", "--return-after", "2")
        assert machine.port() == 9000
        machine.run(
            "timeout 45 journalctl --follow --lines=all --output=cat UNIT=spark.target "
            "| grep --max-count=1 'Reached target'"
        )
        assert machine.port() == 8888
        state = machine.state()
        assert (state["current"], state["confirmed"], state["switching"]) == (1, 1, None)

        # confirmed: the timer is gone
        machine.apply("two.json", "--return-after", "3600")
        assert machine.show("spark-return.timer", "ActiveState") == "active"
        machine.generations("confirm")
        assert machine.show("spark-return.timer", "ActiveState") == "inactive"
        machine.generations("rollback")
        assert machine.port() == 8888

        # on trial, and the power goes
        machine.apply("two.json", "--return-after", "3600")
        assert machine.port() == 9000
    finally:
        machine.close()
    machine = Box(folder)
    try:
        assert machine.show("spark-recover.service", "Result") == "success"
        assert machine.port() == 8888
        state = machine.state()
        assert state["current"] == state["confirmed"]
        # systemd runs what lies on the disk now
        assert machine.show("spark-engine.service", "NeedDaemonReload") == "no"
        machine.generations("uninstall")
        assert files(folder) == set()
        assert machine.show("spark-engine.service", "LoadState") == "not-found"
    finally:
        machine.close()
