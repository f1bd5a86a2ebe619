"""Routes from generators to the trainer over real gRPC, on every store."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import InvalidFieldError
from penstock.v1 import broker_pb2, types_pb2
from services.broker.assembly import large_groups
from services.broker.records.store import Store
from services.broker.records_pb2 import GroupRecord, SampleRecord
from tests.helpers.brokers.broker import (
    RUN,
    Generator,
    RunningBroker,
    Trainer,
    Worker,
    chunk,
    error_of,
    prompt,
    serving,
)

SHAPE = types_pb2.RoutingShape(num_layers=2, num_experts=300, experts_per_token=1)
ABORTED, STOP = types_pb2.FINISH_REASON_ABORTED, types_pb2.FINISH_REASON_STOP


def rows(first: int, count: int, sample: int) -> bytes:
    """Rows of two ids each: the position, and the sample."""
    return b"".join(number.to_bytes(2, "little") for at in range(first, first + count) for number in (at, 200 + sample))


async def exported(broker: RunningBroker) -> types_pb2.TrajectoryGroup:
    request = broker_pb2.ExportTrajectoriesRequest(run_id=RUN, accepts_group_pieces=True)
    call: Any = broker.stub.ExportTrajectories(request, timeout=30)
    pieces = b"".join([response.piece.data async for response in call if response.HasField("piece")])
    return types_pb2.TrajectoryGroup.FromString(pieces)


@pytest.mark.parametrize("token_shards", [0, 2])
async def test_routes_come_with_a_sample_however_it_is_delivered(
    store: Store, token_shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(store) as broker:
        policy = broker_pb2.RunPolicy(token_shards=token_shards)
        await broker.open(groups_per_step=1, max_staleness=4, routing=SHAPE, policy=policy)
        ignorant = Generator.connect(broker.channel, "gen-0")
        refusal = await error_of(ignorant.stream)
        assert isinstance(refusal, InvalidFieldError)
        assert "hello.routing: unset, but the run replays routes" in str(refusal)
        await broker.submit(prompt("a"))
        first = Generator.connect(broker.channel, "gen-1", routing=SHAPE)
        first.beat(credits=2)
        leases = await first.leases(2)
        # A prompt of three tokens. One sample is given back after two of its own, the other is finished.
        begun = [chunk(lease, [7, 8], routes=rows(0, 4, at)) for at, lease in enumerate(leases)]
        assert await first.put(*begun) == []
        whole, part = leases
        last = chunk(whole, [9], offset=2, finish=STOP, routes=rows(4, 1, 0))
        assert await first.put(last, chunk(part, [], offset=2, finish=ABORTED, text="")) == []
        second = Generator.connect(broker.channel, "gen-2", routing=SHAPE)
        second.beat(credits=1)
        [lease] = await second.leases(1)
        assert len(lease.prefix_token_ids) // 4 == 2
        assert await second.put(chunk(lease, [9], offset=2, finish=STOP, routes=rows(4, 1, 1))) == []
        await Worker.connect(broker.channel).score(2)
        expected = [rows(0, 5, 0), rows(0, 5, 1)]
        [group] = await Trainer.connect(broker.channel).groups(1)
        assert [each.routes for each in group.trajectories] == expected
        # Compacted, delivered again, trained, and exported in pieces.
        await broker.run_registry.replica(RUN).compactor.settled()
        trainer = Trainer.connect(broker.channel)
        [again] = await trainer.groups(1)
        assert [each.routes for each in again.trajectories] == expected
        await trainer.ack(["a"], 1)
        monkeypatch.setattr(large_groups, "MAX_WHOLE_BYTES", 90)
        assert [each.routes for each in (await exported(broker)).trajectories] == expected
        await broker.audit()


def test_routes_count_in_the_size_of_a_group() -> None:
    group = GroupRecord(num_prompt_tokens=1_000, samples=[SampleRecord(num_tokens=50)] * 4)
    assert large_groups.size_bytes(group, 0) == 4 * 50 * 8
    assert large_groups.size_bytes(group, 384) == 4 * (50 * 8 + 1_050 * 384)
