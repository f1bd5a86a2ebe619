from __future__ import annotations

import numpy as np
import pytest

from penstock.clients.sample_stream import MAX_TEXT_BYTES, MAX_TOKENS_PER_CHUNK, SampleStream
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import decode_versions, float32_array, int32_array


class Listener:
    def __init__(self):
        self.heard = []

    def settled(self):
        self.heard.append("settled")

    def refused(self, error):
        self.heard.append(error.reason)


class Made:
    def __init__(self, *, offset=0):
        self.listener = Listener()
        self.buffered_bytes = 0
        key = types_pb2.SampleKey(group_id="g", sample_index=1)
        self.stream = SampleStream(key, lease_id="l", offset=offset, listener=self.listener, on_change=self._note)

    def _note(self, _stream, change_bytes):
        self.buffered_bytes += change_bytes

    def append(self, count, *, version, first=0):
        token_ids = np.arange(first, first + count, dtype=np.int32)
        self.stream.append(token_ids, -np.ones(count, np.float32), policy_version=version)


def test_spans_become_one_chunk_with_a_run_for_each_version():
    made = Made(offset=4)
    made.append(2, version=1)
    made.append(3, version=1, first=2)
    made.append(1, version=2, first=5)
    chunk = made.stream.take_chunk()
    assert chunk.offset == 4
    assert int32_array(chunk.token_ids, "t").tolist() == [0, 1, 2, 3, 4, 5]
    assert float32_array(chunk.logprobs, "l").tolist() == [-1.0] * 6
    assert int32_array(chunk.policy_versions.lengths, "v").tolist() == [5, 1]
    assert decode_versions(chunk.policy_versions, num_tokens=6, field="v").tolist() == [1] * 5 + [2]
    assert made.stream.num_tokens == 10
    assert not made.stream.is_dirty


def test_chunks_follow_one_another_and_the_last_carries_the_end():
    made = Made()
    made.append(2, version=0)
    assert made.stream.take_chunk().finish_reason == types_pb2.FINISH_REASON_UNSPECIFIED
    made.append(1, version=0, first=2)
    made.stream.finish(types_pb2.FINISH_REASON_STOP, text="abc")
    last = made.stream.take_chunk()
    assert (last.offset, last.finish_reason, last.text) == (2, types_pb2.FINISH_REASON_STOP, "abc")


def test_a_long_wait_is_cut_into_chunks_that_lose_nothing():
    made = Made()
    made.append(MAX_TOKENS_PER_CHUNK - 1, version=0)
    made.append(10, version=1, first=MAX_TOKENS_PER_CHUNK - 1)
    made.stream.finish(types_pb2.FINISH_REASON_LENGTH, text="t")
    first, second = made.stream.take_chunk(), made.stream.take_chunk()
    assert first.finish_reason == types_pb2.FINISH_REASON_UNSPECIFIED
    assert first.text == ""
    assert second.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert second.offset == MAX_TOKENS_PER_CHUNK
    token_ids = np.frombuffer(first.token_ids + second.token_ids, "<i4")
    assert token_ids.tolist() == list(range(MAX_TOKENS_PER_CHUNK + 9))
    assert decode_versions(second.policy_versions, num_tokens=9, field="v").tolist() == [1] * 9
    assert made.stream.buffered_bytes == 0


def test_nothing_follows_the_end():
    made = Made()
    made.stream.finish(types_pb2.FINISH_REASON_ABORTED)
    made.append(3, version=0)
    made.stream.finish(types_pb2.FINISH_REASON_STOP, text="late")
    chunk = made.stream.take_chunk()
    assert (chunk.token_ids, chunk.finish_reason) == (b"", types_pb2.FINISH_REASON_ABORTED)


def test_what_is_discarded_frees_the_buffer_without_notice():
    made = Made()
    made.append(3, version=0)
    assert made.buffered_bytes == made.stream.buffered_bytes > 0
    made.stream.discard()
    assert made.buffered_bytes == 0
    made.stream.settle()
    assert made.listener.heard == []


def test_a_listener_hears_the_end_once():
    made = Made()
    made.append(3, version=0)
    made.stream.refuse(broker_pb2.ChunkError(reason="LEASE_LOST"))
    made.stream.refuse(broker_pb2.ChunkError(reason="OFFSET_MISMATCH"))
    made.stream.settle()
    assert made.listener.heard == ["LEASE_LOST"]


def test_a_long_text_is_cut_at_a_whole_character():
    made = Made()
    made.stream.finish(types_pb2.FINISH_REASON_STOP, text="x" + "\u00e9" * MAX_TEXT_BYTES)
    text = made.stream.take_chunk().text
    assert len(text.encode()) == MAX_TEXT_BYTES - 1
    assert set(text) == {"x", "\u00e9"}


def test_tokens_without_logprobs_are_a_fault():
    with pytest.raises(ValueError, match="2 tokens with 1"):
        Made().stream.append(np.zeros(2, np.int32), np.zeros(1, np.float32), policy_version=0)
