"""Messages made before a delivery is committed: those that are loaded afterwards, or none."""

from __future__ import annotations

import pytest

from penstock.clock import SystemClock
from penstock.v1 import broker_pb2
from services.broker.assembly import microbatch_reader
from services.broker.assembly.microbatch_frames import Frames
from services.broker.assembly.microbatch_reader import forget_delivered, frames_at_hand, load_frames
from services.broker.records_pb2 import GroupRecord, PutColumns
from services.broker.runtime.run_replica import RunReplica
from services.broker.storage.memory_store import MemoryStore
from tests.helpers.brokers.trajectories import group, pack_groups

HELLO = broker_pb2.TrainerHello(accepts_packed_groups=True, accepts_group_pieces=True)


class Puts:
    """A replica that still has the payload of two puts, each of one group."""

    def __init__(self) -> None:
        self.replica = RunReplica("run-1", store=MemoryStore(), clock=SystemClock())
        self.microbatches = [[self.record("a")], [self.record("b")]]

    def record(self, name: str) -> GroupRecord:
        payload = pack_groups([group(name)])
        self.replica.payloads.add(name, payload)
        columns = PutColumns(payload_id=name, group_ids=[name], group_bytes=[len(payload)], num_samples=[1])
        return GroupRecord(group_id=name, put=columns)

    def at_hand(self, hello: broker_pb2.TrainerHello = HELLO) -> list[broker_pb2.Microbatch]:
        return _parsed(frames_at_hand(self.replica, hello, self.microbatches, policy_version=3))

    async def loaded(self) -> list[broker_pb2.Microbatch]:
        return _parsed([frame async for frame in load_frames(self.replica, HELLO, self.microbatches, policy_version=3)])


def _parsed(frames: list[bytes]) -> list[broker_pb2.Microbatch]:
    """The microbatches without their random ids."""
    found = [broker_pb2.StreamMicrobatchesResponse.FromString(frame).microbatch for frame in frames]
    for each in found:
        each.ClearField("microbatch_id")
    return found


async def test_they_are_those_that_would_be_loaded_each_time_they_are_made() -> None:
    puts = Puts()
    made = puts.at_hand()
    assert len(made) == 2
    # A commit that conflicts is decided again.
    assert puts.at_hand() == made
    assert await puts.loaded() == made


async def test_delivered_payload_is_kept_no_longer() -> None:
    puts = Puts()
    forget_delivered(puts.replica, puts.microbatches[:1])
    assert puts.at_hand() == []


@pytest.mark.parametrize("hello", [broker_pb2.TrainerHello(), broker_pb2.TrainerHello(accepts_group_pieces=True)])
async def test_a_trainer_that_takes_messages_only_gets_what_is_loaded(hello: broker_pb2.TrainerHello) -> None:
    assert Puts().at_hand(hello) == []


async def test_groups_that_were_submitted_are_loaded() -> None:
    puts = Puts()
    puts.microbatches.append([GroupRecord(group_id="c")])
    assert puts.at_hand() == []


async def test_nothing_is_copied_of_more_than_is_made_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    puts, joined = Puts(), []
    monkeypatch.setattr(Frames, "close", lambda _frames: joined.append(1))
    size_bytes = sum(sum(record.put.group_bytes) for members in puts.microbatches for record in members)
    monkeypatch.setattr(microbatch_reader, "MAX_READ_AHEAD_BYTES", size_bytes - 1)
    assert puts.at_hand() == []
    assert joined == []
    monkeypatch.setattr(microbatch_reader, "MAX_READ_AHEAD_BYTES", size_bytes)
    puts.at_hand()
    assert joined
