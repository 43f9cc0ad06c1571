"""A fleet on this machine: a stand-in for ssh runs every node's commands in a folder of its own.

The programs of a node (systemctl, journalctl, nft, docker, spark-node, ...) are small scripts that
write down how they were called and keep their state in files. What is real: our own code on both
sides of the connection, the shell scripts that we send, processes, pipes, deadlines, signals.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_appliance import lockfile
from spark_appliance.fleet.crew import Crew
from spark_appliance.fleet.evidence import RunFolder
from spark_appliance.fleet.remote import Rehearsal, Remote
from spark_appliance.model.cluster import read_cluster
from spark_appliance.model.plan import Plan
from spark_appliance.model.yamlfile import parse
from spark_appliance.profiles import load_profile
from spark_appliance.render import render

ROOT = Path(__file__).resolve().parents[2]
DIGEST = "sha256:" + "cd" * 32

_SSH = """\
#!/bin/sh
printf '%s\\n' "$*" >> "$FAKE_FLEET/ssh.log"
shared=no
while [ $# -gt 0 ]; do
  case "$1" in
    -o) case "$2" in ControlMaster=auto) shared=yes ;; esac; shift 2 ;;
    --) shift; break ;;
    *) shift ;;
  esac
done
FAKE_ROOT=$FAKE_FLEET/nodes/$1
[ -d "$FAKE_ROOT" ] || { echo "ssh: Could not resolve hostname $1" >&2; exit 255; }
if [ -e "$FAKE_ROOT/gone" ]; then
  echo "ssh: connect to host $1 port 22: No route to host" >&2
  exit 255
fi
[ -e "$FAKE_ROOT/hangs" ] && exec sleep 600
if [ "$shared" = no ] && [ -e "$FAKE_ROOT/gone-for-new" ]; then
  echo "ssh: connect to host $1 port 22: Connection timed out" >&2
  exit 255
fi
export FAKE_ROOT
PATH=$FAKE_FLEET/bin:$PATH
exec sh -c "$2"
"""

_LOG = 'printf "%s\\n" "$(basename "$0") $*" >> "$FAKE_ROOT/calls"\n'

_SYSTEMCTL = f"""\
#!/bin/sh
{_LOG}verb=$1; shift
units=
for word in "$@"; do case "$word" in -*) ;; *) units="$units $word" ;; esac; done
mkdir -p "$FAKE_ROOT/active"
case "$verb" in
  start|restart)
    for unit in $units; do
      if [ -e "$FAKE_ROOT/fail-$unit" ]; then
        echo "Job for $unit failed because of $(cat "$FAKE_ROOT/fail-$unit")." >&2
        exit 1
      fi
      echo active > "$FAKE_ROOT/active/$unit"
      [ "$unit" = spark.target ] && [ -e "$FAKE_ROOT/auto-ready" ] && touch "$FAKE_ROOT/ready"
    done ;;
  stop)
    for unit in $units; do
      if [ -e "$FAKE_ROOT/slow-$unit" ]; then sleep 60; fi
      rm -f "$FAKE_ROOT/active/$unit"
      [ "$unit" = spark.target ] && rm -f "$FAKE_ROOT/ready"
    done ;;
  cat) for unit in $units; do [ -e "$FAKE_ROOT/no-$unit" ] && exit 1; done ;;
  show)
    for unit in $units; do
      state=inactive
      [ -e "$FAKE_ROOT/active/$unit" ] && state=$(cat "$FAKE_ROOT/active/$unit")
      printf 'Id=%s\\nLoadState=loaded\\nActiveState=%s\\nSubState=\\n' "$unit" "$state"
      job=0
      [ -e "$FAKE_ROOT/job/$unit" ] && job=$(cat "$FAKE_ROOT/job/$unit")
      printf 'Result=\\nStatusText=\\nJob=%s\\n\\n' "$job"
    done ;;
