"""Every check against good facts, and against facts that are wrong in one thing."""

from __future__ import annotations

import dataclasses

import pytest
from doctor_mutations import CASES, Case, measured, put, running, unit

from spark_appliance.doctor.evaluate import evaluate
from spark_appliance.doctor.examine import base
from spark_appliance.doctor.registry import CHECKS, Answer, Facts
from spark_appliance.doctor.result import Result
from spark_appliance.model.plan import NcclLibrary, Plan
from spark_appliance.names import ENGINE

LEVELS = ("config", "probe", "deep")


def judge(facts: Facts) -> list[Result]:
    return evaluate(facts, LEVELS, strict=True)


def troubles(results: list[Result]) -> dict[str, str]:
    """Return the worst status of each check that is not content."""
    found: dict[str, str] = {}
    for result in results:
        if result.status in ("warn", "fail") and found.get(result.check) != "fail":
            found[result.check] = result.status
    return found


def test_healthy_nixos_nodes_have_nothing_to_say(good: Facts):
    results = judge(measured(good))
    assert [(r.check, r.node, r.seen) for r in results if r.status != "ok"] == []
    assert {r.check for r in results} == {check.id for check in CHECKS}


def test_healthy_dgx_nodes_have_nothing_to_say(good_dgx: Facts):
    results = judge(measured(good_dgx))
    assert [(r.check, r.node, r.seen) for r in results if r.status != "ok"] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exactly_the_right_check_sees_it(case: Case, good: Facts, good_dgx: Facts):
    results = judge(case.mutate(measured(good_dgx if case.dgx else good)))
    found = troubles(results)
    assert found.get(case.check) == case.status
    assert found.keys() == {case.check} | case.also
    for result in results:
        if result.status in ("warn", "fail"):
            assert result.seen and result.means and result.do


def test_every_check_has_a_bad_variant():
    told = {case.check for case in CASES} | {"ACCESS.SSH", "NCCL.MARKER"}  # below
    assert told == {check.id for check in CHECKS}


def test_a_silent_node_is_named_and_all_its_checks_fail(good: Facts):
    gone = Answer(None, 1.0, 11.0, "Connection timed out", "check that the node is up")
    results = judge(dataclasses.replace(good, answers={**good.answers, "spark3": gone}))
    ssh = next(r for r in results if r.check == "ACCESS.SSH" and r.node == "spark3")
    assert (ssh.status, ssh.do) == ("fail", "check that the node is up")
    assert "Connection timed out" in ssh.seen
    mine = [r for r in results if r.node == "spark3" and r.level == "probe"]
    node_checks = [check for check in CHECKS if check.node is not None and check.level == "probe"]
    failed = {r.check for r in mine if r.status == "fail"}
    assert {check.id for check in node_checks} <= failed
    others = [r for r in results if r.node in ("spark1", "spark2") and r.status == "fail"]
    assert others == []


def test_a_node_that_was_not_asked_is_no_failure(good: Facts):
    answers = {"spark2": good.answers["spark2"]}
    facts = dataclasses.replace(good, answers=answers)
    results = evaluate(facts, ("probe",), nodes=("spark2",), strict=True)
    assert troubles(results) == {}
    assert {r.node for r in results if r.status == "ok"} <= {"spark2", None}


def test_before_install_what_install_brings_is_not_judged(good: Facts):
    missing = {"load": "not-found", "active": "inactive"}
    facts = good
    for node in good.plan.nodes:
        names = [unit_plan.name for unit_plan in node.units]
        for name in names:
            facts = unit(facts, name, node=node.name, **missing)
        facts = put(
            facts, "engine", {"unit": {"LoadState": "not-found"}, "errors": {}}, node=node.name
        )
        facts = put(facts, "files", {"/etc/spark/plan.json": None, "errors": {}}, node=node.name)
    results = judge(facts)
    assert troubles(results) in ({}, {"HOST.MEMLOCK": "warn"})
    skipped = {r.check for r in results if r.status == "skip" and r.level == "probe"}
    assert {"HOST.UNITS", "HOST.PLAN", "IMG.DIGEST", "IMG.MODELCLASS", "NCCL.HASH"} <= skipped


