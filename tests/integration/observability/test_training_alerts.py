"""The alerts of trainers and generators, provoked on a real Prometheus over a whole run of real processes."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from penstock.clients.broker import BrokerClient
from penstock.clients.trajectories import TrajectorySession
from penstock.network.connection import Connection
from penstock.wire.codec import float32_bytes, int32_bytes
from tests.helpers.brokers.trajectories import group
from tests.helpers.full_disk import fill, small_disk
from tests.helpers.observability.prometheus import needs_prometheus, prometheus
from tests.helpers.observability.served import started
from tests.helpers.observability.slow_disk import slow_disk
from tests.helpers.observability.training_site import RUN_ID, TrainingSite
from tests.helpers.ports import free_port
from tests.helpers.proxies.tcp_proxy import proxy_to

pytestmark = [needs_prometheus, pytest.mark.grid, pytest.mark.slow, pytest.mark.timeout(1200)]
POISON = 3e38
"""An advantage that overflows float32 in the sum over a completion."""


async def test_faults_of_a_trainer_and_its_generators_are_alerted(tmp_path: Path) -> None:
    flag, variables = slow_disk(tmp_path)
    weights_port = free_port()
    async with AsyncExitStack() as stack:
        storage = stack.enter_context(small_disk(64 * 2**20))
        link = await stack.enter_async_context(proxy_to(weights_port))
        site = TrainingSite(
            tmp_path,
            weights_port=weights_port,
            weights_url=link.address,
            variables=variables,
            trainer=(f"allowed_storage=[file://{storage}]",),
        )
        slow = site.generator("slow", tokens_per_second=40)
        broker, trainer = site.broker, site.trainer
        stack.enter_context(started(broker, trainer, site.reward))
        seen = await stack.enter_async_context(prometheus(tmp_path / "prometheus"))
        for service in (broker, trainer, site.reward):
            await service.until_serving()
            seen.watch(service.service, service.metrics)
        await site.start_run(
            run__checkpoint_every_steps=1,
            run__checkpoint_storage=f"file://{storage}",
            trainer__max_skips_in_a_row=5,
            algorithm__max_staleness=1,
        )
        stack.enter_context(started(slow))
        seen.watch("generator", slow.metrics)

        # One after the other: who waits for a slow disk is not idle meanwhile.
        await seen.until_fires("PenstockTrainerStarves", instance=trainer.metrics)
        flag.touch()
        await seen.until_fires("PenstockPublishingPauses", instance=trainer.metrics)
        flag.unlink()

        filler = fill(storage)
        await _put_poison(broker.address)
        await asyncio.gather(
            seen.until_fires("PenstockCheckpointUploadFails", instance=trainer.metrics),
            seen.until_fires("PenstockStepsSkipped", instance=trainer.metrics),
        )
        filler.unlink()
        slow.kill()
        link.flips_bits = True
        slow.start()
        await asyncio.gather(
            seen.until_fires("PenstockEngineFailed", instance=slow.metrics, how="killed"),
            seen.until_fires("PenstockWeightsRefused", instance=slow.metrics),
        )
        link.heal()
        fast = site.generator("fast", tokens_per_second=20_000)
        stack.enter_context(started(fast))
        mended = (
            "PenstockTrainerStarves",
            "PenstockPublishingPauses",
            "PenstockCheckpointUploadFails",
            "PenstockEngineFailed",
            "PenstockWeightsRefused",
            "PenstockStepsSkipped",
        )
        await asyncio.gather(*(seen.until_resolved(name) for name in mended))


async def _put_poison(broker: str) -> None:
    """A group of another producer whose advantages are finite, and whose loss is not."""
    async with (
        BrokerClient(broker) as client,
        TrajectorySession(Connection(broker), run_id=RUN_ID, producer_id="poisoner") as session,
    ):
        # While others wait before it, one may be too old by its turn.
        for number in itertools.count():
            version = (await client.get_run(RUN_ID)).policy_version
            made = group(f"poisoned-{number}", num_samples=4, version=version)
            for trajectory in made.trajectories:
                trajectory.token_ids = int32_bytes([3, 4, 5])
                trajectory.advantages = float32_bytes(np.full(3, POISON))
            receipt = await session.store([made])
            if not receipt.refused:
                return
            assert receipt.refused[0].reason == "STALE", receipt
