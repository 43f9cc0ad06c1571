"""The table of units under a real systemd, with a stand-in engine, in namespaces of its own.

systemd runs as PID 1 of fresh mount, PID, network, IPC, UTS and cgroup namespaces over this
machine's own /usr, with an /etc of its own; nothing outside changes. Shows what no fake can:
that the sandboxed programs can do their work, and what systemd does with the dependencies.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_appliance.model.plan import Plan
from spark_appliance.node_zipapp import build
from spark_appliance.unitfile import unit_text

from .conftest import rendered
from .test_prepare import shard

pytestmark = pytest.mark.slow

SYSTEMD = Path("/lib/systemd/systemd")
PYTHON = Path("/usr/bin/python3")
SECONDS = 60.0

CLUSTER = """
version: 1
name: one
profile: single-dev
topology: {kind: single}
model: {path: /srv/model, shards: 1}
api: {key_file: /etc/spark/api-key, bind: 127.0.0.1, port: 18888}
nodes:
  - {name: one, address: 127.0.0.1, system: nixos}
"""

ENGINE = """#!/usr/bin/python3 -S
import http.server, json, os, sys
args = sys.argv[1:]
key = open(args[args.index("--config") + 1]).read().split('"')[1]
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
writes = []
for path in ("/run/spark/x", "/etc/x", "/var/cache/spark-engine/x"):
    try:
        open(path, "w").close()
        writes.append(path)
    except OSError:
        pass
facts = {"uid": os.getuid(), "caps": status["CapEff"].strip(), "writes": writes,
         "key": key in " ".join(args + list(os.environ.values())), "home": os.environ["HOME"]}
