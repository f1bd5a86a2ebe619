"""A sample's compact form in the store says the same as the chunks that it replaces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InternalError
from penstock.v1 import types_pb2
from penstock.wire.codec import decode_versions, encode_versions, float32_bytes, int32_array, int32_bytes
from services.broker.records.stored_sample import compacted, read_sample
from services.broker.records_pb2 import CompactSample


def chunk(token_ids: list[int], *, version: int = 0, mask: bytes = b"", text: str = "") -> bytes:
    return types_pb2.TokenChunk(
        token_ids=int32_bytes(token_ids),
        logprobs=float32_bytes([-0.25 * position for position in range(len(token_ids))]),
        policy_versions=encode_versions([version] * len(token_ids)),
        loss_mask=mask,
        text=text,
    ).SerializeToString()


_TOKEN_IDS = st.one_of(*(st.integers(0, limit) for limit in (9, 2**16, 2**18, 2**31 - 1)))
_CHUNKS = st.lists(
    st.lists(_TOKEN_IDS, min_size=1, max_size=20).flatmap(
        lambda ids: st.tuples(
            st.just(ids),
            st.integers(0, 3),
            st.one_of(st.just([]), st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids))),
        )
    ),
    min_size=1,
    max_size=6,
)


@given(_CHUNKS, st.text(max_size=40))
def test_a_compact_sample_reads_as_its_chunks_do(made: list[tuple[list[int], int, list[int]]], text: str) -> None:
    parts = [chunk(ids, version=version, mask=bytes(mask)) for ids, version, mask in made]
    parts[-1] = types_pb2.TokenChunk(text=text).SerializeToString() + parts[-1]
    before = read_sample(parts)
    after = read_sample([compacted(before)])
    assert after.token_ids == int32_bytes([token for ids, _version, _mask in made for token in ids])
    assert after.logprobs == before.logprobs
    assert after.text == text
    masks = [bytes(mask) or b"\1" * len(ids) for ids, _version, mask in made]
    assert after.loss_mask == (b"".join(masks) if any(mask for _ids, _version, mask in made) else b"")
    count = len(int32_array(after.token_ids, "ids"))
    versions = [version for ids, version, _mask in made for _token in ids]
    assert decode_versions(after.policy_versions, num_tokens=count, field="versions").tolist() == versions
    assert read_sample([compacted(after)]) == after


def test_neighbouring_chunks_of_one_version_are_one_run() -> None:
    whole = read_sample([compacted(read_sample([chunk([1, 2], version=4), chunk([3], version=4)]))])
    assert whole.policy_versions == encode_versions([4] * 3)


def test_a_sample_that_grew_after_it_was_compacted_reads_whole() -> None:
    """A sample that goes on after a compact beginning: nothing does that today, and nothing needs to know."""
    first = compacted(read_sample([chunk([1, 70_000])]))
    assert int32_array(read_sample([first, chunk([3])]).token_ids, "ids").tolist() == [1, 70_000, 3]


def test_a_sample_without_tokens_keeps_its_text() -> None:
    whole = read_sample([compacted(read_sample([types_pb2.TokenChunk(text="-").SerializeToString()]))])
    assert (whole.token_ids, whole.text, whole.policy_versions) == (b"", "-", types_pb2.VersionRuns())


def test_no_chunks_are_no_tokens() -> None:
    whole = read_sample([])
    assert (whole.token_ids, whole.logprobs, whole.loss_mask, whole.text) == (b"", b"", b"", "")


@pytest.mark.parametrize(("vocabulary", "most"), [(2**16, 6.0), (150_000, 6.25), (2**31 - 1, 8.0)])
def test_a_token_takes_what_its_vocabulary_needs(vocabulary: int, most: float) -> None:
    ids = np.random.default_rng(0).integers(0, vocabulary, 4096).tolist()
    assert len(compacted(read_sample([chunk(ids)]))) <= most * len(ids) + 64


def test_bytes_that_do_not_fit_their_tokens_are_named() -> None:
    part = b"\0" + CompactSample(num_tokens=8, token_ids=bytes(2 * 8 + 3), logprobs=bytes(32)).SerializeToString()
    assert len(int32_array(read_sample([part]).token_ids, "ids")) == 8
    for num_bytes in (15, 3):
        broken = CompactSample(num_tokens=8, token_ids=bytes(num_bytes)).SerializeToString()
        with pytest.raises(InternalError, match=f"8 tokens has {num_bytes} bytes"):
            read_sample([b"\0" + broken])
