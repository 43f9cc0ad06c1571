"""Time of ``status`` and ``doctor`` against one plain ``ssh true`` a node; controller memory.

    python benchmarks/fleet.py [--repeats N]

A real sshd of this machine, started for the run on a free port, stands for all nodes (it has its
own keys and known hosts; nothing of yours is used). Each node is a name of its own, so each has
its own connection. The node program is the real one; what a Spark has and this machine lacks
(systemd's answers, nvidia-smi, rails) is missing from its answers, so times are lower bounds.

The reference in the same loop: ``ssh NODE true`` on all nodes at once, each over a connection of
its own. ``cold`` commands make their connections, ``warm`` ones share those that are open. All
nodes' work is done by this one machine, so with 8 nodes its cores are the limit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from spark_appliance import lockfile, node_zipapp
from spark_appliance.doctor import examine
from spark_appliance.doctor.evaluate import evaluate
from spark_appliance.fleet.crew import Crew
from spark_appliance.fleet.status import look
from spark_appliance.model.plan import Plan
from spark_appliance.ssh import Host

ROOT = Path(__file__).resolve().parents[1]
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin:/usr/local/sbin")


def plan_of(count: int) -> Plan:
    """Return the three-node example, its nodes repeated under other names up to ``count``."""
    plan = lockfile.load(ROOT / "examples/three-spark-triangle/cluster.lock.json")
    nodes = [
        plan.nodes[min(rank, 2)].model_copy(
            update={"name": f"spark{rank + 1}", "rank": rank, "ssh": f"spark{rank + 1}"}
        )
        for rank in range(count)
    ]
    return plan.model_copy(update={"nodes": nodes})


@contextlib.contextmanager
def nodes(folder: Path, plan: Plan) -> Iterator[None]:
    """Run sshd, and put an ``ssh`` on PATH that knows its nodes."""
    if SSHD is None:
        sys.exit("needs sshd (package openssh-server)")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    for name in ("host", "user"):
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(argv, check=True)
    programs = folder / "programs"
    programs.mkdir()
    for node in plan.nodes:
        (folder / f"{node.name}.json").write_text(lockfile.dump_own(plan, node.name))
    (folder / "spark-node.pyz").write_bytes(node_zipapp.build())
    spark_node = (
        f"#!/bin/sh\n# called as: spark-node --node NAME report\n"
        f'exec {sys.executable} {folder}/spark-node.pyz --plan "{folder}/$2.json" "$@"\n'
    )
    (programs / "spark-node").write_text(spark_node)
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host\nPidFile none\n"
        f"AuthorizedKeysFile {folder}/user.pub\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nPermitRootLogin prohibit-password\nMaxStartups 100\n"
        f"SetEnv PATH={programs}:{os.environ['PATH']}\n"
    )
    (folder / "ssh_config").write_text(
        f"Host *\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {folder}/user\n"
        f"  IdentitiesOnly yes\n  HostKeyAlias node\n  UserKnownHostsFile {folder}/known\n"
    )
    (folder / "known").write_text("node " + (folder / "host.pub").read_text())
    here = folder / "here"
    here.mkdir()
    ssh = f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n'
    (here / "ssh").write_text(ssh)
    for path in (here / "ssh", programs / "spark-node"):
        path.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    old = dict(os.environ)
    os.environ["PATH"] = f"{here}:{os.environ['PATH']}"
    (folder / "run").mkdir(mode=0o700)
    os.environ["XDG_RUNTIME_DIR"] = str(folder / "run")
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=-3)
    try:
        wait_for(port)
        yield
    finally:
        close_connections(plan)
        server.terminate()
        server.wait()
        os.environ.clear()
        os.environ.update(old)


def wait_for(port: int) -> None:
    """Wait until the server listens."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        threading.Event().wait(0.05)
    sys.exit("sshd did not start")


def close_connections(plan: Plan) -> None:
    """End the shared connections, so that the next measurement is cold."""
    for node in plan.nodes:
        argv = Host(node.ssh).argv(["true"])
        at = argv.index("--")
        subprocess.run([*argv[:at], "-O", "exit", *argv[at:-1]], capture_output=True, check=False)


def plain(plan: Plan) -> None:
    """Run ``ssh NODE true`` on all nodes at once, without sharing."""
    running = [
        subprocess.Popen(Host(node.ssh, shared=False).argv(["true"]), stdout=-3)
        for node in plan.nodes
    ]
    for process in running:
        if process.wait() != 0:
            sys.exit("ssh true failed")


def status(plan: Plan) -> None:
    """Look at the cluster as ``spark-appliance status`` does."""
    overview = look(Crew.of(plan), gpu=False)
    for item in overview.nodes:
        if item.report is None:
            sys.exit(f"{item.node.name}: {item.error}")


def doctor(plan: Plan) -> None:
    """Ask and judge as ``spark-appliance doctor`` does."""
    facts = examine.examine(examine.base(plan), examine.hosts(plan))
    if len(facts.documents()) != len(plan.nodes):
        sys.exit("a node gave doctor no answer")
    evaluate(facts, ["config", "probe"])


def seconds(work: Callable[[], None]) -> float:
    """Return the wall time of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(count: int, repeats: int) -> None:
    """Measure one size of cluster and print its table."""
    plan = plan_of(count)
    names = ("ssh true", "status cold", "status warm", "doctor cold", "doctor warm")
    times: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="spark-fleet-") as name, nodes(Path(name), plan):
        for _ in range(repeats):
            times["ssh true"].append(seconds(lambda: plain(plan)))
            for command, work in (("status", status), ("doctor", doctor)):
                close_connections(plan)
                times[f"{command} cold"].append(seconds(lambda work=work: work(plan)))  # type: ignore[misc]
                times[f"{command} warm"].append(seconds(lambda work=work: work(plan)))  # type: ignore[misc]
    print(f"\n{count} nodes, {repeats} repeats, median (min to max) in seconds, ratio to ssh true")
    for command in names:
        values = times[command]
        ratio = statistics.median(
            value / base for value, base in zip(values, times["ssh true"], strict=True)
        )
        print(
            f"  {command:<12} {statistics.median(values):6.2f} "
            f"({min(values):.2f} to {max(values):.2f})  x{ratio:.2f}"
        )


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    for count in (3, 8):
        measure(count, repeats)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\ncontroller: {peak:.0f} MiB peak resident for all of the above")


if __name__ == "__main__":
    main()
