from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.errors import ServiceUnavailableError
from penstock.v1 import broker_pb2
from services.broker.ingest.token_chunk import ChunkFacts
from services.broker.operations import leasing
from services.broker.operations.chunk_rules import Accepted
from services.broker.records.token_tails import SealRequest
from services.broker.records_pb2 import SampleTail
from services.broker.shards.sealer import Sealer
from services.broker.state.run_state import RunState
from tests.helpers.waiting import until
from tests.unit.broker.builders import lease, open_state, submit


class ManualClock:
    def now_s(self) -> float:
        return 5.0

    def monotonic_s(self) -> float:
        return 5.0


@dataclass
class FakeShards:
    """Answers that three tokens are stored, unless it is away."""

    is_away: bool = False
    asked: list[tuple[int, Sequence[SealRequest]]] = field(default_factory=list)

    async def seal(self, _run_id: str, shard: int, samples: Sequence[SealRequest]) -> list[SampleTail]:
        self.asked.append((shard, samples))
        if self.is_away:
            raise ServiceUnavailableError("the shard is away")
        return [SampleTail(lease_id=sample.lease_id, is_sealed=True, num_tokens=3) for sample in samples]

    async def accept(self, _run_id: str, _shard: int, _generator: str, _chunks: Sequence[ChunkFacts]) -> Accepted:
        raise NotImplementedError


def expired(*group_ids: str) -> RunState:
    """A run of which every sample's lease has ended."""
    state = open_state(
        group_size=1, groups_per_step=len(group_ids), max_queued_groups=8, policy=broker_pb2.RunPolicy(token_shards=16)
    )
    submit(state, *group_ids)
    for name in group_ids:
        lease(state, 1, generator_id=f"gen-{name}")
    leasing.expire(state, 1_000.0)
    assert len(state.sealing) == len(group_ids)
    return state


def sealer_of(state: RunState) -> Sealer:
    async def transact(operation: Callable[[RunState], None], *, must_verify: bool) -> None:
        assert not must_verify
        operation(state)
        state.settle()

    return Sealer("run-1", transact, ManualClock())


async def test_each_shard_is_asked_for_its_samples_which_are_then_queued() -> None:
    state, shards = expired("a", "b", "c"), FakeShards()
    sealer_of(state).start(state, shards)
    await until(lambda: not state.sealing)
    assert {shard for shard, _samples in shards.asked} == {state.groups[name].token_shard for name in "abc"}
    assert [grant.num_prefix_tokens for grant in lease(state, 8)] == [3, 3, 3]


async def test_a_shard_that_is_away_is_asked_again_and_holds_no_other_back() -> None:
    state, shards = expired("a"), FakeShards(is_away=True)
    sealer = sealer_of(state)
    sealer.start(state, shards)
    await until(lambda: len(shards.asked) == 1)
    assert state.sealing
    shards.is_away = False

    def is_sealed() -> bool:
        sealer.start(state, shards)
        return not state.sealing

    await until(is_sealed)
