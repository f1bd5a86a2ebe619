"""A generator with a scripted broker, a scripted weight store, and whatever engine a test gives it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

from prometheus_client import CollectorRegistry

from penstock.network.rpc import call, open_channel, service_of
from penstock.security import NO_SECURITY
from penstock.v1 import generator_pb2, generator_pb2_grpc
from services.generator.config import GeneratorConfig
from services.generator.engine.model_files import IdText
from services.generator.engines.emulated.config import EmulatedEngineConfig
from services.generator.engines.emulated.emulated_engine import EmulatedEngine
from services.generator.engines.transformers.config import TransformersEngineConfig
from services.generator.generator import Generator
from services.generator.metrics import GeneratorMetrics
from services.generator.service import GeneratorServicer
from tests.helpers.brokers.scripted_generation import ScriptedGenerationBroker
from tests.helpers.generators.emulated_spec import emulated_spec
from tests.helpers.proxies.tcp_proxy import proxy_to
from tests.helpers.serving import serving
from tests.helpers.weights.scripted_weight_store import ScriptedWeightStore


class Bench:
    """A generator and everything around it."""

    def __init__(self, tmp_path):
        self.tmp_path = tmp_path
        self.text = IdText()
        published = tmp_path / "published"
        published.mkdir()
        (tmp_path / "model").mkdir()
        self.broker = ScriptedGenerationBroker()
        self.store = ScriptedWeightStore(published)
        self.security = NO_SECURITY
        self.generator = None
        self.stub = None
        self.proxy = None
        self.tasks = []

    async def view(self):
        return await call(self.stub.GetGenerator, generator_pb2.GetGeneratorRequest(), peer="generator")

    @asynccontextmanager
    async def running(
        self, engine, *, through_proxy=False, records_routes=False, environment=None, broker=None, **settings
    ):
        """`broker` is the address of a real one, in place of the scripted one."""
        async with AsyncExitStack() as stack:
            _, target = await stack.enter_async_context(serving(self.broker.service(), self.store.service()))
            if through_proxy:
                self.proxy = await stack.enter_async_context(proxy_to(int(target.rpartition(":")[2])))
                target = self.proxy.address
            kind = TransformersEngineConfig if records_routes else EmulatedEngineConfig
            config = GeneratorConfig(
                listen="127.0.0.1:0",
                run_id="r",
                broker=broker or target,
                weights=target,
                model_path=self.tmp_path / "model",
                cache_dir=self.tmp_path / "cache",
                flush_interval_s=0.02,
                records_routes=records_routes,
                environment=environment,
                engine=kind(**{"max_concurrent_samples": 8} | settings),
            )
            self.registry = CollectorRegistry()
            metrics = GeneratorMetrics(self.registry)
            self.generator = Generator(config, engine=engine, text=self.text, metrics=metrics, security=self.security)
            async with self.generator, self._serving(self.generator):
                yield self

    def num_engine_failures(self, how):
        return self.registry.get_sample_value("penstock_generator_engine_failures_total", {"how": how}) or 0

    @asynccontextmanager
    async def _serving(self, generator):
        service = service_of(GeneratorServicer(generator))

        async def ready():
            pass

        loops = [
            generator.run_engine(ready),
            generator.watch_engine(),
            generator.send_tokens(),
            generator.watch_weights(),
            generator.pull_weights(),
            generator.take_leases(),
        ]
        async with serving(service) as (_, target), open_channel(target) as channel:
            self.stub = generator_pb2_grpc.GeneratorServiceStub(channel)
            self.target = target
            self.tasks = [asyncio.create_task(loop) for loop in loops]
            try:
                yield
            finally:
                for task in self.tasks:
                    task.cancel()
                await asyncio.gather(*self.tasks, return_exceptions=True)


def emulated(**changes):
    spec = {"token_s": 1e-4, "mean_tokens": 12, "tick_s": 0.002, "max_num_seqs": 8} | changes
    return EmulatedEngine(emulated_spec(**spec))
