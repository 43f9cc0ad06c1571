"""All checks; importing this package registers them in the order in which they are told."""

from spark_appliance.doctor.checks import (  # noqa: I001 - the order is that of the report
    config,
    access,
    host,
    resources,
    network,
    rdma,
    gpu,
    engine,
    nccl,
    store,
    engram,
    deep,
)

__all__ = [
    "access",
    "config",
    "deep",
    "engine",
    "engram",
    "gpu",
    "host",
    "nccl",
    "network",
    "rdma",
    "resources",
    "store",
]
