"""A chunk that one broker passes on to another is the one that its generator sent."""

import numpy as np

from penstock.v1 import types_pb2
from services.broker.brokers.shard_messages import chunk_message
from services.broker.ingest.token_chunk import read_chunks


def test_a_chunk_that_is_passed_on_loses_nothing():
    chunk = types_pb2.TokenChunk(
        key=types_pb2.SampleKey(group_id="g", sample_index=1, attempt=2),
        lease_id="l",
        offset=3,
        token_ids=np.asarray([5, 6], "<i4").tobytes(),
        logprobs=np.asarray([-0.5, -1.0], "<f4").tobytes(),
        policy_versions=types_pb2.VersionRuns(
            versions=np.asarray([4], "<i8").tobytes(), lengths=np.asarray([2], "<i4").tobytes()
        ),
        loss_mask=b"\x01\x00",
        finish_reason=types_pb2.FINISH_REASON_STOP,
        text="ab",
        token_shard=7,
        routes=b"\x01\x02",
        score=types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=0.5, model="guess"),
    )
    assert {field.name for field, _ in chunk.ListFields()} == set(types_pb2.TokenChunk.DESCRIPTOR.fields_by_name)
    sent = types_pb2.TokenChunk.FromString(chunk.SerializeToString())
    [facts] = read_chunks([chunk])
    assert facts.fault == ""
    assert chunk_message(facts) == sent
