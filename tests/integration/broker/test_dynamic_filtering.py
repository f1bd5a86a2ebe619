"""The trainer's feeder against a real broker that filters groups out: every one is replaced, to the run's last step."""

from __future__ import annotations

import asyncio
from pathlib import Path

from penstock.clients.broker import BrokerClient
from penstock.clock import SystemClock
from penstock.v1 import types_pb2
from services.broker.storage.memory_store import MemoryStore
from services.trainer.config import TrainingConfig
from services.trainer.data.prompt_mixture import PromptMixture, PromptSource
from services.trainer.data.prompt_order import EncodedPrompt
from services.trainer.data.prompt_rows import Row
from services.trainer.reporting.overlap import OverlapMeter
from services.trainer.reporting.progress import Progress
from services.trainer.run.context import RunContext, RunSpec
from services.trainer.run.monitor import RunMonitor
from services.trainer.run.prompt_feeder import PromptFeeder, PromptSubmitter
from tests.helpers.brokers.broker import RUN, Generator, Trainer, Worker, chunk, eventually, result, serving
from tests.helpers.ports import free_address

NUM_STEPS, GROUPS_PER_STEP, GROUP_SIZE = 4, 2, 2


def _context(tmp_path: Path, client: BrokerClient) -> RunContext:
    config = TrainingConfig.model_validate(
        {
            "run": {"num_steps": NUM_STEPS},
            "model": {"path": "none"},
            "data": {"train": "none"},
            "algorithm": {"group_size": GROUP_SIZE, "prompts_per_step": GROUPS_PER_STEP, "max_staleness": 1},
            "policy": {"drops_zero_variance": True, "num_extra_samples": 1, "partial_groups": "wait"},
        }
    )
    spec = RunSpec(run_id=RUN, config=config, run_dir=tmp_path, resume=False)
    return RunContext(spec=spec, client=client, progress=Progress(), version_lock=asyncio.Lock(), clock=SystemClock())


async def _decode(generator: Generator) -> None:
    while True:
        [lease] = await generator.leases(1)
        last = chunk(lease, [7, 8, 9], version=generator.version, finish=types_pb2.FINISH_REASON_STOP)
        errors = await generator.put(last)
        assert {error.reason for error in errors} <= {"LEASE_LOST", "UNKNOWN_SAMPLE"}, "only what was aborted"


async def _score(worker: Worker) -> None:
    """Every other prompt is so easy that all its samples are right; the first attempts at one get no score."""
    while True:
        [lease] = await worker.leases(1)
        key = lease.item.key
        if key.group_id == "t1" and key.attempt == 0:
            await worker.report(result(lease, None, types_pb2.SCORE_STATUS_FAILED))
        else:
            is_easy = int(key.group_id.removeprefix("t")) % 2 == 0
            await worker.report(result(lease, 1.0 if is_easy else float(key.sample_index)))


async def _train(context: RunContext, trainer: Trainer, generator: Generator) -> None:
    progress = context.progress
    for version in range(NUM_STEPS):
        groups = [group for _ in range(GROUPS_PER_STEP) for group in await trainer.groups(1)]
        assert {len(group.trajectories) for group in groups} == {GROUP_SIZE}
        async with context.version_lock:
            progress.record_step({group.prompt.group_id: range(GROUP_SIZE) for group in groups})
            await trainer.ack([group.prompt.group_id for group in groups], version + 1)
            progress.acked_version = version + 1
        generator.beat(version=version + 1)


def _mixture(context: RunContext) -> PromptMixture:
    row = EncodedPrompt(row=Row(prompt="p", answer="a", metadata_json="{}"), token_ids=(1, 2, 3))
    source = PromptSource(
        name="", prompts=[row], group_size=GROUP_SIZE, max_new_tokens=context.config.sampling.max_new_tokens
    )
    return PromptMixture([source], context.config.data, seed=0)


async def test_filtered_groups_are_replaced_until_the_last_step_is_full(tmp_path: Path) -> None:
    address = free_address()
    async with serving(MemoryStore(), listen=address) as broker, BrokerClient(address) as client:
        context = _context(tmp_path, client)
        await context.open_run(0)
        feeder = PromptFeeder(
            context=context,
            submitter=PromptSubmitter(client, RUN),
            mixture=_mixture(context),
        )
        monitor = RunMonitor(context=context, meter=OverlapMeter(), feeder=feeder)
        generator, worker = Generator.connect(broker.channel), Worker.connect(broker.channel)
        generator.beat(credits=1000)
        beside = [
            asyncio.create_task(work) for work in (feeder.run(), monitor.run(), _decode(generator), _score(worker))
        ]
        try:
            async with asyncio.timeout(30):
                await _train(context, Trainer.connect(broker.channel), generator)
        finally:
            for task in beside:
                task.cancel()
            outcomes = await asyncio.gather(*beside, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {asyncio.CancelledError}
        books = await broker.audit()
        assert books.trained == NUM_STEPS * GROUPS_PER_STEP * GROUP_SIZE
        trained = [int(name.removeprefix("t")) for step in context.progress.step_log for name in step.group_ids]
        assert all(position % 2 for position in trained)
        assert len(trained) == NUM_STEPS * GROUPS_PER_STEP
        assert books.dropped["zero_variance"] >= GROUP_SIZE * (len(trained) - 1), "as many easy groups went before"
        assert books.dropped["oversampled"] > 0
        assert books.dropped["reward_failed"] >= GROUP_SIZE


async def test_groups_that_are_gone_without_news_are_replaced_too(tmp_path: Path) -> None:
    address = free_address()
    num_groups = NUM_STEPS * GROUPS_PER_STEP
    async with serving(MemoryStore(), listen=address), BrokerClient(address) as client:
        context = _context(tmp_path, client)
        await context.open_run(0)
        submitter = PromptSubmitter(client, RUN)
        feeder = PromptFeeder(context=context, submitter=submitter, mixture=_mixture(context), check_lost_s=0.05)
        feeding = asyncio.create_task(feeder.run())

        async def num_in_flight() -> int:
            return (await context.open_run(0)).num_groups_in_flight

        async def all_are_there() -> bool:
            return await num_in_flight() == num_groups

        try:
            await eventually(all_are_there)
            await client.drop_groups(RUN, ["t0", "t5"], reason="lost")
            await eventually(all_are_there)
        finally:
            feeding.cancel()
            await asyncio.wait([feeding])
        assert context.progress.position == num_groups + 2
