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


_failed_step = pytest.StashKey[str]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note when a step on the way from nothing to an endpoint fails."""
    report: pytest.TestReport = yield  # type: ignore[misc]
    step = item.path.name == "test_vm_fleet.py" and "serving" not in item.fixturenames
    if step and call.when == "call" and report.failed:
        item.session.stash.setdefault(_failed_step, item.name)
    return report  # type: ignore[return-value]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Do not wait for an endpoint that an earlier step has failed to bring up."""
    step = item.session.stash.get(_failed_step, None)
    if step is not None and item.get_closest_marker("vm") is not None:
        pytest.skip(f"VM tests: {step} failed")


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
def serving(fleet: Fleet) -> Fleet:
    """Return the fleet, serving; what is missing for that is done first."""
    if not fleet.status()["ready"]:
        if fleet.machine("spark1").execute("test -e /etc/spark/plan.json")[0]:
            for command in ("install", "share", "pack"):
                fleet.do(command).ok()
        fleet.do("serve", "--no-doctor").ok()
    return fleet
