"""A real trainer whose steps a real generator installs, over real gRPC, HTTP and gloo."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry

from penstock.collective.broadcast_backend import Transport
from penstock.v1 import trainer_pb2
from services.generator.config import GeneratorConfig
from services.generator.engine.model_files import IdText
from services.generator.engines.base_config import BaseEngineConfig, ServedModel
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


class PacedBroker(ScriptedTrainingBroker):
    """Hands out a step once the generator holds the version before it, so that none is skipped."""

    holdings: Mapping[str, Holding] = {}

    def _next(self, hello, room):
        held = max((holding.policy_version for holding in self.holdings.values()), default=-1)
        return super()._next(hello, room) if held >= self.policy_version else []


async def install_every_step(
    tmp_path: Path, engine_config: BaseEngineConfig, *, transport: Transport = Transport.HTTP
) -> GeneratorMetrics:
    """A run of NUM_STEPS steps, whose last version the engine proves to hold; the generator's metrics.

    Over HTTP by a slow link, or by broadcasts.
    """
    model = make_tiny_model(tmp_path / "model")
    for_trainer, for_generator = PacedBroker(), ScriptedGenerationBroker()
    metrics = GeneratorMetrics(CollectorRegistry())
    async with (
        serving(for_trainer.service()) as (_, training_target),
        serving(for_generator.service()) as (_, generation_target),
        running_trainer(is_broadcasting=transport is Transport.GLOO) as trainer,
    ):
        config = GeneratorConfig(
            listen="127.0.0.1:0",
            run_id="r",
            broker=generation_target,
            weights=f"127.0.0.1:{trainer.server.port}",
            weights_transport=transport,
            model_path=model,
            cache_dir=tmp_path / "cache",
            engine=engine_config,
            max_fetch_bytes_per_second=LINK_BYTES_PER_SECOND if transport is Transport.HTTP else None,
        )
        engine = engine_config.build(ServedModel(model_path=model, dtype="bfloat16"))
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
                await asyncio.wait_for(is_started.wait(), 200)
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
    assert metrics.weights_refused._value.get() == 0
    return metrics


def ways_of(metrics: GeneratorMetrics) -> dict[str, float]:
    """How many versions came each way."""
    return {way: metrics.weight_fetches.labels(way)._value.get() for way in ("full", "delta", "cache")}
