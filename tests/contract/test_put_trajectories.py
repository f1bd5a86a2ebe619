"""PutTrajectories through a served broker, on the memory store and on a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.clients.training import MicrobatchSession, ReceivedMicrobatch, Subscription
from penstock.clients.trajectories import TrajectorySession
from penstock.v1 import broker_pb2, types_pb2
from services.broker.store import Store
from tests.helpers.broker import RUN, RunningBroker, serving
from tests.helpers.trajectories import groups

TIMEOUT_S = 20.0


@asynccontextmanager
async def producing(broker: RunningBroker, producer_id: str = "p") -> AsyncIterator[TrajectorySession]:
    async with TrajectorySession(broker.channel, run_id=RUN, producer_id=producer_id, peer="broker") as session:
        yield session


@asynccontextmanager
async def training(broker: RunningBroker, *, max_groups: int = 8) -> AsyncIterator[MicrobatchSession]:
    subscription = Subscription(
        run_id=RUN, consumer_id="rank-0", purpose=types_pb2.PURPOSE_TRAIN, max_held_groups=64, max_groups=max_groups
    )
    async with MicrobatchSession(broker.channel, peer="broker", subscription=subscription) as session:
        yield session


async def receive(session: MicrobatchSession, count: int) -> list[types_pb2.TrajectoryGroup]:
    found: list[types_pb2.TrajectoryGroup] = []
    async with asyncio.timeout(TIMEOUT_S):
        while len(found) < count:
            microbatch: ReceivedMicrobatch | None = await session.next(timeout_s=TIMEOUT_S)
            assert microbatch is not None
            found += microbatch.groups
    return found


async def ack(broker: RunningBroker, group_ids: list[str], version: int) -> broker_pb2.AckStepResponse:
    request = broker_pb2.AckStepRequest(run_id=RUN, consumer_id="rank-0", group_ids=group_ids, policy_version=version)
    response: broker_pb2.AckStepResponse = await broker.call("AckStep", request)
    return response


async def test_groups_are_put_handed_out_as_they_were_and_trained(store: Store) -> None:
    async with serving(store) as broker:
        await broker.open(groups_per_step=4)
        made = groups("a", "b", "c", "d")
        async with producing(broker) as producer, training(broker) as trainer:
            receipt = await producer.put(made)
            assert (receipt.num_samples, receipt.refused) == (8, [])
            assert await receive(trainer, 4) == made
            assert (await broker.audit()).in_flight_by_state == {"delivered": 8}
            acked = await ack(broker, ["a", "b", "c", "d"], 1)
            assert (acked.num_samples, acked.max_staleness_seen) == (8, 0)
            books = await broker.audit()
            assert (books.submitted, books.trained, books.in_flight) == (8, 8, 0)
            assert await ack(broker, ["d", "c", "b", "a"], 1) == acked


async def test_a_repetition_of_a_group_that_was_given_up_meanwhile_is_no_error(store: Store) -> None:
    """Its answer was lost; that the run would take no more groups now does not make it a refusal."""
    async with serving(store) as broker:
        await broker.open(groups_per_step=1)
        [first, second] = groups("a", "b")
        async with producing(broker) as producer:
            assert (await producer.put([first])).num_samples == 2
            request = broker_pb2.DropGroupsRequest(run_id=RUN, group_ids=["a"], reason="unwanted")
            await broker.call("DropGroups", request)
            assert (await producer.put([second])).num_samples == 2
            again = await producer.put([first])
            assert (again.num_samples, again.refused) == (0, [])
            [third] = groups("c")
            assert len((await producer.put([third])).refused) == 1
