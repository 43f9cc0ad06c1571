"""Names that the plan, both adapters and the programs on the nodes share.

Standard library only: this file travels to nodes that have nothing of ours installed.
"""

from __future__ import annotations

from typing import Final

FABRIC: Final = "spark-fabric.service"
PACK: Final = "spark-engram-pack.service"
GUARD: Final = "spark-guard.service"
SUPERVISOR: Final = "spark-supervisor.service"
ENGINE: Final = "spark-engine.service"
READY: Final = "spark-ready.service"
ROUTER: Final = "spark-router.service"
TARGET: Final = "spark.target"
NFS_SERVER: Final = "nfs-server.service"

PLAN_PATH: Final = "/etc/spark/plan.json"
"""Where every node keeps its own plan (spark_appliance.node.projection)."""

PLAN_VERSION: Final = 1
"""Version of the plan's schema; readers refuse any other."""

ESP_PLAN: Final = "spark/cluster.lock.json"
ESP_NODE: Final = "spark/node"
ESP_KEYS: Final = "spark/authorized_keys"
"""What the owner puts on the ESP of a disk image: the plan, the name of the node, root's SSH keys
(modules/image/access.nix)."""

CLUSTER_KEY: Final = "/etc/spark/cluster-key"
"""Optional secret of the supervisors, the same file on every node, mode 0600."""

ENGINE_USER: Final = "spark"
"""System user and group of the engine; owns nothing but its runtime and cache directories."""

CONTAINER: Final = "spark-engine"
"""Name of the engine's container on DGX OS."""

CONTAINER_SLICE: Final = "sparkengine.slice"
"""Parent cgroup of the container; without a dash it is the same path for both cgroup drivers of
Docker, so that the guard can kill it by one write."""

GAVE_UP_STATUS: Final = 3
"""Exit status of the supervisor once its restarts are used up: systemd must not start it again."""

HEAD_STOP_TIMEOUT: Final = 60
"""Seconds for the head's engine to finish after SIGTERM, then SIGKILL."""

WORKER_STOP_TIMEOUT: Final = 30
"""A worker ignores SIGTERM until rank 0 says goodbye (sglang 0.5.23 entrypoints/engine.py:1260);
the head goes first, so this only bites when the head is gone."""
