"""What a commit ended, for traces: stores leave it alone."""

from __future__ import annotations

from dataclasses import dataclass

from services.broker.records_pb2 import GroupRecord, SampleRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A group that was trained or dropped; or one sample that was given up, whose group may go on."""

    group: GroupRecord
    """The record, of which nothing changes any more if the group has ended."""
    reason: str = ""
    """Why it was dropped; empty if it was trained."""
    is_failure: bool = False
    """Whether something went wrong with it."""
    index: int = 0
    """Of the sample."""
    sample: SampleRecord | None = None
    """The sample as it was; None if the group has ended."""
