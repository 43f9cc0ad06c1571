"""sglang-router on the head: one address for several clusters. We write no balancer."""

from __future__ import annotations

from typing import Final

from spark_appliance.model.cluster import Cluster
from spark_appliance.model.plan import ReplicaPlan, RouterPlan

PACKAGE: Final = "sglang-router"
VERSION: Final = "0.3.2"
"""Has wheels for aarch64 and x86_64 (manylinux_2_17, abi3 from CPython 3.8)."""

HEALTH_INTERVAL: Final = 5
HEALTH_FAILURES: Final = 2
"""A replica that dies is left out after 10 s; until then requests sent to it fail (seen with
0.3.2: a refused connection is answered with 500, not sent on). An idle engine answers a health
check by a generation of one token, so checks are not for free."""

HEALTH_TIMEOUT: Final = 30
"""More than the 20 s that the engine itself allows its health route (sglang 0.5.23
srt/entrypoints/http_server.py:218)."""

REQUEST_TIMEOUT: Final = 3600
"""A million tokens of prompt were seen to take 324 s (knapcio), long answers far more."""

METRICS_PORT: Final = 29001
_ANY: Final = "0.0.0.0"  # noqa: S104


def router_plan(cluster: Cluster) -> RouterPlan | None:
    """Return the router of a cluster that has one."""
    router = cluster.router
    if router is None:
        return None
    own = "127.0.0.1" if cluster.api.bind == _ANY else cluster.api.bind
    replicas = [ReplicaPlan(name=cluster.name, url=f"http://{own}:{cluster.api.port}")]
    replicas += [ReplicaPlan(name=item.name, url=item.url) for item in router.replicas]
    argv = ["--host", router.bind, "--port", str(router.port), "--policy", router.policy]
    argv += ["--worker-urls", *(replica.url for replica in replicas)]
    argv += ["--health-check-interval-secs", str(HEALTH_INTERVAL)]
    argv += ["--health-failure-threshold", str(HEALTH_FAILURES)]
    argv += ["--health-check-timeout-secs", str(HEALTH_TIMEOUT)]
    argv += ["--request-timeout-secs", str(REQUEST_TIMEOUT)]
    # the default listens on every address, without a key
    argv += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(METRICS_PORT)]
    here = "127.0.0.1" if router.bind == _ANY else router.bind
    outside = cluster.nodes[0].address if router.bind == _ANY else router.bind
    return RouterPlan(
        package=PACKAGE,
        version=VERSION,
        url=f"http://{outside}:{router.port}/v1",
        port=router.port,
        readiness_url=f"http://{here}:{router.port}/readiness",
        argv=argv,
        replicas=replicas,
    )
