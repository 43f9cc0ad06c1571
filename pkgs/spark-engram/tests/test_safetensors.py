import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spark_engram.errors import SourceError
from spark_engram.safetensors import parse_header, read_places

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4)
    ),
    max_leaves=12,
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F8_E4M3", "F8_E8M0", "BF16", "X"]) | JSON,
        "shape": st.lists(st.integers(-2, 300), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-2, 300), max_size=3) | JSON,
    },
)


@given(st.dictionaries(st.text(max_size=8), ENTRY | JSON, max_size=4), st.integers(0, 500))
def test_a_hostile_header_gives_places_inside_the_file_or_an_error(tmp_path_factory, entries, size):
    header = json.dumps(entries).encode()
    total = 8 + len(header) + size
    try:
        places = parse_header(tmp_path_factory.getbasetemp() / "x", header, total)
    except SourceError:
        return
    for place in places.values():
        assert 0 <= place.offset <= place.offset + place.size <= total


@given(st.binary(max_size=200))
def test_random_bytes_are_no_crash(tmp_path_factory, raw):
    path = tmp_path_factory.getbasetemp() / "random.safetensors"
    path.write_bytes(raw)
    try:
        read_places(path)
    except SourceError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize("length", [0, 1, 2**63, 10**9])
def test_a_length_beyond_the_file_is_refused(tmp_path, length):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(SourceError, match="not a safetensors file, or truncated"):
        read_places(path)


def test_deep_nesting_is_refused(tmp_path):
    with pytest.raises(SourceError, match="not valid JSON"):
        parse_header(tmp_path, b"[" * 200_000, 10**6)


def test_a_tensor_past_the_end_says_truncated(tmp_path):
    header = json.dumps({"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}).encode()
    with pytest.raises(SourceError, match="truncated shard"):
        parse_header(tmp_path / "x", header, 8 + len(header) + 8)


def test_a_size_that_does_not_fit_the_shape_is_refused(tmp_path):
    header = json.dumps({"a": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 9]}}).encode()
    with pytest.raises(SourceError, match="do not hold BF16"):
        parse_header(tmp_path / "x", header, 10**6)
