"""Trained groups that the broker retains are trained on again: by a run of trajectory balance, after a restart too."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.clients.broker import BrokerClient
from penstock.clock import SystemClock
from penstock.v1 import trainer_pb2
from services.broker.storage.memory_store import MemoryStore
from services.trainer.batches.replay_buffer import ReplayBuffer
from services.trainer.config import TrainingConfig
from services.trainer.reporting.progress import Progress
from services.trainer.run.context import RunContext, RunSpec
from services.trainer.run.replay_feed import ReplayFeed
from tests.helpers.brokers.broker import RUN
from tests.helpers.brokers.broker import serving as serving_broker
from tests.helpers.brokers.scripted_training import ScriptedTrainingBroker
from tests.helpers.brokers.steps import train_step
from tests.helpers.models.tiny_model import make_tiny_model
from tests.helpers.ports import free_address
from tests.helpers.serving import serving
from tests.helpers.trainers.training import run_document, running_trainer
from tests.helpers.waiting import until

pytestmark = pytest.mark.usefixtures("one_thread")


async def test_a_run_trains_again_on_what_it_trained_on_and_its_books_stay_balanced(tmp_path: Path) -> None:
    document = run_document(tmp_path, make_tiny_model(tmp_path / "model"), "", num_steps=500, num_eval_prompts=0)
    document["algorithm"] |= {"name": "tba", "kl_coefficient": 0.01, "num_replayed_groups": 2}
    broker = ScriptedTrainingBroker()
    async with serving(broker.service()) as (_, target), running_trainer() as trainer:
        await trainer.start(document | {"broker": target})
        replayed: dict[str, float] = {}
        request = trainer_pb2.WatchRunRequest(run_id="r")
        async for event in trainer.trainer.WatchRun(request, timeout=60):
            if "step/replayed_samples" in event.step.metrics and not replayed:
                replayed = dict(event.step.metrics)
                await trainer.trainer.StopRun(trainer_pb2.StopRunRequest(run_id="r"), timeout=10)
            assert not event.HasField("finished") or replayed, event.finished.message
    assert replayed["step/replayed_samples"] in (4, 8)
    assert replayed["step/samples"] == 8
    # What is trained on again is never fresh; the bound of fresh samples holds beside it.
    assert replayed["staleness/replayed_max"] >= 1
    assert replayed["staleness/max"] <= 1
    assert broker.books().balanced


async def test_a_new_trainer_has_again_what_the_broker_retains(tmp_path: Path) -> None:
    address = free_address()
    config = TrainingConfig.model_validate({"model": {"path": "none"}, "data": {"train": None}})
    spec = RunSpec(run_id=RUN, config=config, run_dir=tmp_path, resume=False)
    async with serving_broker(MemoryStore(), listen=address) as broker, BrokerClient(address) as client:
        await broker.open()
        await train_step(broker, "a", "b")
        context = RunContext(
            spec=spec, client=client, progress=Progress(), version_lock=asyncio.Lock(), clock=SystemClock()
        )
        for number, expected in ((0, 2), (1, 4)):
            buffer = ReplayBuffer(max_steps=8, seed=0)
            feed = asyncio.create_task(ReplayFeed(context, buffer).run())
            await until(lambda held=buffer, count=expected: len(held) == count)
            if number == 0:
                # A feed that runs learns of new steps.
                await train_step(broker, "c", "d", version=1)
                await until(lambda held=buffer: len(held) == 4)
            feed.cancel()
            await asyncio.gather(feed, return_exceptions=True)
        drawn = {group[0].group_id: group for group in buffer.draw(4, policy_version=3)}
        assert sorted(drawn) == ["a", "b", "c", "d"]
        assert all(sample.reward is not None for group in drawn.values() for sample in group)
