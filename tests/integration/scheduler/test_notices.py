"""Half of a fleet is given notice, leaves with its tokens handed back, and is used again when it comes back."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import yaml
from aiohttp import web
from prometheus_client import CollectorRegistry

from penstock.clock import SystemClock
from penstock.network.rpc import call, open_channel, service_of
from penstock.process.tasks import end
from penstock.v1 import broker_pb2, generator_pb2, generator_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc, types_pb2
from penstock.wire.codec import int32_array
from services.broker.storage.memory_store import MemoryStore
from services.generator.engine.engine import GenerateRequest, SamplingSettings
from services.generator.engines.base_config import ServedModel
from services.generator.engines.emulated.config import EmulatedEngineConfig
from services.generator.engines.emulated.emulated_engine import write_script
from services.generator.engines.emulated.from_config import build_spec
from services.scheduler.config import LengthsConfig
from services.scheduler.server import make_forecaster
from services.scheduler.service import SchedulerServicer
from tests.helpers.brokers import broker as by_hand
from tests.helpers.brokers.broker import RunningBroker, Trainer, Worker, eventually, prompt
from tests.helpers.brokers.broker import serving as serving_broker
from tests.helpers.console import COMMAND, environment
from tests.helpers.serving import serving
from tests.helpers.weights.scripted_weight_store import ScriptedWeightStore

pytestmark = pytest.mark.timeout(500)

RUN = "r"
"""The run of the scripted weight store."""
LEAVING, STAYING = ("l4-0", "l4-1"), ("l4-2", "l4-3")
NUM_GROUPS, GROUP_SIZE, NUM_TOKENS = 12, 2, 2000
DRAINED_WITHIN_S = 25.0
# Only the head, in its region, can hold the training of 7B; generation on the L4s is what limits the run.
PROBLEM = {
    "id": "fleet",
    "gpu_types": {
        "H800": {"tflops_bf16": 9900, "hbm_GB": 80, "hbm_GBps": 3350, "ar_bus_GBps": 150},
        "L4": {"tflops_bf16": 121, "hbm_GB": 24, "hbm_GBps": 300, "ar_bus_GBps": 12},
    },
    "nodes": [
        {"name": "head", "gpu": "H800", "gpus": 2},
        {"name": "l4", "gpu": "L4", "gpus": 1, "count": 4, "region": "far"},
    ],
    "links": [{"a": "default", "b": "far", "bw_Gbps": 10}],
    "constraints": {"train_single_region": True},
    "model": {
        "params": 7.6e9, "layers": 28, "hidden": 3584, "q_heads": 28, "kv_heads": 4, "head_dim": 128, "vocab": 152064,
    },
    "workload": {
        "prompts_per_step": 64, "group_size": 8, "prompt_len": 30, "staleness": 4,
        "output_len": {"type": "lognormal", "median": 200, "sigma": 0.5, "max": 400},
        "train_tasks": [{"name": "actor", "kind": "train"}],
    },
}  # fmt: skip


class Site:
    """Broker, scheduler and weights in this process; machines as processes of their own."""

    def __init__(self, folder: Path, broker: RunningBroker, scheduler: str, weights: str, plans: Any) -> None:
        self.broker = broker
        self._folder = folder
        self._addresses = {"broker": f"127.0.0.1:{broker.server.port}", "weights": weights}
        self._scheduler = scheduler
        self._stub = plans

    async def start(self, name: str, *notices: str) -> asyncio.subprocess.Process:
        """A machine of one L4, fifteen times as fast."""
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        document = {
            "node_id": name,
            "gpu": "L4",
            "scheduler": self._scheduler,
            "dir": str(folder),
            "generator": {
                "listen": "127.0.0.1:0",
                "run_id": RUN,
                "model_path": str(self._folder),
                "cache_dir": str(folder / "cache"),
                "engine": {"engine": "emulated", "max_context_tokens": 2 * NUM_TOKENS},
                "emulated": {"gpu": "L4", "time_scale": 15},
                **self._addresses,
            },
        }
        (folder / "node.yaml").write_text(yaml.safe_dump(document))
        with (folder / "node.log").open("ab") as log:
            arguments = (*COMMAND, "node", str(folder / "node.yaml"), *notices)
            return await asyncio.create_subprocess_exec(*arguments, env=environment(), stdout=log, stderr=log)

    async def generating(self) -> set[str]:
        """Machines that generate by the plan in force."""
        plan = (await call(self._stub.GetPlan, scheduler_pb2.GetPlanRequest(run_id=RUN), peer="scheduler")).plan
        return {each.node_id for each in plan.assignments if each.role == scheduler_pb2.ROLE_GENERATOR}

    async def views(self) -> dict[str, broker_pb2.GeneratorView]:
        """Connected generators, by machine."""
        view = await self.broker.call("GetRun", broker_pb2.GetRunRequest(run_id=RUN))
        return {each.hello.generator_id.partition("-gen-")[0]: each for each in view.generators}

    async def submit(self, machines: set[str]) -> None:
        """Wait for these machines, and give them samples."""

        async def are_there() -> bool:
            return machines <= (await self.views()).keys()

        await eventually(are_there, timeout_s=120)
        sampling = types_pb2.SamplingParams(max_new_tokens=NUM_TOKENS, temperature=1.0, seed=0)
        await self.broker.submit(*(prompt(f"g{index}", sampling=sampling) for index in range(NUM_GROUPS)), run_id=RUN)

    async def work(self, *machines: str) -> bool:
        """Whether each of these machines has decoded for a while."""
        return all([await self.num_decoded(name) > NUM_TOKENS // 50 for name in machines])

    async def num_decoded(self, machine: str) -> int:
        """Tokens that the machine's present generator has decoded; 0 if there is none."""
        view = (await self.views()).get(machine)
        if view is None:
            return 0
        async with open_channel(view.hello.endpoint) as channel:
            stub = generator_pb2_grpc.GeneratorServiceStub(channel)
            answer = await call(stub.GetGenerator, generator_pb2.GetGeneratorRequest(), peer="generator")
            return int(answer.num_tokens_generated)


@asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[Site]:
    """A site with a plan for four machines."""
    clock, published = SystemClock(), folder / "published"
    published.mkdir()
    lengths = make_forecaster(LengthsConfig(), clock=clock, registry=CollectorRegistry())
    scheduler = SchedulerServicer(clock=clock, heartbeat_interval_s=1.0, lengths=lengths)
    store = ScriptedWeightStore(published)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(store.serving_content())
        _, weights = await stack.enter_async_context(serving(store.service()))
        _, planner = await stack.enter_async_context(serving(service_of(scheduler)))
        broker = await stack.enter_async_context(serving_broker(MemoryStore()))
        stub = scheduler_pb2_grpc.SchedulerServiceStub(await stack.enter_async_context(open_channel(planner)))
        stack.push_async_callback(lengths.close)
        revising = asyncio.create_task(scheduler.revise_forever())
        stack.push_async_callback(end, revising)
        request = scheduler_pb2.CreatePlanRequest(run_id=RUN, problem_json=json.dumps(PROBLEM), keeps_trainers=True)
        request.budget.FromSeconds(2)
        await call(stub.CreatePlan, request, peer="scheduler", timeout_s=150)
        await store.publish(0)
        await broker.open(
            run_id=RUN, groups_per_step=NUM_GROUPS, group_size=GROUP_SIZE, max_completion_tokens=NUM_TOKENS
        )
        yield Site(folder, broker, planner, weights, stub)


@asynccontextmanager
async def notice_url() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """An address that answers 404 until the event is set, then 200."""
    is_leaving = asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=200 if is_leaving.is_set() else 404)

    app = web.Application()
    app.router.add_get("/notice", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/notice", is_leaving
    finally:
        await runner.cleanup()


async def test_half_of_a_fleet_leaves_on_notice_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_hand, "TIMEOUT_S", 120.0)
    notice = tmp_path / "notice"
    async with fleet(tmp_path) as site, notice_url() as (url, is_announced):
        by_file, by_url = (
            await site.start(LEAVING[0], "--notice-file", str(notice)),
            await site.start(LEAVING[1], "--notice-url", url),
        )
        processes = [by_file, by_url, *[await site.start(name) for name in STAYING]]
        try:
            everybody = {*LEAVING, *STAYING}
            assert await site.generating() == everybody
            await site.submit(everybody)
            await eventually(lambda: site.work(*LEAVING), timeout_s=120)

            announced_s = time.monotonic()
            notice.touch()
            is_announced.set()
            async with asyncio.timeout(2 * DRAINED_WITHIN_S):
                statuses = await asyncio.gather(by_file.wait(), by_url.wait())
            assert statuses == [0, 0]
            assert time.monotonic() - announced_s < DRAINED_WITHIN_S
            await site.broker.audit(RUN)

            async def plan_is_for(machines: set[str]) -> bool:
                return await site.generating() == machines

            await eventually(lambda: plan_is_for({*STAYING}), timeout_s=150)
            notice.unlink()
            is_announced.clear()
            processes += [await site.start(name) for name in LEAVING]
            await eventually(lambda: plan_is_for(everybody), timeout_s=150)

            trained = await train(site.broker)
            samples = [sample for group in trained for sample in group.trajectories]
            for sample in samples:
                assert (int32_array(sample.token_ids, "token_ids") == script(sample.key.sample_index, tmp_path)).all()
            assert len(samples) == NUM_GROUPS * GROUP_SIZE
            assert max(sample.key.attempt for sample in samples) == 0, "none began again"
            assert sum(sample.num_leases > 1 for sample in samples) >= 2
            audit = await site.broker.audit(RUN)
            assert (audit.submitted, audit.trained, dict(audit.dropped)) == (len(samples), len(samples), {})
        finally:
            for process in processes:
                if process.returncode is None:
                    process.terminate()
            await asyncio.gather(*(process.wait() for process in processes))


def script(seed: int, model: Path) -> npt.NDArray[np.int32]:
    """What any of the machines says to the prompt with this seed when nothing interrupts it."""
    spec = build_spec(EmulatedEngineConfig(max_context_tokens=2 * NUM_TOKENS), ServedModel(model_path=model))
    sampling = SamplingSettings(max_new_tokens=NUM_TOKENS, temperature=1.0, seed=seed)
    request = GenerateRequest(request_id="any", prompt_token_ids=(1, 2, 3), sampling=sampling)
    return write_script(spec, request).token_ids


async def train(broker: RunningBroker) -> list[types_pb2.TrajectoryGroup]:
    """Score and train everything, once it is generated."""
    worker = Worker.connect(broker.channel, run_id=RUN)
    trainer = Trainer.connect(broker.channel, run_id=RUN)

    async def is_all_generated() -> bool:
        return (await broker.audit(RUN)).in_flight == 0

    scoring = asyncio.create_task(worker.score(NUM_GROUPS * GROUP_SIZE))
    groups = await trainer.groups(NUM_GROUPS)
    await scoring
    await trainer.ack([group.prompt.group_id for group in groups], 1, run_id=RUN)
    await eventually(is_all_generated)
    return groups
