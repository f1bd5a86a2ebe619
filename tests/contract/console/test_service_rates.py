"""A machine reports how fast its reward workers, scorers and critic are, as they say themselves."""

import asyncio

from console.node.scoring import CRITIC, REWARD, SCORER
from console.node.service_rates import ServiceMeter
from penstock.process.tasks import end
from penstock.rewards.serving import reward_service
from penstock.security import NO_SECURITY
from penstock.v1 import scheduler_pb2 as pb
from services.reward.models.build import build_model
from services.trainer.compute.speed import Speed, speed_service
from tests.helpers.serving import serving
from tests.helpers.waiting import until


def measured(num_tokens, seconds):
    """A speed by so many tokens in that time."""
    now_s = [0.0]
    speed = Speed(monotonic_s=lambda: now_s[0])
    with speed.computing(num_tokens):
        now_s[0] = seconds
    speed.settle()
    return speed


async def test_processes_that_were_busy_are_reported_and_forgotten_with_their_end():
    model = build_model("exact_match")
    idle, busy = reward_service(model), reward_service(model, samples_per_second=lambda: 12.5)
    scorers = speed_service(measured(9999, 9.9)), speed_service(measured(4000, 10.0))
    critic = speed_service(measured(1000, 20.0))
    async with (
        serving(idle) as (_, first), serving(busy) as (_, second),
        serving(scorers[0]) as (_, third), serving(scorers[1]) as (_, fourth), serving(critic) as (_, fifth),
    ):  # fmt: skip
        there = {first: REWARD, second: REWARD, "127.0.0.1:1": SCORER, third: SCORER, fourth: SCORER, fifth: CRITIC}
        meter = ServiceMeter("r", lambda: there, security=NO_SECURITY, time_scale=2.0)
        asking = asyncio.create_task(meter.keep_asking())
        try:
            await until(lambda: len(meter.rates()) == 3)
        finally:
            await end(asking)
        assert meter.rates() == [
            pb.MeasuredRate(role=pb.ROLE_REWARD, samples_per_second=6.25, run_id="r"),
            pb.MeasuredRate(role=pb.ROLE_SCORER, tokens_per_second=200.0, run_id="r"),
            pb.MeasuredRate(role=pb.ROLE_CRITIC, tokens_per_second=25.0, run_id="r"),
        ]
        there.clear()
        again = asyncio.create_task(meter.keep_asking())
        try:
            await until(lambda: not meter.rates())
        finally:
            await end(again)
