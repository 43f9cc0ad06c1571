"""Whatever a node answers, a check gives a verdict: never a traceback."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

from doctor_mutations import measured
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spark_appliance.doctor import engram_header
from spark_appliance.doctor.bandwidth import parse
from spark_appliance.doctor.document import BadDocument, Document, read_document
from spark_appliance.doctor.evaluate import evaluate
from spark_appliance.doctor.registry import Facts
from spark_appliance.doctor.report import make_report

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(
        ["0x", "-1", "¼", "::1/64", "10.77.0.0/99", "1e999", "\udc80", "2.30.x", "x" * 4000]
    )
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=8) | st.sampled_from(["errors", "1", "ports"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
SETTINGS = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        for key, inner in value.items():
            found += places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value[:4]):
            found += places(inner, (*path, index))
    return found


def spoil(draw: st.DrawFn, data: Any) -> None:
    """Replace or drop a value somewhere; every level of the document is as likely as any other."""
    everywhere = places(data)
    depth = draw(st.sampled_from(sorted({len(path) for path in everywhere})))
    *keys, last = draw(st.sampled_from([path for path in everywhere if len(path) == depth]))
    place = data
    for key in keys:
        place = place[key]
    if isinstance(place, dict) and draw(st.booleans()):
        del place[last]
    else:
        place[last] = draw(VALUES)


@st.composite
def spoiled(draw: st.DrawFn, data: Any) -> Any:
    data = copy.deepcopy(data)
    for _ in range(draw(st.integers(1, 4))):
        if not places(data):
            break
        spoil(draw, data)
    return data


def check(facts: Facts) -> None:
    results = evaluate(facts, ("config", "probe", "deep"), strict=True)
    assert {result.status for result in results} <= {"ok", "warn", "fail", "skip"}
    for result in results:
        assert result.status in ("ok", "skip") or (result.means and result.do)
    report = make_report(facts, results, file="x", started=0.0, levels=["probe"])
    json.dumps(report.model_dump(mode="json"))


@SETTINGS
@given(data=st.data())
def test_a_spoiled_probe_document(good: Facts, data: st.DataObject):
    answer = good.answers["spark2"]
    document = Document(data.draw(spoiled(answer.document.data)))
    answers = {**good.answers, "spark2": dataclasses.replace(answer, document=document)}
    check(dataclasses.replace(good, answers=answers))


@SETTINGS
@given(data=st.data())
def test_a_spoiled_document_of_the_head_with_docker(good_dgx: Facts, data: st.DataObject):
    answer = good_dgx.answers["spark1"]
    document = Document(data.draw(spoiled(answer.document.data)))
    answers = {**good_dgx.answers, "spark1": dataclasses.replace(answer, document=document)}
    check(dataclasses.replace(good_dgx, answers=answers))


@SETTINGS
@given(data=st.data())
def test_a_spoiled_measurement(good: Facts, data: st.DataObject):
    facts = measured(good)
    answer = facts.deep["spark2"]
    document = Document(data.draw(spoiled(answer.document.data)))
    deep = {**facts.deep, "spark2": dataclasses.replace(answer, document=document)}
    check(dataclasses.replace(facts, deep=deep))


@SETTINGS
@given(
    st.text() | VALUES.map(lambda value: json.dumps({"probe": 1, "node": "a", "sections": value}))
)
def test_any_text_is_a_document_or_none(text: str):
    try:
        document = read_document(text, "a")
    except BadDocument:
        return
    assert document.data["node"] == "a"


@SETTINGS
@given(
    st.binary(max_size=5000)
    | st.binary(min_size=4088, max_size=4088).map(lambda b: b"SPENGRAM" + b)
)
def test_any_page_is_a_header_or_none(page: bytes):
    try:
        engram_header.parse(page)
    except engram_header.BadHeader:
        return


@SETTINGS
@given(st.text())
def test_any_text_is_a_bandwidth_or_none(text: str):
    result = parse(text)
    assert result is None or result >= 0
