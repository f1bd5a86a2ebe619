"""A real broker and real generators, emulated engines of unlike speed: a long sample moves while it is decoded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry

from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import int32_array
from services.broker.storage.memory_store import MemoryStore
from services.generator.config import GeneratorConfig
from services.generator.engine.engine import GenerateRequest, SamplingSettings
from services.generator.engine.model_files import IdText
from services.generator.engines.emulated.config import EmulatedEngineConfig
from services.generator.engines.emulated.emulated_engine import EmulatedEngine
from services.generator.generator import Generator
from services.generator.metrics import GeneratorMetrics
from tests.helpers.brokers.broker import RunningBroker, eventually, prompt
from tests.helpers.brokers.broker import serving as serving_broker
from tests.helpers.generators.emulated_spec import emulated_spec
from tests.helpers.serving import serving
from tests.helpers.weights.scripted_weight_store import ScriptedWeightStore

NUM_TOKENS, SEED = 256, 7
RUN = "r"
"""The run of the scripted weight store."""


def engine_of(step_s: float) -> EmulatedEngine:
    """One sample at a time decodes in `step_s` a token; what it says does not depend on that."""
    return EmulatedEngine(emulated_spec(base_step_s=step_s, token_s=1e-6, tick_s=0.002, max_num_seqs=4))


@asynccontextmanager
async def generating(
    name: str, engine: EmulatedEngine, *, broker: str, weights: str, folder: Path
) -> AsyncIterator[Generator]:
    """A running generator."""
    (folder / "model").mkdir(parents=True)
    config = GeneratorConfig(
        listen="127.0.0.1:0",
        generator_id=name,
        run_id=RUN,
        broker=broker,
        weights=weights,
        model_path=folder / "model",
        cache_dir=folder / "cache",
        flush_interval_s=0.02,
        engine=EmulatedEngineConfig(max_concurrent_samples=4),
    )
    generator = Generator(config, engine=engine, text=IdText(), metrics=GeneratorMetrics(CollectorRegistry()))

    async def ready() -> None:
        pass

    async with generator:
        loops = (
            generator.run_engine(ready),
            generator.send_tokens(),
            generator.watch_weights(),
            generator.pull_weights(),
            generator.take_leases(),
        )
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            yield generator
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def script() -> list[int]:
    """What any of the engines says to the prompt when nothing interrupts it."""
    engine = engine_of(1e-5)
    await engine.start()
    request = GenerateRequest(
        request_id="alone",
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingSettings(max_new_tokens=NUM_TOKENS, seed=SEED),
    )
    async with aclosing(engine.generate(request)) as spans:
        tokens = [token for span in [span async for span in spans] for token in span.token_ids.tolist()]
    await engine.stop()
    return tokens


async def run_of(broker: RunningBroker) -> broker_pb2.GetRunResponse:
    """The broker's picture."""
    response: broker_pb2.GetRunResponse = await broker.call("GetRun", broker_pb2.GetRunRequest(run_id=RUN))
    return response


async def test_a_long_sample_moves_to_a_fast_generator_and_every_token_is_stored_once(tmp_path: Path) -> None:
    weights = ScriptedWeightStore(tmp_path)
    async with (
        weights.serving_content(),
        serving(weights.service()) as (_, target),
        serving_broker(MemoryStore()) as broker,
    ):
        await weights.publish(0)
        address = f"127.0.0.1:{broker.server.port}"
        await broker.open(run_id=RUN, group_size=1, groups_per_step=1, max_completion_tokens=NUM_TOKENS)
        sampling = types_pb2.SamplingParams(max_new_tokens=NUM_TOKENS, temperature=1.0, seed=SEED)
        await broker.submit(prompt("a", group_size=1, sampling=sampling), run_id=RUN)
        replica = broker.run_registry.replica(RUN)

        async def has_tokens() -> bool:
            return replica.copy is not None and replica.copy.groups["a"].samples[0].num_tokens > 0

        async def is_finished() -> bool:
            return (await run_of(broker)).audit.in_flight_by_state["finished"] == 1

        # Alone, the slow generator would take 25 s.
        async with generating("slow", engine_of(0.1), broker=address, weights=target, folder=tmp_path / "slow"):
            await eventually(has_tokens)
            async with generating("fast", engine_of(0.001), broker=address, weights=target, folder=tmp_path / "fast"):
                await eventually(is_finished)
        assert replica.copy is not None
        sample = replica.copy.groups["a"].samples[0]
        assert (sample.num_moves, sample.num_tokens) == (1, NUM_TOKENS)
        assert sample.generator_id.startswith("fast")
        (chunks,) = await replica.store.chunks(RUN, [("a", 0)])
        stored = [types_pb2.TokenChunk.FromString(chunk) for chunk in chunks]
        assert [token for chunk in stored for token in int32_array(chunk.token_ids, "t").tolist()] == await script()
        await broker.audit(RUN)
