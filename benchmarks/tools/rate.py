"""Decodes sessions whose tools take their time on one emulated generator, and measures the rate of its tokens.

A real broker on an in-memory store and a real environment server, over gRPC, in this process; the generator's own code
over an emulated engine. Tokens that the environment gives are not counted.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from penstock.batching.step_times import LinearSteps
from penstock.clients.leases import LeaseSession
from penstock.clients.sharding.sharded_tokens import ShardedTokens
from penstock.clock import SystemClock
from penstock.environments import Action, Environment, Message, Outcome, Task
from penstock.environments.serving import EnvironmentServicer, environment_service
from penstock.network import rpc
from penstock.network.connection import Connection
from penstock.process.busy_time import BusyTracker
from penstock.process.tasks import end
from penstock.security import NO_SECURITY
from penstock.v1 import broker_pb2, broker_pb2_grpc, types_pb2, weights_pb2
from penstock.wire.codec import int32_bytes
from services.broker.server import make_run_registry, make_server
from services.broker.storage.memory_store import MemoryStore
from services.generator.decoding.lease_handler import GeneratorLeaseHandler
from services.generator.decoding.rollout_parts import RolloutParts
from services.generator.decoding.sample_runner import Rollouts
from services.generator.decoding.token_rate import TokenRate
from services.generator.emulation.length_law import LogNormalLengths
from services.generator.engine.attested_weights import AttestedWeights
from services.generator.engine.model_files import IdText
from services.generator.engines.emulated.emulated_engine import EmulatedEngine, EmulatedSpec
from services.generator.environments.client import EnvironmentClient
from services.generator.environments.config import EnvironmentLimits
from services.generator.environments.sessions import EnvironmentSessions
from services.generator.metrics import GeneratorMetrics

RUN, GENERATOR = "tools", "gen-0"
MAX_TOKENS = 4096
STOP_TOKEN = 2
_CALL_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is decoded."""

    num_sessions: int = 256
    """Sessions under way at once: in slots, and waiting."""
    num_slots: int = 64
    """Of the engine."""
    tokens_per_second: float = 2000.0
    """Of the engine, over all slots."""
    mean_turn_tokens: float = 45.0
    num_turns: int = 4
    warm_up_s: float = 15.0
    window_s: float = 45.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What was measured."""

    tokens_per_second: float
    mean_decoded: float
    """Samples in the engine."""
    mean_held: float
    """Samples in hand: in the engine, and waiting."""


def tool(*, delays_s: tuple[float, float], num_turns: int) -> type[Environment]:
    """An environment whose answers take a time drawn evenly between these."""

    class Tool(Environment):
        def reset(self, task: Task) -> None:
            self.random = random.Random(task.session_id)

        async def step(self, action: Action) -> Outcome:
            await asyncio.sleep(self.random.uniform(*delays_s))
            is_done = action.turn + 1 >= num_turns
            return Outcome(messages=[Message(role="tool", content="7 8 9 10")], reward=1.0, is_done=is_done)

    return Tool


async def measure(workload: Workload, delays_s: tuple[float, float] | None) -> Rate:
    """The rate of one generator with tools of these delays, or of single turns without an environment."""
    async with memory_broker() as target, Connection(target) as broker:
        await _submit(broker, num_groups=_num_groups(workload), has_environment=delays_s is not None)
        if delays_s is None:
            return await _rate(broker, workload, None)
        servicer = EnvironmentServicer(tool(delays_s=delays_s, num_turns=workload.num_turns), max_sessions=4096)
        server = rpc.Server(listen="127.0.0.1:0", services=[environment_service(servicer)])
        port = await server.start()
        try:
            async with Connection(f"127.0.0.1:{port}", service="environment") as environment:
                limits = EnvironmentLimits(max_waiting=workload.num_sessions - workload.num_slots)
                return await _rate(broker, workload, EnvironmentClient(environment, limits))
        finally:
            await server.stop(grace_s=0)
            await servicer.close()


@asynccontextmanager
async def memory_broker() -> AsyncIterator[str]:
    """A broker on an in-memory store, in this process; its address."""
    registry = make_run_registry(MemoryStore(), registry=CollectorRegistry(), clock=SystemClock())
    server = make_server(registry, listen="127.0.0.1:0", security=NO_SECURITY)
    port = await server.start()
    caring = asyncio.create_task(registry.care(server.set_serving))
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await registry.stop()
        await server.stop(grace_s=0)
        await end(caring)
        await registry.leave()
        await registry.length_reporter.close()


def _num_groups(workload: Workload) -> int:
    """Enough for the whole measurement, in single turns."""
    seconds = workload.warm_up_s + workload.window_s
    return int(2 * workload.tokens_per_second * seconds / workload.mean_turn_tokens) + workload.num_sessions


async def _submit(broker: Connection, *, num_groups: int, has_environment: bool) -> None:
    stub = broker_pb2_grpc.BrokerServiceStub(broker.channel)
    limits = broker_pb2.RunLimits(
        groups_per_step=1024,
        group_size=1,
        max_staleness=1000,
        max_completion_tokens=MAX_TOKENS,
        max_queued_groups=num_groups,
    )
    policy = broker_pb2.RunPolicy(has_environment=has_environment)
    opened = broker_pb2.OpenRunRequest(run_id=RUN, limits=limits, policy=policy)
    await rpc.call(stub.OpenRun, opened, peer=broker.peer, timeout_s=_CALL_TIMEOUT_S)
    for first in range(0, num_groups, 1000):
        prompts = [_prompt(number) for number in range(first, min(first + 1000, num_groups))]
        request = broker_pb2.SubmitPromptsRequest(run_id=RUN, prompts=prompts)
        await rpc.call(stub.SubmitPrompts, request, peer=broker.peer, timeout_s=_CALL_TIMEOUT_S)


def _prompt(number: int) -> types_pb2.Prompt:
    return types_pb2.Prompt(
        group_id=f"g{number}",
        token_ids=int32_bytes([5, 6, 7]),
        group_size=1,
        sampling=types_pb2.SamplingParams(max_new_tokens=MAX_TOKENS, seed=number, stop_token_ids=[STOP_TOKEN]),
        purpose=types_pb2.PURPOSE_TRAIN,
    )


async def _rate(broker: Connection, workload: Workload, client: EnvironmentClient | None) -> Rate:
    steps = LinearSteps(base_s=0.0, per_sample_s=1 / workload.tokens_per_second)
    lengths = LogNormalLengths(mean_tokens=workload.mean_turn_tokens, sigma=0.8)
    engine = EmulatedEngine(EmulatedSpec(steps=steps, lengths=lengths, max_num_seqs=workload.num_slots))
    tokens = ShardedTokens(broker, run_id=RUN, generator_id=GENERATOR, flush_interval_s=0.2)
    held, busy = AttestedWeights(), BusyTracker(SystemClock())
    sessions: list[LeaseSession] = []

    def notify() -> None:
        for session in sessions:
            session.notify()

    def fail(error: Exception) -> None:
        raise error

    parts = RolloutParts(
        engine=engine,
        tokens=tokens,
        held=held,
        text=IdText(),
        end_token_ids=(STOP_TOKEN,),
        busy=busy,
        metrics=GeneratorMetrics(CollectorRegistry()),
        on_change=notify,
        on_engine_failure=fail,
        sessions=None
        if client is None
        else EnvironmentSessions(
            client=client,
            text=IdText(),
            tokenizer=None,
            run_id=RUN,
            instance_id=lambda: "",
        ),
    )
    rollouts = Rollouts(parts, max_concurrent_samples=workload.num_slots)
    handler = GeneratorLeaseHandler(
        engine=engine, rollouts=rollouts, held=held, busy=busy, rate=TokenRate(), on_owner=lambda _owner: None
    )
    hello = broker_pb2.GeneratorHello(
        run_id=RUN,
        generator_id=GENERATOR,
        engine="emulated",
        max_context_tokens=engine.max_model_len,
        has_environment=client is not None,
        profile=broker_pb2.GeneratorProfile(max_concurrent_samples=workload.num_sessions),
    )
    await engine.start()
    await held.attest(weights_pb2.WeightsManifest(policy_version=0, history=0, digest="d"))
    sessions.append(LeaseSession(broker, hello=hello, handler=handler))
    loops = [asyncio.create_task(tokens.run()), asyncio.create_task(sessions[0].run())]
    try:
        await asyncio.sleep(workload.warm_up_s)
        return await _observed(engine, rollouts, workload.window_s)
    finally:
        await rollouts.give_back_all(flush_timeout_s=5.0)
        await end(*loops)
        await engine.stop()


async def _observed(engine: EmulatedEngine, rollouts: Rollouts, window_s: float) -> Rate:
    begun_s, first = time.monotonic(), engine.stats().tokens_generated
    decoded: list[int] = []
    in_hand: list[int] = []
    while time.monotonic() < begun_s + window_s:
        await asyncio.sleep(0.05)
        decoded.append(engine.stats().num_running)
        in_hand.append(len(rollouts.lease_ids))
    num_tokens = engine.stats().tokens_generated - first
    return Rate(
        tokens_per_second=num_tokens / (time.monotonic() - begun_s),
        mean_decoded=sum(decoded) / len(decoded),
        mean_held=sum(in_hand) / len(in_hand),
    )
