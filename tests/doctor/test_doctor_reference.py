"""The generated pages are current, and every problem that can be caught early is accounted for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doctor_nodes import ROOT

from spark_appliance.doctor.catalogue import CATCHES, PROBLEMS, Known
from spark_appliance.doctor.checks.config import group_of
from spark_appliance.doctor.reference import covered, pages
from spark_appliance.doctor.registry import CHECKS, Check, Registry


@pytest.mark.parametrize("name", sorted(pages()))
def test_page_is_current(name: str):
    path = ROOT / "docs" / name
    assert path.read_text(encoding="utf-8") == pages()[name], (
        "run: python -m spark_appliance.doctor.reference"
    )


@pytest.mark.parametrize(
    "problem", [p for p in PROBLEMS if set(p.catch) & {"C", "D"}], ids=lambda p: p.number
)
def test_what_can_be_caught_early_is_caught_or_explained(problem: Known):
    assert covered(problem.number) or problem.elsewhere
    if "D" in problem.catch and not problem.elsewhere:
        assert any(check.level != "config" for check in covered(problem.number))


def test_numbers_are_unique_and_letters_are_known():
    numbers = [problem.number for problem in PROBLEMS]
    assert numbers == sorted(set(numbers), key=lambda number: int(number[1:]))
    assert {letter for problem in PROBLEMS for letter in problem.catch} <= set(CATCHES)


def test_checks_name_only_known_problems():
    known = {problem.number for problem in PROBLEMS}
    assert {number for check in CHECKS for number in check.problems} <= known


@pytest.mark.parametrize("check", list(CHECKS), ids=lambda check: check.id)
def test_words_of_a_check(check: Check):
    function = check.node or check.cluster
    assert (check.node is None) != (check.cluster is None)
    assert function is not None and function.__doc__
    assert check.means.endswith(".") and check.do.endswith(".")


def test_rules_of_the_cluster_file_name_problems_that_their_check_lists():
    """The P numbers in messages of the rules are those that the CFG checks claim to catch."""
    text = "\n".join(path.read_text() for path in (ROOT / "spark_appliance").glob("[mprt]*/*.py"))
    claimed: dict[str, set[str]] = {}
    for check in CHECKS:
        claimed[check.id] = set(check.problems)
    found = re.findall(
        r'"(engine|parallel|memory|topology)\.[a-z0-9-]+",\s*(?:path,)?[^"]*((?:f?"[^"]*"\s*)+)',
        text,
    )
    for family, message in found:
        for number in re.findall(r"P\d\d+", message):
            assert number in claimed[f"CFG.{group_of(family + '.x')}"], (family, message)


def test_ids_are_never_given_twice():
    registry = Registry()
    registry.node("A.B", means="m.", do="d.")(lambda *_: [])
    with pytest.raises(ValueError, match=re.escape("A.B")):
        registry.node("A.B", means="m.", do="d.")(lambda *_: [])
    with pytest.raises(ValueError, match="lower"):
        registry.node("A.lower", means="m.", do="d.")(lambda *_: [])


def test_the_guide_names_every_file_it_should():
    guide = (ROOT / "docs" / "doctor-guide.md").read_text()
    for name in pages():
        assert name in guide
    assert Path(ROOT / "docs" / "doctor-guide.md").stat().st_size < 12_000
