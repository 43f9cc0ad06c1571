"""NFS export of the head, read-ahead of the workers, folders, queue of the NVMe disk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from spark_appliance.dgxos.files import NodeFile, ini, link, text_file
from spark_appliance.model.plan import NodePlan
from spark_appliance.names import ENGINE_USER

READ_AHEAD_KIB: Final = 16384
"""Read-ahead of the NFS mount; the kernel's 128 KiB halve a loader that reads in order. The same
as modules/weights.nix."""

NVME_READ_AHEAD_KIB: Final = 128
"""Read-ahead of NVMe disks for buffered readers; O_DIRECT does not use it. The kernel's default,
said so that another rule does not change it. The same as modules/engram.nix."""

NFS_SERVER: Final = "nfs-server.service"


def storage_files(node: NodePlan) -> Iterator[NodeFile]:
    """Yield exports, nfs.conf parts, tmpfiles and udev rules."""
    export = node.weights.export
    if export is not None:
        options = ",".join(export.options)
        clients = " ".join(f"{client}({options})" for client in export.clients)
        yield text_file("/etc/exports.d/spark.exports", f"{_quote(export.path)} {clients}\n")
        settings = [("threads", str(export.threads))]
        settings += [(f"vers{version}", "n") for version in ("3", "4.0", "4.1")]
        settings.append(("vers4.2", "y"))
        if export.rdma:
            settings += [("rdma", "y"), ("rdma-port", "20049")]
        yield text_file("/etc/nfs.conf.d/spark.conf", ini([("nfsd", settings)]))
        yield link(
            f"/etc/systemd/system/multi-user.target.wants/{NFS_SERVER}",
            f"/usr/lib/systemd/system/{NFS_SERVER}",
        )
    if node.weights.mount is not None:
        yield text_file(
            "/etc/nfs.conf.d/spark.conf", ini([("nfsrahead", [("default", str(READ_AHEAD_KIB))])])
        )
    folders = [f"d {node.cache_directory} 0750 {ENGINE_USER} {ENGINE_USER} -\n"]
    if node.engram is not None:
        folders.append(f"d {_quote(node.engram.directory)} 0755 root root -\n")
        yield text_file(
            "/etc/udev/rules.d/60-spark-nvme.rules",
            'ACTION=="add|change", SUBSYSTEM=="block", ENV{DEVTYPE}=="disk", KERNEL=="nvme*n*", '
            'ATTR{queue/scheduler}="none", '
            f'ATTR{{queue/read_ahead_kb}}="{NVME_READ_AHEAD_KIB}"\n',
        )
    yield text_file("/etc/tmpfiles.d/spark.conf", "".join(folders))


def _quote(path: str) -> str:
    """Return a path as exports(5) and tmpfiles.d(5) read it."""
    return path if re.fullmatch(r"[A-Za-z0-9_./+:@-]+", path) else f'"{path}"'
