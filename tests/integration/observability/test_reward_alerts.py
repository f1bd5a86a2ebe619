"""The alerts of reward workers, provoked on a real Prometheus over real workers, a real broker and reward models."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from penstock.network.rpc import open_channel
from penstock.v1 import broker_pb2
from tests.helpers.console import COMMAND
from tests.helpers.faults.stage import Process
from tests.helpers.observability import moody_reward
from tests.helpers.observability.faulty_clients import LivingRun, called, meanwhile
from tests.helpers.observability.prometheus import needs_prometheus, prometheus
from tests.helpers.observability.served import Served, started
from tests.helpers.ports import free_address

pytestmark = [needs_prometheus, pytest.mark.grid, pytest.mark.slow, pytest.mark.timeout(1200)]
CONSEQUENCES = {"PenstockWaitIsLong", "PenstockNoProgress"}
"""Of a reward model that is away: its run stands still."""
REWARD = f"{moody_reward.__name__}:{moody_reward.score.__name__}"


async def test_reward_models_that_are_away_fail_or_drift_are_alerted(tmp_path: Path) -> None:
    mood, canaries = tmp_path / "mood", tmp_path / "canaries.jsonl"
    mood.write_text(moody_reward.FINE)
    canaries.write_text(json.dumps({"completion": moody_reward.CANARY, "value": 1.0}) + "\n")
    variables = {moody_reward.VARIABLE: str(mood)}
    broker = Served("broker", tmp_path, "redis_url=memory://")
    settings = (f"broker={broker.address}", "reward.trusts_generator_text=true", "reward.max_retries=0")
    own = Served(
        "reward",
        tmp_path,
        *settings,
        "run_id=graded",
        f"reward.model={REWARD}",
        "reward.max_error_share=1",
        f"reward.canaries.path={canaries}",
        "reward.canaries.every=4",
        name="own",
        variables=variables,
    )
    far = free_address()
    served_reward = Process(
        "model", ["env", *_assigned(variables), *COMMAND, "reward", "serve", REWARD, "--listen", far], tmp_path
    )
    other = Served("reward", tmp_path, *settings, "run_id=held", f"reward.model=grpc://{far}", name="other")
    async with AsyncExitStack() as stack:
        stack.callback(served_reward.kill)
        served_reward.start()
        stack.enter_context(started(broker, own, other))
        seen = await stack.enter_async_context(prometheus(tmp_path / "prometheus"))
        for service in (broker, own, other):
            await service.until_serving()
            seen.watch(service.service, service.metrics)
        channel = await stack.enter_async_context(open_channel(broker.address))
        policy = broker_pb2.RunPolicy(partial_groups=broker_pb2.PARTIAL_GROUP_POLICY_SHRINK)
        for run_id in ("graded", "held"):
            await called(channel).open(run_id=run_id, max_staleness=4, policy=policy)
            await stack.enter_async_context(meanwhile(LivingRun(channel, run_id, scores=False).flow()))
        await seen.until_read(broker.metrics, own.metrics, other.metrics)
        assert await seen.ever_fired() == set()

        served_reward.kill()
        mood.write_text(moody_reward.RAISING)
        await asyncio.gather(
            seen.until_fires("PenstockRewardHoldsBack", instance=other.metrics),
            seen.until_fires("PenstockGradersFail", model="score"),
            seen.until_fires("PenstockSamplesDropped", run="graded"),
        )
        served_reward.start()
        mood.write_text(moody_reward.FINE)
        mended = ("PenstockRewardHoldsBack", "PenstockGradersFail", "PenstockSamplesDropped")
        await asyncio.gather(*(seen.until_resolved(name) for name in mended))

        mood.write_text(moody_reward.DRIFTING)
        await seen.until_fires("PenstockCanariesDrift", instance=own.metrics, model="score")
        mood.write_text(moody_reward.FINE)
        await seen.until_resolved("PenstockCanariesDrift")
        assert await seen.ever_fired() - CONSEQUENCES == {*mended, "PenstockCanariesDrift"}


def _assigned(variables: dict[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in variables.items()]
