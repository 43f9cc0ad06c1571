"""Every way a text can fail to be one plain YAML document, each with its place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_appliance.errors import InputError
from spark_appliance.model.yamlfile import MAX_BYTES, Document, parse

BOMB = b"a: &a [1,1,1,1,1,1,1,1,1]\n" + b"".join(
    b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 9)) for i in range(8)
)

CASES = [
    ("empty", b"", "yaml.empty", (1, 1)),
    ("comments only", b"# nothing\n", "yaml.empty", (1, 1)),
    ("duplicate key", b"name: a\nprofile: b\nname: c\n", "yaml.duplicate-key", (3, 1)),
    ("duplicate key below", b"a:\n  b: 1\n  b: 2\n", "yaml.duplicate-key", (3, 3)),
    ("tab", b"a:\n\tb: 1\n", "yaml.tab", (2, 1)),
    ("tab after spaces", b"a:\n  \tb: 1\n", "yaml.tab", (2, 3)),
    ("not utf-8", b"name: caf\xe9\n", "yaml.not-utf8", (1, 10)),
    ("utf-16", "a: 1".encode("utf-16"), "yaml.not-utf8", (1, 1)),
    ("10 MB", b"a: " + b"x" * (10 << 20), "yaml.too-large", (1, 1)),
    ("bomb", BOMB, "yaml.bomb", None),
    ("recursive alias", b"a: &a [*a]\n", "yaml.bomb", (1, 4)),
    ("deep", b"[" * 40 + b"]" * 40, "yaml.too-deep", (1, 33)),
    ("very deep", b"[" * 100_000, None, None),
    ("two documents", b"a: 1\n---\nb: 2\n", "yaml.two-documents", (2, 1)),
    ("python tag", b"a: !!python/object:os.system x\n", "yaml.tag", (1, 4)),
    ("bad integer tag", b"a: !!int x\n", "yaml.number", (1, 4)),
    ("bad truth tag", b"a: !!bool maybe\n", "yaml.tag", (1, 4)),
    ("octal number", b"a: 010\n", "yaml.number", (1, 4)),
    ("base-60 number", b"a: 2:30\n", "yaml.number", (1, 4)),
    ("huge number", b"a: 1" + b"0" * 5000 + b"\n", "yaml.number", (1, 4)),
    ("mapping tag on text", b"a: !!map x\n", "yaml.tag", (1, 4)),
    ("text tag on a mapping", b"a: !!str {b: 1}\n", "yaml.tag", (1, 4)),
    ("list as key", b"? [1]\n: 2\n", "yaml.key", (1, 3)),
    ("merge key", b"<<: {a: 1}\n", "yaml.key", (1, 1)),
    ("unclosed", b"a: [1\nb: 2\n", "yaml.syntax", None),
    ("two colons", b"a: b: c\n", "yaml.syntax", (1, 5)),
    ("unknown alias", b"a: *nope\n", "yaml.syntax", (1, 4)),
    ("control character", b"a: 1\nb: \x07\n", "yaml.character", (2, 4)),
]


@pytest.mark.parametrize(
    ("raw", "rule", "place"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_bad_file_is_named_with_its_place(
    raw: bytes, rule: str | None, place: tuple[int, int] | None
) -> None:
    with pytest.raises(InputError) as caught:
        parse("f.yaml", raw)
    problem = caught.value.problems[0]
    if rule is not None:
        assert problem.rule == rule
    assert problem.where is not None
    assert problem.where.file == "f.yaml"
    assert problem.where.line is not None
    if place is not None:
        assert (problem.where.line, problem.where.column) == place
    assert problem.remedy
    assert caught.value.exit_status == 2


def test_every_duplicate_is_reported() -> None:
    with pytest.raises(InputError) as caught:
        parse("f.yaml", b"a: 1\na: 2\nb: 1\nb: 2\n")
    assert [problem.where.line for problem in caught.value.problems if problem.where] == [2, 4]


def test_bom_aliases_and_dates_are_fine() -> None:
    document = parse("f.yaml", b"\xef\xbb\xbfa: &x [1, 2]\nb: *x\nc: 2026-11-30\n")
    assert document.data == {"a": [1, 2], "b": [1, 2], "c": "2026-11-30"}


def test_places_point_at_keys_values_and_nearest_parents() -> None:
    document = parse("f.yaml", b"nodes:\n  - name: a\n    address: b\n")
    assert str(document.locate(("nodes", 0, "address"))) == "f.yaml:3:14"
    assert str(document.locate(("nodes", 0, "address"), key=True)) == "f.yaml:3:5"
    assert str(document.locate(("nodes", 0, "engram", "device"))) == "f.yaml:2:5"
    assert str(document.locate(("nowhere",))) == "f.yaml:1:1"


def test_limit_is_exact() -> None:
    fits = b"a: " + b"x" * (MAX_BYTES - 3)
    assert parse("f.yaml", fits).data["a"][:2] == "xx"
    with pytest.raises(InputError):
        parse("f.yaml", fits + b"x")


@given(st.binary(max_size=300))
def test_any_bytes_give_a_document_or_a_clear_error(raw: bytes) -> None:
    try:
        assert isinstance(parse("f.yaml", raw), Document)
    except InputError as error:
        assert all(problem.where and problem.remedy for problem in error.problems)


@given(st.text(alphabet="a:-[]{}&*!#'\"|>%@ \n\t?,0", max_size=80))
def test_any_yaml_like_text_gives_a_document_or_a_clear_error(text: str) -> None:
    try:
        parse("f.yaml", text.encode())
    except InputError as error:
        assert all(problem.where and problem.remedy for problem in error.problems)
