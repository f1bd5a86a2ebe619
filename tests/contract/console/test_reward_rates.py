"""A machine reports how fast its reward workers score, as they say themselves."""

import asyncio

from console.node.reward_rates import RewardMeter
from penstock.process.tasks import end
from penstock.rewards.serving import reward_service
from penstock.security import NO_SECURITY
from penstock.v1 import scheduler_pb2 as pb
from services.reward.models.build import build_model
from tests.helpers.serving import serving
from tests.helpers.waiting import until


async def test_reward_workers_that_were_busy_are_reported_and_forgotten_with_their_process():
    model = build_model("exact_match")
    idle, busy = reward_service(model), reward_service(model, samples_per_second=lambda: 12.5)
    async with serving(idle) as (_, first), serving(busy) as (_, second):
        there = [first, second, "127.0.0.1:1"]
        meter = RewardMeter("r", lambda: there, security=NO_SECURITY, time_scale=2.0)
        asking = asyncio.create_task(meter.keep_asking())
        try:
            await until(lambda: bool(meter.rates()))
        finally:
            await end(asking)
        assert meter.rates() == [pb.MeasuredRate(role=pb.ROLE_REWARD, samples_per_second=6.25, run_id="r")]
        there.clear()
        again = asyncio.create_task(meter.keep_asking())
        try:
            await until(lambda: not meter.rates())
        finally:
            await end(again)
