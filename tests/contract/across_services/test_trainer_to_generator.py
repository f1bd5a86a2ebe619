"""A real trainer's steps reach a real engine: published, fetched as deltas, attested, reported."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from penstock.v1 import trainer_pb2
from services.generator.config import GeneratorConfig
from services.generator.engine.model_files import IdText
from services.generator.engines.base_config import ServedModel
from services.generator.engines.transformers.config import TransformersEngineConfig
from services.generator.engines.transformers.transformers_engine import TransformersEngine
from services.generator.generator import Generator
from services.generator.metrics import GeneratorMetrics
from services.trainer.publishing.version_store import Holding
from tests.helpers.brokers.scripted_generation import ScriptedGenerationBroker
from tests.helpers.brokers.scripted_training import ScriptedTrainingBroker
from tests.helpers.models.tiny_model import make_tiny_model
from tests.helpers.serving import serving
from tests.helpers.trainers.training import run_document, running_trainer
from tests.helpers.waiting import until

NUM_STEPS = 4
LINK_BYTES_PER_SECOND = 40e3
"""So slow that deltas are worth it: over a fast link so small a model is fetched whole sooner."""


pytestmark = pytest.mark.usefixtures("one_thread")


class PacedBroker(ScriptedTrainingBroker):
    """Hands out a step once the generator holds the version before it, so that none is skipped."""

    holdings: Mapping[str, Holding] = {}

    def _next(self, hello, room):
        held = max((holding.policy_version for holding in self.holdings.values()), default=-1)
        return super()._next(hello, room) if held >= self.policy_version else []


@pytest.mark.timeout(180)
async def test_the_steps_of_a_trainer_reach_the_engine_as_deltas(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    for_trainer, for_generator = PacedBroker(), ScriptedGenerationBroker()
    metrics = GeneratorMetrics(CollectorRegistry())
    async with (
        serving(for_trainer.service()) as (_, training_target),
        serving(for_generator.service()) as (_, generation_target),
        running_trainer() as trainer,
    ):
        config = GeneratorConfig(
            listen="127.0.0.1:0",
            run_id="r",
            broker=generation_target,
            weights=f"127.0.0.1:{trainer.server.port}",
            model_path=model,
            cache_dir=tmp_path / "cache",
            engine=TransformersEngineConfig(max_concurrent_samples=2),
            max_fetch_bytes_per_second=LINK_BYTES_PER_SECOND,
        )
        engine = TransformersEngine(TransformersEngineConfig(), ServedModel(model_path=model, dtype="bfloat16"))
        generator = Generator(config, engine=engine, text=IdText(), metrics=metrics)

        is_started = asyncio.Event()

        async def ready() -> None:
            is_started.set()

        async with generator:
            loops = [
                asyncio.create_task(loop)
                for loop in (generator.run_engine(ready), generator.watch_weights(), generator.pull_weights())
            ]
            try:
                await asyncio.wait_for(is_started.wait(), 60)
                holdings = for_trainer.holdings = trainer.store.holdings
                document = run_document(tmp_path, model, training_target, num_steps=NUM_STEPS)
                # Few values change in 16 bits, so that several deltas together are smaller than the whole.
                document["model"]["dtype"] = "bfloat16"
                document["optimizer"]["learning_rate"] = 1e-5
                await trainer.start(document)
                events = await trainer.events()
                await until(lambda: next(iter(holdings.values())).policy_version == NUM_STEPS, timeout_s=30)
            finally:
                for loop in loops:
                    loop.cancel()
                await asyncio.gather(*loops, return_exceptions=True)
    assert events[-1].finished.outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, events[-1].finished.message
    ways = {way: metrics.weight_fetches.labels(way)._value.get() for way in ("full", "delta", "cache")}
    # The run does not wait for the delta to its last version.
    assert ways["delta"] >= NUM_STEPS - 1, ways
    assert 1 <= ways["full"] <= 2, ways
    assert metrics.delta_fallbacks._value.get() == 0
    assert metrics.weights_refused._value.get() == 0