print("engine:", json.dumps(facts), flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        right = self.headers.get("Authorization") == "Bearer " + key
        body = json.dumps({"choices": [{"message": {"content": "42"}}]}).encode()
        self.send_response(200 if right else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", 18888), Handler).serve_forever()
"""

MASKED = """
dev-hugepages.mount dev-mqueue.mount getty.target kmod-static-nodes.service
proc-sys-fs-binfmt_misc.automount sys-fs-fuse-connections.mount sys-kernel-config.mount
sys-kernel-debug.mount sys-kernel-tracing.mount systemd-binfmt.service systemd-firstboot.service
systemd-hwdb-update.service systemd-journal-flush.service systemd-logind.service
systemd-machine-id-commit.service systemd-modules-load.service systemd-pstore.service
systemd-random-seed.service systemd-remount-fs.service systemd-sysctl.service
systemd-sysusers.service systemd-tmpfiles-setup-dev.service systemd-tmpfiles-setup.service
systemd-udev-trigger.service systemd-udevd-control.socket systemd-udevd-kernel.socket
systemd-udevd.service systemd-update-utmp.service
"""

ENTER = r"""
set -eu
folder=$1
mount --make-rprivate /
mount -t proc proc /proc
ip link set lo up
umount -l /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
mount -t tmpfs tmpfs "$folder/overlay"
mkdir "$folder/overlay/up" "$folder/overlay/work"
mount -t overlay overlay \
  -o "lowerdir=/etc,upperdir=$folder/overlay/up,workdir=$folder/overlay/work" /etc
rm -rf /etc/systemd/system/*
: > /etc/fstab
cp "$folder"/units/* /etc/systemd/system/
for unit in $MASKED; do ln -sf /dev/null "/etc/systemd/system/$unit"; done
printf '[Unit]\nRequires=sysinit.target\nAfter=sysinit.target\nAllowIsolate=yes\n' \
  > /etc/systemd/system/default.target
mkdir -p /etc/spark
cp -p "$folder"/spark/* /etc/spark/
echo 'spark:x:991:991::/nonexistent:/usr/sbin/nologin' >> /etc/passwd
echo 'spark:x:991:' >> /etc/group
for path in /run /var/log /var/cache /var/tmp /srv; do mount -t tmpfs tmpfs "$path"; done
mkdir -p /run/test /srv/model /run/log/journal
cp -p "$folder"/programs/* /run/test/
cp "$folder"/model/* /srv/model/
# 'prepare' drops caches: not those of this machine
for name in drop_caches compact_memory; do
  echo 0 > "/run/test/$name"
  mount --bind "/run/test/$name" "/proc/sys/vm/$name"
done
mount --make-rshared /
exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin "$SYSTEMD" --system --show-status=no
"""


def missing() -> str | None:
    if os.geteuid() != 0:
        return "needs root"
    for tool in ("unshare", "nsenter", "findmnt", "ip", "systemctl", "journalctl"):
        if shutil.which(tool) is None:
            return f"needs {tool}"
    if not SYSTEMD.exists() or not PYTHON.exists():
        return f"needs {SYSTEMD} and {PYTHON}"
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    if subprocess.run([PYTHON, "-c", check], check=False).returncode:
        return f"{PYTHON} is older than 3.11"
    if not cgroup2():
        return "needs a mounted cgroup2"
    return None


def cgroup2() -> str:
    done = subprocess.run(
        ["findmnt", "--noheadings", "--types", "cgroup2", "--output", "TARGET"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.split("\n")[0].strip()


class Machine:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.group = Path(cgroup2()) / f"spark-test-{os.getpid()}"
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
        while self.run("systemctl is-system-running --wait", check=False).strip() != "running":
            boot = (folder / "boot.log").read_text()
            assert time.monotonic() < end and self.outer.poll() is None, boot

    @property
    def init(self) -> int:
        children = Path(f"/proc/{self.outer.pid}/task/{self.outer.pid}/children").read_text()
        return int((children.split() or ["0"])[0])

    def run(self, script: str, *, check: bool = True) -> str:
        enter = ["nsenter", "--target", str(self.init), "--mount", "--pid", "--uts", "--ipc"]
        done = subprocess.run(
            [*enter, "--net", "--cgroup", "sh", "-c", script],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        )
        if check:
            assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout

    def now(self) -> str:
        """A place in the journal to look from."""
        lines = self.run("journalctl -n 0 --show-cursor --quiet").splitlines()
        return lines[-1].removeprefix("-- cursor: ") if lines else ""

    def wait_for(self, text: str, since: str) -> str:
        """Wait until a unit of ours says something; returns the line."""
        follow = "journalctl --follow --output=cat --unit='spark*' --lines=all"
        after = f" --after-cursor='{since}'" if since else ""
        return self.run(f"timeout 45 {follow}{after} | grep --max-count=1 --fixed-strings '{text}'")

    def show(self, unit: str, prop: str) -> str:
        return self.run(f"systemctl show --property={prop} --value {unit}").strip()

    def serve(self) -> str:
        """Start from nothing to serving; returns the place in the journal before."""
        self.run(
            "systemctl stop spark.target spark-supervisor spark-engine spark-guard;"
            "systemctl reset-failed; rm -f /run/spark/supervisor.json",
            check=False,
        )
        since = self.now()
        self.run("systemctl start spark.target")
        self.wait_for("serving: the endpoint", since)
        return since

    def change_plan(self, change: dict[str, Any]) -> None:
        script = (
            "import json; p = json.load(open('/etc/spark/plan.json'));"
            f"p['nodes'][0]['guard'].update({change!r});"
            "json.dump(p, open('/etc/spark/plan.json', 'w'))"
        )
        self.run(f'{PYTHON} -c "{script}"')

    def close(self) -> None:
        self.outer.kill()  # --kill-child takes PID 1, and the kernel all the rest
        self.outer.wait()
        self.log.close()
        (self.group / "cgroup.kill").write_text("1")
        end = time.monotonic() + 20
        folders = [Path(name) for name, _, _ in os.walk(self.group, topdown=False)]
        for folder in folders:
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError:  # its last process is on its way out
                    assert time.monotonic() < end
                    select.select([], [], [], 0.02)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    reason = missing()
    if reason is not None:
        pytest.skip(f"real systemd: {reason}")
    folder = tmp_path_factory.mktemp("systemd")
    for name in ("units", "spark", "programs", "model", "overlay"):
        (folder / name).mkdir()
    plan = rendered(folder, CLUSTER)
    plan["health"]["interval"] = 1
    plan["restart"] = {"limit": 1, "window": 3600, "backoff": [0]}
    (folder / "spark/plan.json").write_text(json.dumps(plan))
    (folder / "spark/api-key").write_text("sk-real-systemd\n")
    (folder / "spark/api-key").chmod(0o600)
    (folder / "programs/spark-node").write_bytes(build())
    (folder / "programs/engine").write_text(ENGINE)
    for program in (folder / "programs").iterdir():
        program.chmod(0o755)
    shard(folder / "model/model.safetensors")
    paths = {"@spark-node@": "/run/test/spark-node", "@python@": "/run/test/engine"}
    for unit in Plan.model_validate(plan).nodes[0].units:
        (folder / "units" / unit.name).write_text(unit_text(unit, paths))
    folder.chmod(0o755)
    made = Machine(folder)
    yield made
    made.close()


def test_serves_and_the_engine_has_no_rights(machine: Machine) -> None:
    since = machine.serve()
    facts = json.loads(machine.wait_for("engine: ", since).removeprefix("engine: "))
    assert facts == {
        "uid": 991,
        "caps": "0000000000000000",
        "writes": ["/var/cache/spark-engine/x"],
        "key": False,
        "home": "/var/cache/spark-engine",
    }
    assert machine.run("stat -c '%a %U' /run/spark-engine/config.yaml") == "600 spark\n"
    assert machine.run("cat /run/test/drop_caches") == "3"
    status = json.loads(machine.run("/run/test/spark-node --node one status"))
    assert status["ready"] is True
    assert status["supervisor"]["phase"] == "serving"
    assert {name: unit["active"] for name, unit in status["units"].items()} == dict.fromkeys(
        status["units"], "active"
    )
    journal = machine.run("journalctl --output=cat --no-pager")
    assert "sk-real" not in journal


def test_a_killed_engine_comes_back_and_the_second_time_is_the_last(machine: Machine) -> None:
    machine.serve()
    since = machine.now()
    machine.run("systemctl kill --signal=SIGKILL spark-engine.service")
    machine.wait_for("backoff: restart 1 of 1", since)
    machine.wait_for("serving: the endpoint", since)
    machine.run("systemctl kill --signal=SIGKILL spark-engine.service")
    machine.wait_for("gave up after 1 restarts", since)
    machine.run("systemctl is-failed --quiet spark-supervisor.service || sleep 1")
    assert machine.show("spark-supervisor.service", "ExecMainStatus") == "3"
    assert machine.show("spark-supervisor.service", "NRestarts") == "0"
    assert machine.run("systemctl is-active spark-ready.service", check=False) == "inactive\n"


def test_the_sandboxed_guard_kills_by_cgroup(machine: Machine) -> None:
    machine.serve()
    since = machine.now()
    machine.change_plan({"steady_bytes": 2**50})
    try:
        machine.run("systemctl restart spark-guard.service")
        line = machine.wait_for("is below the threshold", since)
        killed = "(serving): killed cgroup /sys/fs/cgroup/system.slice/spark-engine.service"
        assert killed in line
        assert "(memory guard: " in machine.wait_for("stopping every rank", since)
    finally:
        machine.change_plan({"steady_bytes": 3 * 2**30})


def test_a_guard_that_comes_back_leaves_the_engine_alone(machine: Machine) -> None:
    machine.serve()
    engine = machine.show("spark-engine.service", "InvocationID")
    since = machine.now()
    machine.run("systemctl kill --signal=SIGKILL spark-guard.service")
    machine.wait_for("armed: ", since)
    machine.run("systemctl restart spark-guard.service")
    assert machine.show("spark-guard.service", "ActiveState") == "active"
    assert machine.show("spark-engine.service", "InvocationID") == engine


def test_an_engine_restarted_by_hand_is_noticed(machine: Machine) -> None:
    machine.serve()
    since = machine.now()
    machine.run("systemctl restart --no-block spark-engine.service")
    machine.wait_for("stopping every rank, because of one: spark-engine.service ", since)
    machine.wait_for("serving: the endpoint", since)


def test_a_killed_supervisor_starts_afresh(machine: Machine) -> None:
    machine.serve()
    engine = machine.show("spark-engine.service", "InvocationID")
    since = machine.now()
    machine.run("systemctl kill --signal=SIGKILL spark-supervisor.service")
    machine.wait_for("active without a supervisor: stopping it", since)
    machine.wait_for("serving: the endpoint", since)
    assert machine.show("spark-engine.service", "InvocationID") != engine


def test_a_failed_start_is_named_by_its_own_error(machine: Machine) -> None:
    machine.serve()
    machine.run("mv /srv/model/model.safetensors /srv/model/elsewhere")
    try:
        since = machine.now()
        machine.run("systemctl kill --signal=SIGKILL spark-engine.service")
        line = machine.wait_for("did not start", since)
        assert "/srv/model/model.safetensors.index.json: No such file or directory" in line
    finally:
        machine.run("mv /srv/model/elsewhere /srv/model/model.safetensors")


def test_stops_cleanly(machine: Machine) -> None:
    machine.serve()
    since = machine.now()
    machine.run("systemctl stop spark.target spark-supervisor.service spark-engine.service")
    machine.wait_for("stopped: every rank is stopped", since)
    assert "did not stop" not in machine.run(
        f"journalctl --output=cat --unit='spark*' --after-cursor='{since}'"
    )
    for unit in ("spark-engine", "spark-ready", "spark-supervisor"):
        assert machine.show(f"{unit}.service", "ActiveState") == "inactive"