esac
exit 0
"""

_JOURNALCTL = f"""\
#!/bin/sh
{_LOG}touch "$FAKE_ROOT/journal"
case " $* " in
  *" --follow "*) exec tail -n +1 -f "$FAKE_ROOT/journal" ;;
  *" --output=json "*) exec cat "$FAKE_ROOT/journal" ;;
  *) sed 's/.*"MESSAGE": "//; s/", "UNIT.*//' "$FAKE_ROOT/journal" ;;
esac
"""

_NFT = f"""\
#!/bin/sh
{_LOG}case "$1" in
  -f) cat > "$FAKE_ROOT/nft-rules" ;;
  list) [ -s "$FAKE_ROOT/nft-rules" ] ;;
  delete) rm "$FAKE_ROOT/nft-rules" ;;
esac
"""

_DOCKER = f"""\
#!/bin/sh
{_LOG}case "$1" in
  image) [ -e "$FAKE_ROOT/image" ] ;;
  pull)
    [ -e "$FAKE_ROOT/no-registry" ] && {{ echo 'Error: no such host' >&2; exit 1; }}
    touch "$FAKE_ROOT/image" ;;
esac
"""

_SIMPLE = f"#!/bin/sh\n{_LOG}exit 0\n"

_EXPORTFS = f"""\
#!/bin/sh
{_LOG}[ "$1" = -v ] && cat "$FAKE_ROOT/exports"
exit 0
"""

_DATE = """\
#!/bin/sh
if [ -e "$FAKE_ROOT/clock" ]; then exec cat "$FAKE_ROOT/clock"; fi
exec /bin/date "$@"
"""

_SUDO = '#!/bin/sh\nshift 2\nexec "$@"\n'

_SPARK_NODE = f"""\
#!{sys.executable}
import hashlib, json, os, sys
root = os.environ["FAKE_ROOT"]
with open(root + "/calls", "a") as file:
    print("spark-node", *sys.argv[1:], file=file)

def read(name):
    try:
        with open(root + "/" + name) as file:
            return json.load(file)
    except FileNotFoundError:
        return None

plan = read("etc/spark/plan.json")
if plan is None:
    print("sh: spark-node: not found", file=sys.stderr)
    sys.exit(127)
text = json.dumps(plan, sort_keys=True, separators=(",", ":"))
node = next(n for n in plan["nodes"] if n["name"] == sys.argv[2])
ready = os.path.exists(root + "/ready") and node["rank"] == 0
units = {{unit["name"]: {{"active": "inactive", "text": ""}} for unit in node["units"]}}
if os.path.isdir(root + "/active"):
    for name in os.listdir(root + "/active"):
        with open(root + "/active/" + name) as file:
            units[name] = {{"active": file.read().strip(), "text": ""}}
if ready:
    units["spark-ready.service"] = {{"active": "active", "text": ""}}
report = {{
    "status": {{
        "node": node["name"], "rank": node["rank"],
        "plan": {{"sha256": hashlib.sha256(text.encode()).hexdigest()}},
        "units": units, "ready": ready, "supervisor": {{"phase": "serving" if ready else ""}},
        "memory": {{"MemAvailable": 20 * 2**30}},
        "rails": [{{"netdev": r["netdev"], "missing": []}} for r in node["rails"]],
        "engram": [
            {{"name": f["name"], "good": True}}
            for f in (node["engram"] or {{}}).get("files", [])
        ],
        "problems": [],
    }},
    "engine": {{"health": 200 if ready else None, "metrics": {{}}, "server": {{}}}},
    "loading": None, "gpu": None, "counters": {{}}, "engram_metrics": {{}}, "versions": {{}},
}}

def merge(into, extra):
    for key, value in extra.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value

