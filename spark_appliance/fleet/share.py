"""The checkpoint for everybody: NFS with a life of its own, or copies.

``stop`` never takes the export down: a pack after a stop still finds the checkpoint
(MiaAI-Lab PR#26).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from spark_appliance.dgxos.storage import NFS_SERVER
from spark_appliance.fleet.crew import Crew, FleetError
from spark_appliance.fleet.remote import Remote, StepError
from spark_appliance.fleet.units import systemctl
from spark_appliance.model.plan import ExportPlan, Plan

MOUNT_SECONDS: Final = 150.0
"""More than the mount unit's own 90 s."""

LIST_SECONDS: Final = 300.0
"""For the size of every shard through a cold NFS mount."""

COPY_SECONDS: Final = 24 * 3600.0
COPY_PORT: Final = 20873
COPY_UNIT: Final = "spark-copy"

_LISTING: Final = """\
set -eu
cd -- "$1"
sha256sum -- model.safetensors.index.json | cut -d ' ' -f 1
for file in *.safetensors; do
  [ -e "$file" ] || exit 3
  stat -L -c '%s %n' -- "$file"
done
"""
"""Hash of the index, then size and name of every shard, read the way the engine will."""

_DAEMON: Final = """\
set -eu
umask 077
cat > "/run/$1.conf"
systemctl stop "$1.service" 2>/dev/null || true
systemctl reset-failed "$1.service" 2>/dev/null || true
systemd-run --quiet --collect --unit="$1" --property=RuntimeMaxSec="$2" \\
  rsync --daemon --no-detach --port="$3" --config="/run/$1.conf"
# the unit is started before it listens, and a client that is refused does not try again
for _ in $(seq 100); do
  if ss -H -l -t -n "sport = :$3" | grep -q .; then exit 0; fi
  sleep 0.2
done
echo "rsync does not listen on port $3: journalctl -u $1" >&2
exit 1
"""


@dataclass(frozen=True, slots=True)
class Listing:
    """A checkpoint as a node sees it: hash of its index, size of every shard in bytes."""

    index: str
    shards: Mapping[str, int]


def listing(remote: Remote, plan: Plan) -> Listing:
    """Read the index and every shard's size on a node.

    Raises:
        StepError: when it is not there or cannot be read.
    """
    answer = remote.run(
        "read the checkpoint",
        ["sh", "-s", "--", plan.model.path],
        seconds=LIST_SECONDS,
        text=_LISTING,
    )
    return parse_listing(answer.stdout)


def parse_listing(text: str) -> Listing:
    """Read the answer of the listing script."""
    lines = text.splitlines()
    shards = {}
    for line in lines[1:]:
        size, _, name = line.partition(" ")
        if size.isdecimal() and name:
            shards[name] = int(size)
    return Listing(lines[0].strip() if lines else "", shards)


def compare(found: Listing, wanted: Listing) -> str | None:
    """Return what is wrong with a node's view of the checkpoint, None when nothing is."""
    if found.index != wanted.index:
        return "model.safetensors.index.json is another one than the head's"
    missing = sorted(set(wanted.shards) - set(found.shards))
    if missing:
        return f"{len(missing)} shards are missing, the first is {missing[0]}"
    for shard, size in wanted.shards.items():
        if found.shards[shard] != size:
            return f"{shard} has {found.shards[shard]} bytes, on the head {size}"
    return None


def share(crew: Crew, *, verify: bool = False) -> dict[str, str]:
    """Make the checkpoint readable on every node and check it there.

    ``verify`` (copies only) compares every byte. Returns a word for each node.

    Raises:
        FleetError, StepError: naming the node and what it lacks.
    """
    head = crew.head
    if head is None:
        raise StepError("head", "share", "the head is not among the chosen nodes")
    wanted = _on_head(crew, head)
    if head.plan.weights.export is not None:
        _export(crew, head, head.plan.weights.export)
    else:
        _copies(crew, head, verify=verify)
    failures: dict[str, StepError] = {}
    texts = {head.name: f"{len(wanted.shards)} shards"}
    workers = crew.only(remote.name for remote in crew if remote.plan.rank != 0)
    for name, found in workers.each(lambda remote: _on_worker(crew, remote)).items():
        wrong = None if crew.rehearsal is not None else compare(found, wanted)
        if wrong is not None:
            failures[name] = StepError(name, "compare the checkpoint", wrong, _remedy(crew.plan))
            crew.board.fail(name, wrong)
        else:
            texts[name] = f"{len(found.shards)} shards, the head's index"
            crew.board.done(name, texts[name])
    if failures:
        raise FleetError(dict(failures))
    return texts


def _on_head(crew: Crew, head: Remote) -> Listing:
    crew.board.work(head.name, "reading the checkpoint")
    found = listing(head, crew.plan)
    shards = crew.plan.model.shards
    if crew.rehearsal is None and len(found.shards) != shards:
        raise StepError(
            head.name,
            "read the checkpoint",
            f"{crew.plan.model.path} has {len(found.shards)} shards, the plan says {shards}",
            "finish the download, or correct model.shards in the cluster file",
        )
    crew.board.done(head.name, f"{len(found.shards)} shards")
    return found


