"""The version a sample counts from: its tokens' oldest, or that of a generator that is about to add older ones."""

from __future__ import annotations

from penstock.v1 import broker_pb2
from services.broker.records_pb2 import SampleRecord
from services.broker.staleness import sample_version

LEASED, QUEUED = broker_pb2.SAMPLE_STATE_LEASED, broker_pb2.SAMPLE_STATE_QUEUED


def test_a_sample_of_newer_tokens_with_an_older_generator_counts_from_the_generators_version() -> None:
    sample = SampleRecord(state=LEASED, min_version=5, max_version=6, lease_version=3)
    assert sample_version(sample) == 3
    sample.state = QUEUED
    assert sample_version(sample) == 5


def test_a_newer_generator_makes_no_token_younger() -> None:
    assert sample_version(SampleRecord(state=LEASED, min_version=3, max_version=3, lease_version=5)) == 3