merge(report, read("report.json") or {{}})
print(json.dumps(report))
"""


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@dataclass(frozen=True)
class World:
    """The folder of all nodes."""

    base: Path
    plan: Plan

    def node(self, name: str) -> Path:
        return self.base / "nodes" / name

    def root(self, remote: Remote) -> str:
        return f"{self.node(remote.name)}/"

    def calls(self, name: str) -> list[str]:
        path = self.node(name) / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def forget(self) -> None:
        for path in (self.base / "nodes").glob("*/calls"):
            path.unlink()

    def put_plan(self, plan: Plan | None = None) -> None:
        for node in self.plan.nodes:
            path = self.node(node.name) / "etc/spark/plan.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(lockfile.dump_own(plan or self.plan, node.name))

    def set(self, name: str, file: str, text: str = "") -> None:
        path = self.node(name) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def unset(self, name: str, file: str) -> None:
        (self.node(name) / file).unlink(missing_ok=True)

    def report(self, name: str, **data: Any) -> None:
        self.set(name, "report.json", json.dumps(data))

    def journal(
        self,
        name: str,
        unit: str,
        text: str | bytes,
        when: float | None = None,
        *,
        own: bool = False,
    ) -> None:
        """Add an entry; ``own``: said by the unit itself, not by systemd."""
        entry = {
            "__REALTIME_TIMESTAMP": str(round((time.time() if when is None else when) * 1e6)),
            "MESSAGE": list(text) if isinstance(text, bytes) else text,
            "_SYSTEMD_UNIT" if own else "UNIT": unit,
        }
        with (self.node(name) / "journal").open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def crew(self, evidence: RunFolder | None = None, rehearsal: Rehearsal | None = None) -> Crew:
        return Crew.of(self.plan, evidence=evidence, rehearsal=rehearsal)

    def ssh_log(self) -> list[str]:
        path = self.base / "ssh.log"
        return path.read_text().splitlines() if path.exists() else []


def make_plan(
    example: str = "three-spark-triangle", *, system: str = "dgx-os", **changes: Any
) -> Plan:
    path = ROOT / "examples" / example / "cluster.yaml"
    data = parse(str(path), path.read_bytes()).data
    assert isinstance(data, dict)
    data["image"] = {"reference": "registry.lan/spark-engine", "digest": DIGEST}
    for node in data["nodes"]:
        node["system"] = system
        node["ssh"] = node["name"]
    data |= changes
    cluster, findings = read_cluster(data)
    assert cluster is not None, findings
    plan = render(cluster, load_profile(cluster.profile, path.parent)).plan
    assert plan is not None
    return plan


def make_world(base: Path, plan: Plan) -> World:
    (base / "bin").mkdir(parents=True)
    (base / "here").mkdir()
    write_program(base / "here/ssh", _SSH)
    for name, text in {
        "systemctl": _SYSTEMCTL,
        "journalctl": _JOURNALCTL,
        "nft": _NFT,
        "docker": _DOCKER,
        "exportfs": _EXPORTFS,
        "systemd-run": f"#!/bin/sh\n{_LOG}cat > /dev/null < /dev/null\n",
        "rsync": _SIMPLE,
        "nix-env": _SIMPLE,
        "date": _DATE,
        "sudo": _SUDO,
        "spark-node": _SPARK_NODE,
    }.items():
        write_program(base / "bin" / name, text)
    for node in plan.nodes:
        (base / "nodes" / node.name).mkdir(parents=True)
    return World(base, plan)


def environment(world: World) -> dict[str, str]:
    return {
        "FAKE_FLEET": str(world.base),
        "PATH": f"{world.base / 'here'}{os.pathsep}{os.environ['PATH']}",
        "XDG_RUNTIME_DIR": str(world.base / "run"),
    }


def remote_words(line: str) -> list[str]:
    """Return the words of the remote command in a line of the ssh log."""
    return shlex.split(line.split(" -- ", 1)[1].split(" ", 1)[1])


__all__ = ["World", "environment", "make_plan", "make_world", "remote_words"]
