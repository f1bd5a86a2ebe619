"""Sessions of a mixture of experts whose routes are recorded: real engines, broker and environment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import AsyncMock, patch

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from penstock.environments import Action, Environment, Message, Opening, Outcome, Task
from penstock.environments.serving import EnvironmentServicer, environment_service
from penstock.model.routers import read_routers
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import int32_array
from services.broker.storage.memory_store import MemoryStore
from services.generator.engine.engine import Engine
from services.generator.engines.base_config import ServedModel
from services.generator.engines.transformers.config import TransformersEngineConfig
from services.generator.engines.transformers.transformers_engine import TransformersEngine
from services.generator.engines.vllm.config import VllmEngineConfig
from services.generator.environments.config import EnvironmentConfig
from tests.contract.engines.test_routes import chosen
from tests.helpers.brokers import broker as real
from tests.helpers.generators.generator_bench import Bench
from tests.helpers.models.model_families import save_tiny
from tests.helpers.serving import serving
from tests.helpers.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
RUN, PROMPT, NUM_TURNS = "r", [1, 2, 3], 4
NUM_STEPS_BEFORE_MOVE = 5


class Counting(Environment):
    """Opens with two tokens, answers with as many as turns were taken, and is done after four.

    The sixth answer waits until the first generator is gone, so that its session surely moves between two turns.
    """

    opens = True
    num_steps = 0
    moved: asyncio.Event

    def reset(self, task: Task) -> Opening:
        return Opening(messages=[Message(role="user", content="60 61")])

    async def step(self, action: Action) -> Outcome:
        Counting.num_steps += 1
        if Counting.num_steps > NUM_STEPS_BEFORE_MOVE:
            await Counting.moved.wait()
        said = " ".join(str(62 + number) for number in range(action.turn + 1))
        is_done = action.turn + 1 == NUM_TURNS
        return Outcome(messages=[Message(role="user", content=said)], reward=1.0, is_done=is_done)


@asynccontextmanager
async def environment() -> AsyncIterator[EnvironmentConfig]:
    Counting.num_steps, Counting.moved = 0, asyncio.Event()
    servicer = EnvironmentServicer(Counting)
    async with serving(environment_service(servicer)) as (_, target):
        yield EnvironmentConfig(target=f"grpc://{target}")
    await servicer.close()


def transformers_engine(served: ServedModel) -> Engine:
    return TransformersEngine(TransformersEngineConfig(), served, stream_interval=1)


def vllm_engine(served: ServedModel) -> Engine:
    from services.generator.engines.vllm.vllm_engine import VllmEngine

    return VllmEngine(VllmEngineConfig(max_concurrent_samples=4, kv_cache_gib=0.0625), served, stream_interval=1)


@asynccontextmanager
async def kept(engine: Engine) -> AsyncIterator[Engine]:
    """Started once for both generators; the second one installs its weights again, after which no prefix is cached."""
    await engine.start()
    try:
        with patch.object(engine, "start", AsyncMock()), patch.object(engine, "stop", AsyncMock()):
            yield engine
    finally:
        await engine.stop()


@pytest.mark.parametrize("make_engine", [transformers_engine, pytest.param(vllm_engine, marks=pytest.mark.vllm)])
async def test_tokens_of_an_environment_come_with_the_experts_that_the_engine_chose_for_them(
    make_engine: Callable[[ServedModel], Engine], tmp_path: Path
) -> None:
    """Also of sessions that another generator goes on with, wherever the first one left them."""
    bench = Bench(tmp_path)
    path = save_tiny("qwen3_moe", tmp_path / "model", head_dim=32, moe_intermediate_size=32, hidden_size=64)
    routers = read_routers(path, field="records_routes")
    weights = bench.store.directory / "0.safetensors"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, weights)
    served = ServedModel(model_path=path, dtype="float32", records_routes=True)
    # Half of the model's tokens end a turn.
    sampling = types_pb2.SamplingParams(max_new_tokens=64, temperature=1.0, seed=5, stop_token_ids=range(0, 64, 2))
    async with (
        kept(make_engine(served)) as engine,
        real.serving(MemoryStore()) as broker,
        bench.store.serving_content(),
        environment() as config,
    ):
        await bench.store.publish_file(weights, policy_version=0)
        await broker.open(
            run_id=RUN,
            groups_per_step=1,
            group_size=4,
            routing=routers.shape.to_proto(),
            generation_lease=real.duration(1.5),
            policy=broker_pb2.RunPolicy(has_environment=True),
        )
        await broker.submit(real.prompt("g", group_size=4, sampling=sampling), run_id=RUN)
        parts = {"records_routes": True, "environment": config, "broker": f"127.0.0.1:{broker.server.port}"}
        async with bench.running(engine, **parts):
            await until(lambda: Counting.num_steps > NUM_STEPS_BEFORE_MOVE, timeout_s=100)
        Counting.moved.set()
        async with bench.running(engine, **parts):
            [group] = await real.Trainer.connect(broker.channel, run_id=RUN).groups(1)
    assert max(each.num_leases for each in group.trajectories) > 1
    for sample in group.trajectories:
        tokens = int32_array(sample.token_ids, "token_ids").tolist()
        whole = [*PROMPT, *tokens]
        given = [token for token, is_sampled in zip(tokens, sample.loss_mask, strict=True) if not is_sampled]
        assert given == [60, 61, 62, 62, 63, 62, 63, 64]
        routes = routers.shape.array(sample.routes, num_rows=len(whole) - 1, field="routes")
        assert np.array_equal(routes, chosen(path, routers, whole)[:-1])
