"""Whether this is a moment and a place to measure."""

from __future__ import annotations

import asyncio
import socket

from spark_appliance.bench import engine
from spark_appliance.bench.client import Client, EndpointError
from spark_appliance.bench.endpoint import Address
from spark_appliance.bench.result import Failure

# SGLang publishes its load now and then, so a request that just ended may still be counted.
_SETTLE_TRIES = 4
_SETTLE_S = 1.5


async def busy(client: Client) -> engine.Load | None:
    """Return the endpoint's load, after a few seconds' grace; None where it does not say."""
    found = await engine.load(client)
    for _ in range(_SETTLE_TRIES):
        if found is None or found.running + found.waiting == 0:
            break
        await asyncio.sleep(_SETTLE_S)
        found = await engine.load(client)
    return found


async def require_idle(client: Client, *, strict: bool) -> list[str]:
    """Refuse to measure beside other requests; returns warnings.

    Raises EndpointError when other requests run or, with ``strict``, when that is not known.
    """
    found = await busy(client)
    if found is None:
        unknown = "the endpoint does not say whether other requests run"
        if strict:
            raise EndpointError(
                Failure(
                    kind="load-unknown",
                    message=unknown,
                    remedy="make sure that it is idle and leave out --check; SGLang tells it in "
                    "/v1/loads, or in /metrics with --enable-metrics",
                )
            )
        return [unknown + ": make sure that it was idle"]
    if found.running + found.waiting:
        raise EndpointError(
            Failure(
                kind="busy",
                message=f"the endpoint is busy: {found.running} requests running, "
                f"{found.waiting} waiting ({found.source})",
                remedy="wait until they have ended; --no-check measures all the same, and says so",
            )
        )
    return []


async def readiness(client: Client) -> str | None:
    """Return None when requests make sense (also when they fail for good), or what is missing."""
    try:
        models, _ = await client.get("/v1/models")
        health, _ = await client.get("/health", timeout=30.0)
    except EndpointError as error:
        return error.failure.kind
    if models in (401, 403) or (models == 200 and health in (200, 404)):
        return None
    return f"/v1/models {models}, /health {health}"


def place_warnings(address: Address) -> list[str]:
    """Warn when the client runs on the machine that serves (the head node)."""
    if not is_this_machine(address.host, address.port):
        return []
    warning = (
        "this client runs on the machine that serves, and takes processor time and memory from "
        "it: measure from another machine"
    )
    return [warning]


def is_this_machine(host: str, port: int) -> bool:
    """Return whether a URL's host is one of this machine's own addresses.

    An address is ours exactly when a socket can be bound to it.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind((address[0], 0, *address[2:]))
        except OSError:
            continue
        return True
    return False