def _export(crew: Crew, head: Remote, export: ExportPlan) -> None:
    crew.board.work(head.name, "exporting")
    systemctl(head, "start the NFS server", "start", [NFS_SERVER], seconds=MOUNT_SECONDS)
    head.run("read /etc/exports again", ["exportfs", "-ra"], seconds=60, root=True)
    answer = head.run("look at the exports", ["exportfs", "-v"], seconds=60, root=True)
    if crew.rehearsal is not None:
        return
    clients = exported_to(answer.stdout, export.path)
    strangers = sorted(clients - set(export.clients))
    missing = sorted(set(export.clients) - clients)
    if strangers or missing:
        parts = [f"not to {', '.join(missing)}"] if missing else []
        parts += [f"also to {', '.join(strangers)}"] if strangers else []
        raise StepError(
            head.name,
            "look at the exports",
            f"{export.path} is exported {' and '.join(parts)}",
            "remove other lines for it in /etc/exports and /etc/exports.d, then install again",
        )
    crew.board.done(head.name, f"exported to {len(clients)} addresses")


def exported_to(text: str, path: str) -> set[str]:
    """Return the clients of a path in ``exportfs -v``; a long path has them on a line below."""
    joined = re.sub(r"\n\s+", " ", text)
    clients = set()
    for line in filter(str.strip, joined.splitlines()):
        name, *rest = line.split(maxsplit=1)
        if name == path and rest:
            clients |= {client.partition("(")[0].strip() for client in rest[0].split()}
    return {client for client in clients if client}


def _on_worker(crew: Crew, remote: Remote) -> Listing:
    mount = remote.plan.weights.mount
    if mount is not None:
        crew.board.work(remote.name, "mounting")
        automount = mount.unit.removesuffix(".mount") + ".automount"
        systemctl(remote, "arm the mount", "start", [automount], seconds=MOUNT_SECONDS)
        systemctl(remote, "mount", "start", [mount.unit], seconds=MOUNT_SECONDS)
    crew.board.work(remote.name, "reading the checkpoint")
    return listing(remote, crew.plan)


def _remedy(plan: Plan) -> str:
    if plan.nodes[0].weights.export is None:
        return "copy again: spark-appliance share"
    return "unmount it there and share again: spark-appliance share"


def copy_source(crew: Crew, remote: Remote) -> str:
    """Return the head's address for a node: over a rail where one joins both, else the LAN."""
    for rail in remote.plan.rails:
        for peer in rail.peers:
            if peer.node == crew.plan.nodes[0].name:
                return peer.address
    return crew.plan.nodes[0].address


def daemon_config(crew: Crew, clients: list[str]) -> str:
    """Return the configuration of the head's rsync: one folder, read only, known readers."""
    return (
        "use chroot = yes\n"
        "uid = nobody\n"
        "gid = nogroup\n"
        f"hosts allow = {' '.join(clients)}\n"
        "hosts deny = *\n"
        "[checkpoint]\n"
        f"path = {crew.plan.model.path}\n"
        "read only = yes\n"
        "list = no\n"
    )


def _copies(crew: Crew, head: Remote, *, verify: bool) -> None:
    workers = crew.only(remote.name for remote in crew if remote.plan.rank != 0)
    if not workers.remotes:
        return
    clients = sorted(
        {rail.address.partition("/")[0] for remote in workers for rail in remote.plan.rails}
        | {remote.plan.address for remote in workers}
    )
    crew.board.work(head.name, "serving copies")
    head.run(
        "start the copy server",
        ["sh", "-c", _DAEMON, "sh", COPY_UNIT, str(round(COPY_SECONDS)), str(COPY_PORT)],
        seconds=60,
        root=True,
        text=daemon_config(crew, clients),
    )
    try:
        workers.each(lambda remote: _copy(crew, remote, verify=verify))
    finally:
        head.run(
            "stop the copy server",
            ["systemctl", "stop", f"{COPY_UNIT}.service"],
            seconds=60,
            root=True,
            check=False,
        )
    crew.board.done(head.name, "copied")


def copy_argv(crew: Crew, remote: Remote, *, verify: bool) -> list[str]:
    """Return the command that copies on a node; it continues where it was cut off."""
    source = f"rsync://{copy_source(crew, remote)}:{COPY_PORT}/checkpoint/"
    compared = ["--checksum"] if verify else []
    options = ["--archive", "--no-owner", "--no-group", "--partial", "--info=progress2"]
    options += ["--timeout=120", "--contimeout=30", *compared]
    return ["rsync", *options, source, f"{crew.plan.model.path}/"]


def _copy(crew: Crew, remote: Remote, *, verify: bool) -> None:
    argv = copy_argv(crew, remote, verify=verify)
    crew.board.work(remote.name, "copying")
    path = crew.plan.model.path
    remote.run("make the folder", ["mkdir", "-p", "--", path], seconds=30, root=True)
    if crew.rehearsal is not None:
        remote.run("copy", argv, seconds=COPY_SECONDS, root=True)
        return
    with remote.lines("copy", argv, seconds=COPY_SECONDS, root=True) as lines:
        for line in lines:
            if found := re.search(r"(\d+)% +(\S+/s)", line):
                share_done = int(found[1]) / 100
                crew.board.work(remote.name, "copying", f"{found[1]} %, {found[2]}", share_done)