@pytest.mark.parametrize(
    "image", ["registry.example/sglang@sha256:" + "a" * 64, "sha256:" + "b" * 64]
)
def test_the_image_of_the_plan_runs_by_its_digest_or_its_id(good_dgx: Facts, image: str):
    results = judge(running(good_dgx, image))
    assert troubles(results) == {}
    live = [r for r in results if r.check == "IMG.LIVE"]
    assert [r.status for r in live] == ["ok"] * 3
    assert {r.seen for r in live} == {f"{image.rpartition('@')[2][:19]}…"}


def test_while_the_engine_runs_its_own_memory_and_processes_are_fine(good: Facts):
    facts = good
    for node in good.plan.nodes:
        facts = unit(facts, ENGINE, node=node.name)
        facts = put(facts, "memory", "meminfo", "MemAvailable", 6 << 30, node=node.name)
        app = {"pid": 5, "name": "python3", "memory": "[N/A]", "unit": ENGINE}
        facts = put(facts, "gpu", "apps", [app], node=node.name)
        port = {"port": 8888, "address": "192.168.1.11", "process": {"pid": 5, "unit": ENGINE}}
        facts = put(facts, "ports", "listening", [port], node=node.name)
    assert troubles(judge(facts)) == {}


def _ring(good: Facts, ring_plan: Plan, **entry: object) -> list[Result]:
    """Judge a ring by one known document a node; only the checks of NCCL are of interest."""
    answers = {node.name: good.answers["spark2"] for node in ring_plan.nodes}
    facts = dataclasses.replace(good, plan=ring_plan, answers=answers)
    for node in ring_plan.nodes:
        assert node.nccl_library is not None
        facts = put(facts, "files", node.nccl_library.path, entry or None, node=node.name)
    return [r for r in judge(facts) if r.check in ("NCCL.MARKER", "NCCL.HASH")]


def test_a_ring_needs_the_library_with_ring_support(good: Facts, ring_plan: Plan):
    library = ring_plan.nodes[0].nccl_library
    assert isinstance(library, NcclLibrary)
    digest = library.sha256 or "6" * 64
    fine = _ring(good, ring_plan, sha256=digest, bytes=1, markers={"ring": True})
    assert {r.status for r in fine} == {"ok"}
    stock = _ring(good, ring_plan, sha256=digest, bytes=1, markers={"ring": False})
    assert {(r.check, r.status) for r in stock} == {("NCCL.MARKER", "fail"), ("NCCL.HASH", "ok")}
    missing = _ring(good, ring_plan)
    assert {(r.check, r.status) for r in missing} == {
        ("NCCL.MARKER", "skip"),
        ("NCCL.HASH", "fail"),
    }
    if library.sha256 is not None:
        other = _ring(good, ring_plan, sha256="7" * 64, bytes=1, markers={"ring": True})
        assert ("NCCL.HASH", "fail") in {(r.check, r.status) for r in other}


def test_an_error_inside_a_check_is_a_failure_of_that_check_only(
    good: Facts, monkeypatch: pytest.MonkeyPatch
):
    check = CHECKS.get("HOST.SWAP")
    assert check is not None

    def broken(*_args: object):
        raise ZeroDivisionError("boom")

    monkeypatch.setitem(CHECKS._checks, "HOST.SWAP", dataclasses.replace(check, node=broken))
    results = evaluate(good, ("probe",))
    assert troubles(results) == {"HOST.SWAP": "fail"}
    assert "ZeroDivisionError" in next(r.seen for r in results if r.check == "HOST.SWAP")


def test_a_newer_plan_concerns_only_the_nodes_it_changes(good: Facts):
    data = good.plan.model_dump(mode="json")
    data["source"]["cluster_sha256"] = "0" * 64
    data["nodes"][1]["engram"]["cache_bytes"] += 1
    newer = dataclasses.replace(base(Plan.model_validate(data)), answers=good.answers)
    found = {r.node: r.status for r in evaluate(newer, ("probe",)) if r.check == "HOST.PLAN"}
    assert found == {"spark1": "ok", "spark2": "warn", "spark3": "ok"}
