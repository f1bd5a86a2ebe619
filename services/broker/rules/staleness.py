"""Computes the staleness of samples and groups, in policy versions. Pure.

Staleness is the trainer's version minus the oldest version among a sample's tokens; a sample without tokens counts from
the version of its lease. A group is as old as its oldest sample that is not dropped, and its deadline is the last
version from which a step may still train on it.
"""

from __future__ import annotations

from penstock.v1 import broker_pb2
from services.broker.records_pb2 import GroupRecord, SampleRecord


def sample_version(sample: SampleRecord) -> int | None:
    """Oldest version that made, or is about to make, the sample's tokens; None if nothing has started."""
    if not sample.HasField("min_version"):
        return None if sample.state == broker_pb2.SAMPLE_STATE_QUEUED else sample.lease_version
    if sample.state == broker_pb2.SAMPLE_STATE_LEASED:
        return min(sample.min_version, sample.lease_version)
    return sample.min_version


def group_version(group: GroupRecord) -> int | None:
    """Oldest version among the group's samples, dropped ones left out; None if it is not started."""
    versions = [
        version
        for sample in group.samples
        if sample.state != broker_pb2.SAMPLE_STATE_DROPPED and (version := sample_version(sample)) is not None
    ]
    return min(versions) if versions else None


def staleness(*, policy_version: int, version: int) -> int:
    """Versions between the weights that sampled and those that train; weights of a later version count as 0."""
    return max(0, policy_version - version)


def deadline(*, version: int, max_staleness: int) -> int:
    """The last policy version from which a step may train on tokens of `version`."""
    return version + max_staleness


def trained_staleness(sample: SampleRecord, trained_version: int) -> int:
    """Staleness of a sample in the step that made `trained_version`."""
    oldest = sample.min_version if sample.HasField("min_version") else sample.lease_version
    return staleness(policy_version=trained_version - 1, version=oldest)
