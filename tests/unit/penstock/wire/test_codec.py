import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidFieldError
from penstock.v1 import types_pb2
from penstock.wire.codec import (
    decode_versions,
    encode_versions,
    float32_array,
    int32_array,
    int32_bytes,
    join_versions,
    merge_versions,
)


@given(st.lists(st.integers(0, 5), max_size=50), st.lists(st.integers(0, 5), max_size=50))
def test_versions_survive_run_length_coding_and_joining(first, second):
    joined = join_versions([encode_versions(first), encode_versions(second)])

    decoded = decode_versions(joined, num_tokens=len(first) + len(second), field="v")

    assert decoded.tolist() == first + second
    assert merge_versions(joined) == encode_versions(first + second)


def test_token_ids_are_little_endian_int32():
    assert int32_bytes([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    assert int32_array(int32_bytes([1, 258]), "ids").tolist() == [1, 258]


@pytest.mark.parametrize("decode", [int32_array, float32_array])
def test_a_torn_array_is_refused_by_name(decode):
    with pytest.raises(InvalidFieldError, match=r"chunk\.ids: 5 bytes"):
        decode(b"12345", "chunk.ids")


@pytest.mark.parametrize(
    ("versions", "lengths"),
    [([1, 2], [3]), ([1], [2]), ([1], [0]), ([-1], [3]), ([1, 1], [-1, 4])],
)
def test_version_runs_that_do_not_fit_the_tokens_are_refused(versions, lengths):
    runs = types_pb2.VersionRuns(
        versions=np.array(versions, "<i8").tobytes(), lengths=np.array(lengths, "<i4").tobytes()
    )
    with pytest.raises(InvalidFieldError):
        decode_versions(runs, num_tokens=3, field="v")
