"""Whole generators of one site: one of them fetches new weights across the link, the other one from it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from prometheus_client import CollectorRegistry

from console.node.rates import Meter, Replica, keep_measuring
from penstock.network.rpc import service_of
from penstock.security import NO_SECURITY
from penstock.v1 import generator_pb2
from services.generator.config import GeneratorConfig
from services.generator.engine.model_files import IdText
from services.generator.engines.emulated.config import EmulatedEngineConfig
from services.generator.engines.emulated.emulated_engine import EmulatedEngine
from services.generator.generator import Generator
from services.generator.metrics import GeneratorMetrics
from services.generator.service import GeneratorServicer
from tests.helpers.brokers.scripted_generation import ScriptedGenerationBroker
from tests.helpers.generators.emulated_spec import emulated_spec
from tests.helpers.serving import serving
from tests.helpers.waiting import until
from tests.helpers.weights.sites import site

SIZE_BYTES = 1_000_000


class SiteGenerator:
    """A generator of site "s" with an emulated engine, and what it counted."""

    def __init__(self, name, folder, *, broker, weights, **settings):
        self.registry = CollectorRegistry()
        config = GeneratorConfig(
            listen="127.0.0.1:0",
            generator_id=name,
            site="s",
            run_id="r",
            broker=broker,
            weights=weights,
            model_path=folder,
            cache_dir=folder / name,
            engine=EmulatedEngineConfig(),
            **settings,
        )
        engine = EmulatedEngine(emulated_spec(token_s=1e-4))
        metrics = GeneratorMetrics(self.registry)
        self.generator = Generator(config, engine=engine, text=IdText(), metrics=metrics, security=NO_SECURITY)

    async def run(self, stack):
        async def ready():
            pass

        await stack.enter_async_context(self.generator)
        loops = [
            asyncio.create_task(loop)
            for loop in (
                self.generator.run_engine(ready),
                self.generator.watch_weights(),
                self.generator.pull_weights(),
            )
        ]
        stack.push_async_callback(_end, loops)

    @property
    def policy_version(self):
        return self.registry.get_sample_value("penstock_generator_policy_version")

    def fetched_bytes(self, source):
        return self.registry.get_sample_value("penstock_generator_fetched_bytes_total", {"source": source}) or 0

    @property
    def relayed_bytes(self):
        return self.registry.get_sample_value("penstock_generator_relayed_bytes_total")


async def _end(tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_generators_of_a_site_take_one_copy_of_each_version_across_the_link(tmp_path):
    async with AsyncExitStack() as stack:
        _, broker = await stack.enter_async_context(serving(ScriptedGenerationBroker().service()))
        far = await stack.enter_async_context(site(tmp_path))
        generators = [SiteGenerator(name, tmp_path, broker=broker, weights=far.target) for name in ("g0", "g1")]
        for generator in generators:
            await generator.run(stack)
        sent_bytes = 0
        for version in (1, 2):
            sent_bytes += far.publish(version, size_bytes=SIZE_BYTES).size_bytes
            await until(lambda version=version: all(each.policy_version == version for each in generators))
        assert sum(each.fetched_bytes("origin") for each in generators) == sent_bytes
        assert sum(each.fetched_bytes("relay") for each in generators) == sent_bytes
        await until(lambda: sum(each.relayed_bytes for each in generators) == sent_bytes)
        await until(lambda: [holding.policy_version for holding in far.store.holdings.values()] == [2, 2])
        shares = sorted(holding.origin_bytes / holding.fetched_bytes for holding in far.store.holdings.values())
        assert shares == [0, 1]


async def test_the_relay_that_a_plan_names_takes_every_version_across_the_link_and_a_revision_names_another(tmp_path):
    """The agents of the three machines tell running generators, which fetch nothing twice."""
    async with AsyncExitStack() as stack:
        _, broker = await stack.enter_async_context(serving(ScriptedGenerationBroker().service()))
        far = await stack.enter_async_context(site(tmp_path))
        patience_s = {"g0": 30.0, "g1": 0.0, "g2": 30.0}
        generators = {
            name: SiteGenerator(name, tmp_path, broker=broker, weights=far.target, relay_patience_s=patience)
            for name, patience in patience_s.items()
        }
        for generator in generators.values():
            await generator.run(stack)
        sent_bytes = dict.fromkeys(("g1", "g2"), 0)

        async def publish(version, relay):
            sent_bytes[relay] += far.publish(version, size_bytes=SIZE_BYTES).size_bytes
            await until(lambda: all(each.policy_version == version for each in generators.values()))
            origin = {name: each.fetched_bytes("origin") for name, each in generators.items()}
            assert origin == {"g0": 0, **sent_bytes}

        for version in (1, 2, 3):
            await publish(version, "g1")
        for name, generator in generators.items():
            service = service_of(GeneratorServicer(generator.generator))
            _, target = await stack.enter_async_context(serving(service))
            wanted = generator_pb2.SetRelayPatienceRequest(run_id="r")
            wanted.patience.FromSeconds(0 if name == "g2" else 30)
            told = keep_measuring(
                Meter(),
                lambda target=target: [Replica(target, 1)],
                security=NO_SECURITY,
                relay_patience=lambda wanted=wanted: wanted,
            )
            stack.push_async_callback(_end, [asyncio.create_task(told)])
        await until(lambda: [_patience_s(each) for each in generators.values()] == [30.0, 30.0, 0.0])
        for version in (4, 5, 6):
            await publish(version, "g2")


def _patience_s(generator):
    return generator.generator.view().relay_patience.ToSeconds()
