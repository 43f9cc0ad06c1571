"""Put a supervisor together for this node and run it until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from ipaddress import IPv4Address

from spark_appliance.names import CLUSTER_KEY
from spark_appliance.node.journal import Journal
from spark_appliance.node.notify import Notifier
from spark_appliance.node.plan import NodeContext
from spark_appliance.node.supervisor.head import Head
from spark_appliance.node.supervisor.hub import Hub, resolve
from spark_appliance.node.supervisor.protocol import Identity, Timing, read_key
from spark_appliance.node.supervisor.rank import Down, LocalRank
from spark_appliance.node.supervisor.restarts import Restarts
from spark_appliance.node.supervisor.state import State, unfinished_restarts
from spark_appliance.node.supervisor.worker import Worker
from spark_appliance.node.systemctl import Units


async def supervise(
    context: NodeContext, units: Units, journal: Journal, notifier: Notifier, timing: Timing
) -> None:
    """Run this node's supervisor until SIGTERM or SIGINT.

    Raises:
        GaveUpError: when the restarts are used up (head only).
        NodeError: when the port, the key or systemd cannot be used.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    watchdog = asyncio.create_task(_feed(notifier))
    state = State(context, journal, notifier)
    try:
        if context.is_head:
            await run_head(context, units, journal, notifier, timing, state, stop)
        else:
            await run_worker(context, units, journal, notifier, timing, state, stop)
    finally:
        watchdog.cancel()
        notifier.stopping(state.text)


async def run_head(
    context: NodeContext,
    units: Units,
    journal: Journal,
    notifier: Notifier,
    timing: Timing,
    state: State,
    stop: asyncio.Event,
) -> None:
    """Run the head's supervisor until ``stop``.

    Raises:
        GaveUpError, NodeError: as ``supervise``.
    """
    workers = {view.text("name"): view.text("address") for view in context.others}
    me = _identity(context, journal, alone=not workers)
    plan = context.plan.view("restart")
    restarts = Restarts(
        plan.integer("limit"),
        plan.integer("window"),
        tuple(plan.integers("backoff")),
        unfinished_restarts(context),
    )
    state.restarts = restarts.times

    def trouble(node: str, down: Down) -> None:
        head.trouble(node, down)

    def changed() -> None:
        state.connected = sorted(hub.links)
        state.save()

    local = LocalRank(
        context, units, journal, timing.poll, lambda down: trouble(context.name, down)
    )
    hub = Hub(me, workers, timing, journal, trouble, changed)
    head = Head(context, local, hub, units, restarts, state, journal, timing)
    await local.clear()
    if workers:
        port = context.plan.view("ports").integer("supervisor")
        await hub.listen(await _listen_address(context, list(workers.values())), port)
    notifier.ready("supervising")
    await head.run(stop)


async def run_worker(
    context: NodeContext,
    units: Units,
    journal: Journal,
    notifier: Notifier,
    timing: Timing,
    state: State,
    stop: asyncio.Event,
) -> None:
    """Run a worker's supervisor until ``stop``.

    Raises:
        NodeError: as ``supervise``.
    """
    head = context.head
    address = head.text("address")

    def down(how: Down) -> None:
        worker.down(how)

    local = LocalRank(context, units, journal, timing.poll, down)
    worker = Worker(
        me=_identity(context, journal, alone=False),
        head=head.text("name"),
        address=address,
        port=context.plan.view("ports").integer("supervisor"),
        source=await _source_address(context, address),
        local=local,
        state=state,
        journal=journal,
        timing=timing,
    )
    await local.clear()
    notifier.ready("supervising")
    await worker.run(stop)


def _identity(context: NodeContext, journal: Journal, *, alone: bool) -> Identity:
    key = read_key(context.path(CLUSTER_KEY))
    if key is None and not alone:
        journal.warning(
            f"{CLUSTER_KEY} is not there: only the addresses of the plan protect the supervisors; "
            "put the same random key on every node"
        )
    return Identity(context.name, context.shared_sha256, key)


async def _listen_address(context: NodeContext, others: list[str]) -> str:
    """Return the head's management address.

    A host name may lead to this host's loopback (Debian's /etc/hosts says 127.0.1.1): no worker
    reaches that, so every address is opened then; who may talk is decided by the peer's address.
    """
    own = await resolve(context.node.text("address"))
    address = min(own, default="0.0.0.0")  # noqa: S104 - peers are filtered
    if IPv4Address(address).is_loopback and not await _all_loopback(others):
        return "0.0.0.0"  # noqa: S104 - peers are filtered
    return address


async def _source_address(context: NodeContext, head: str) -> str | None:
    """Return the address to come from: the one that the head's plan knows this node by."""
    own = min(await resolve(context.node.text("address")), default=None)
    if own is None or (IPv4Address(own).is_loopback and not await _all_loopback([head])):
        return None
    return own


async def _all_loopback(hosts: list[str]) -> bool:
    found = [address for host in hosts for address in await resolve(host)]
    return bool(found) and all(IPv4Address(address).is_loopback for address in found)


async def _feed(notifier: Notifier) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        while notifier.watchdog_seconds:
            notifier.alive()
            await asyncio.sleep(notifier.watchdog_seconds)
