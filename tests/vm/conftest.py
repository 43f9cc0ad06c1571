"""One fleet for all tests; what a machine lacks for it is named when they are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import base_image, engine_image, spec
from harness.fleet import Fleet
from harness.log import say

FULL = "SPARK_VM_FULL"


def missing() -> str | None:
    """Return why guests cannot run here, None when they can."""
    qemu = spec.missing_qemu()
    tools = [*base_image.missing_tools(), *engine_image.missing_tools()]
    if qemu is not None:
        return qemu
    if tools:
        return f"{', '.join(tools)} not installed"
    if os.getuid() != 0:
        return "the guests' image is unpacked with its owners: needs root"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, and the long part unless it is asked for."""
    reason = missing()
    for item in items:
        if item.get_closest_marker("vm") is None:
            continue
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"VM tests: {reason}"))
        elif item.get_closest_marker("vm_full") is not None and os.environ.get(FULL) != "1":
            item.add_marker(pytest.mark.skip(reason=f"the long VM tests run with {FULL}=1"))


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Three guests that are set up as their owner would, before anything of ours is there."""
    folder = os.environ.get("SPARK_VM_FOLDER")
    path = Path(folder) if folder else tmp_path_factory.mktemp("vm") / "fleet"
    with Fleet(path) as fleet:
        fleet.driver.start_all()
        for machine in fleet.machines:
            machine.wait_for_unit("ssh.service")
        say("fleet", "booted")
        with ThreadPoolExecutor() as pool:
            list(pool.map(fleet.set_up, [machine.name for machine in fleet.machines]))
        say("fleet", "set up")
        yield fleet


@pytest.fixture
def serving(fleet: Fleet) -> Iterator[Fleet]:
    """The fleet, serving; it is started when an earlier test left it down."""
    if not fleet.status()["ready"]:
        fleet.do("serve", "--no-doctor").ok()
    yield fleet
