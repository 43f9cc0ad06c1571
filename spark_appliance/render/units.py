"""The systemd units of a node and their order; both adapters use these names."""

from __future__ import annotations

from typing import Final, Literal

from spark_appliance.model.plan import EngramPlan, UnitPlan, WeightsPlan

FABRIC: Final = "spark-fabric.service"
PACK: Final = "spark-engram-pack.service"
GUARD: Final = "spark-guard.service"
SUPERVISOR: Final = "spark-supervisor.service"
ENGINE: Final = "spark-engine.service"
READY: Final = "spark-ready.service"
TARGET: Final = "spark.target"
NFS_SERVER: Final = "nfs-server.service"

LIMITS: Final = {
    # pinned buffers of RDMA, NCCL and the Engram reader; PAM limits do not reach services
    "LimitMEMLOCK": "infinity",
    "LimitNOFILE": "1048576",
    "LimitSTACK": "67108864",
}


def units(
    *, cables: bool, head: bool, weights: WeightsPlan, engram: EngramPlan | None
) -> list[UnitPlan]:
    """Return the units in start order.

    The export and the mounts have a life of their own: stopping the target leaves them up, so
    that a pack after a stop still finds the checkpoint (MiaAI-Lab PR#26). The engine is started
    by the supervisors alone: a rank that starts by itself never joins a running group.
    """
    result: list[UnitPlan] = []
    network: list[str] = []
    if cables:
        result.append(_unit(FABRIC, after=["network-online.target"]))
        network = [FABRIC]
    storage: list[str] = []
    if weights.export is not None:
        result.append(_unit(NFS_SERVER, after=network, started_by="boot"))
    if weights.mount is not None:
        unit = weights.mount.unit
        result.append(_unit(unit, after=network, requires=network, started_by="boot"))
        storage.append(unit)
    if engram is not None:
        if engram.mount_unit is not None:
            result.append(_unit(engram.mount_unit, started_by="boot"))
            storage.append(engram.mount_unit)
        result.append(_unit(PACK, after=storage, requires=storage))
        storage = [*storage, PACK]
    result.append(_unit(GUARD))
    needed = [*network, *storage, GUARD]
    result.append(_unit(SUPERVISOR, after=needed, requires=needed))
    result.append(_unit(ENGINE, after=needed, requires=needed, started_by="supervisor"))
    if head:
        result.append(_unit(READY, after=[ENGINE], requires=[ENGINE], started_by="supervisor"))
    return result


def _unit(
    name: str,
    after: list[str] | None = None,
    requires: list[str] | None = None,
    started_by: Literal["boot", "target", "supervisor"] = "target",
) -> UnitPlan:
    return UnitPlan(name=name, after=after or [], requires=requires or [], started_by=started_by)
