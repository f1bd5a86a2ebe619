"""Chunks of a sample with routes: none is too large, and their rows are those of their tokens."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from penstock.clients import sample_stream
from penstock.clients.sample_stream import SampleStream
from penstock.v1 import types_pb2


class Listener:
    def settled(self) -> None:
        raise AssertionError

    def refused(self, error: object) -> None:
        raise AssertionError(error)


def test_rows_of_the_prompt_come_first_and_the_others_with_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rows of two bytes: three tokens a chunk.
    monkeypatch.setattr(sample_stream, "MAX_ROUTE_BYTES_PER_CHUNK", 6)
    buffered: list[int] = []
    stream = SampleStream(
        types_pb2.SampleKey(group_id="g"),
        lease_id="l",
        offset=0,
        listener=Listener(),
        on_change=lambda _stream, change_bytes: buffered.append(change_bytes),
    )
    routes = np.arange(14, dtype=np.uint8).reshape(7, 1, 2)
    tokens = np.arange(5, dtype=np.int32)
    stream.append(tokens, np.zeros(5, np.float32), policy_version=0, routes=routes)
    assert buffered == [stream.buffered_bytes] == [5 * 8 + 14]
    chunks = [stream.take_chunk(), stream.take_chunk()]
    assert [len(chunk.token_ids) // 4 for chunk in chunks] == [3, 2]
    assert [chunk.routes for chunk in chunks] == [bytes(range(10)), bytes(range(10, 14))]
    assert stream.buffered_bytes == 0
    with pytest.raises(ValueError, match="5 tokens with 4 rows of routes"):
        stream.append(tokens, np.zeros(5, np.float32), policy_version=0, routes=routes[:4])


async def test_given_tokens_are_marked_wherever_chunks_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_stream, "MAX_TOKENS_PER_CHUNK", 3)
    key = types_pb2.SampleKey(group_id="g")
    stream = SampleStream(key, lease_id="l", offset=2, listener=Listener(), on_change=lambda *_: None)
    for count, is_sampled in ((2, True), (3, False), (1, True)):
        tokens = np.arange(count, dtype=np.int32)
        stream.append(tokens, np.zeros(count, np.float32), policy_version=0, is_sampled=is_sampled)
    waiting = asyncio.create_task(stream.wait_until_stored())
    await asyncio.sleep(0)
    assert stream.is_urgent
    masks = []
    while stream.is_dirty:
        assert not waiting.done()
        chunk = stream.take_chunk()
        masks.append(list(chunk.loss_mask))
        stream.note_stored(chunk.offset + len(chunk.token_ids) // 4)
    await waiting
    assert masks == [[1, 1, 0], [0, 0, 1]]
    assert not stream.is_urgent
    stream.append(np.arange(3, dtype=np.int32), np.zeros(3, np.float32), policy_version=0)
    stream.finish(types_pb2.FINISH_REASON_STOP, score=types_pb2.Score(value=2.0))
    last = stream.take_chunk()
    assert (last.loss_mask, last.score.value) == (b"", 2.0)
