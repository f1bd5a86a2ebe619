"""How old a sample and its group are, record by record."""

from __future__ import annotations

import pytest

from penstock.v1 import broker_pb2
from services.broker.records_pb2 import GroupRecord, SampleRecord
from services.broker.rules.staleness import deadline, group_version, sample_version, staleness, trained_staleness

QUEUED, LEASED = broker_pb2.SAMPLE_STATE_QUEUED, broker_pb2.SAMPLE_STATE_LEASED
SCORED, DROPPED = broker_pb2.SAMPLE_STATE_SCORED, broker_pb2.SAMPLE_STATE_DROPPED


@pytest.mark.parametrize(
    ("sample", "version"),
    [
        (SampleRecord(state=QUEUED), None),
        (SampleRecord(state=QUEUED, lease_version=3), None),
        (SampleRecord(state=LEASED, lease_version=3), 3),
        (SampleRecord(state=LEASED, lease_version=3, min_version=5), 3),
        (SampleRecord(state=LEASED, lease_version=7, min_version=5), 5),
        (SampleRecord(state=QUEUED, lease_version=3, min_version=5), 5),
        (SampleRecord(state=SCORED, lease_version=3, min_version=5), 5),
        (SampleRecord(state=SCORED, lease_version=3), 3),
    ],
    ids=[
        "new",
        "its lease expired without a token",
        "leased",
        "leased to an older generator than began it",
        "leased to a newer generator than began it",
        "its lease expired after tokens",
        "scored",
        "scored without tokens",
    ],
)
def test_a_sample_is_as_old_as_its_oldest_token_made_or_to_come(sample: SampleRecord, version: int | None) -> None:
    assert sample_version(sample) == version


def test_a_group_is_as_old_as_its_oldest_sample_that_is_not_dropped() -> None:
    samples = [
        SampleRecord(state=DROPPED, min_version=1),
        SampleRecord(state=SCORED, min_version=4),
        SampleRecord(state=LEASED, lease_version=3),
        SampleRecord(state=QUEUED),
    ]
    assert group_version(GroupRecord(samples=samples)) == 3
    assert group_version(GroupRecord(samples=samples[:1] + samples[3:])) is None


def test_staleness_is_counted_from_the_version_that_the_step_started_from() -> None:
    assert trained_staleness(SampleRecord(state=SCORED, lease_version=2, min_version=5), 9) == 3
    assert trained_staleness(SampleRecord(state=SCORED, lease_version=2), 9) == 6
    assert trained_staleness(SampleRecord(state=SCORED, min_version=9), 9) == 0


def test_staleness_is_never_negative_and_ends_at_the_deadline() -> None:
    assert [staleness(policy_version=version, version=4) for version in (3, 4, 6)] == [0, 0, 2]
    assert staleness(policy_version=deadline(version=4, max_staleness=2), version=4) == 2
