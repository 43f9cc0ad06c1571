"""The node's own plan, the node program, the engine's user, limits, sshd's share of memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from spark_appliance import lockfile
from spark_appliance.dgxos.files import NodeFile, ini, link, text_file
from spark_appliance.model.plan import NodePlan, Plan
from spark_appliance.names import ENGINE_USER, PLAN_PATH
from spark_appliance.node.generations.activate import command

SPARK_NODE: Final = "/usr/local/sbin/spark-node"
RECOVER_UNIT: Final = "spark-recover.service"


def recovery_files() -> Iterator[NodeFile]:
    """Yield the unit that undoes at boot what was cut off or never confirmed.

    It comes first, so that it is there before anything else of a generation changes.
    """
    sections = [
        (
            "Unit",
            [
                ("Description", "Return to the confirmed generation of the Spark files"),
                ("DefaultDependencies", "no"),
                ("RequiresMountsFor", "/var/lib/spark /etc /usr/local"),
                ("After", "local-fs.target"),
                ("Before", "network-pre.target spark.target shutdown.target"),
                ("Wants", "network-pre.target"),
                ("Conflicts", "shutdown.target"),
            ],
        ),
        (
            "Service",
            [
                ("Type", "oneshot"),
                ("ExecStart", " ".join(command("recover"))),
                ("TimeoutStartSec", "120"),
            ],
        ),
        ("Install", [("WantedBy", "multi-user.target")]),
    ]
    yield text_file(f"/etc/systemd/system/{RECOVER_UNIT}", ini(sections))
    yield link(f"/etc/systemd/system/multi-user.target.wants/{RECOVER_UNIT}", f"../{RECOVER_UNIT}")


def host_files(plan: Plan, node: NodePlan, program: bytes) -> Iterator[NodeFile]:
    """Yield the files that belong to no other part; ``program`` is the spark-node archive."""
    yield NodeFile(PLAN_PATH, lockfile.dump_own(plan, node.name).encode())
    yield NodeFile(SPARK_NODE, program, 0o755)
    yield text_file("/etc/sysusers.d/spark.conf", f'u {ENGINE_USER} - "SGLang engine" -\n')
    # services have LimitMEMLOCK; this is for people of the group who run RDMA tests by hand
    limits = "".join(f"@{ENGINE_USER} {kind} memlock unlimited\n" for kind in ("soft", "hard"))
    yield text_file("/etc/security/limits.d/50-spark.conf", limits)
    protect = [("MemoryMin", "64M"), ("OOMScoreAdjust", "-1000")]
    yield text_file("/etc/systemd/system/ssh.service.d/50-spark.conf", ini([("Service", protect)]))
    # protection is handed down: without a share of their parent the services have none
    yield text_file(
        "/etc/systemd/system/system.slice.d/50-spark.conf",
        ini([("Slice", [("MemoryMin", "256M")])]),
    )
