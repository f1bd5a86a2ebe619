"""A reference in its own service: the losses of a run are those of the reference in the trainer, whoever dies."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.clients.scoring import ScoringSession
from penstock.errors import UnknownRunError
from penstock.network.connection import Connection
from penstock.v1 import broker_pb2, types_pb2
from services.broker.storage.memory_store import MemoryStore
from services.trainer.run import context
from services.trainer.scorer.frozen_model import FrozenModel
from services.trainer.scorer.pool import LogprobPool
from tests.helpers.brokers.broker import Generator, RunningBroker, Worker, chunk, eventually, result, serving
from tests.helpers.trainers.training import run_alone, run_document

pytestmark = pytest.mark.usefixtures("one_thread")
RUN, NUM_STEPS, SAMPLES_PER_STEP = "r", 3, 8
LEASE_S = 2


@pytest.fixture(autouse=True)
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "LEASE_S", LEASE_S)


async def is_open(broker: RunningBroker) -> bool:
    try:
        await broker.call("GetRun", broker_pb2.GetRunRequest(run_id=RUN))
    except UnknownRunError:
        return False
    return True


def tokens_of(key: types_pb2.SampleKey) -> list[int]:
    """The same for the same sample in every run, of 3 to 12 tokens."""
    rng = np.random.default_rng(zlib.crc32(f"{key.group_id}/{key.sample_index}".encode()))
    return [int(token) for token in rng.integers(5, 13, size=rng.integers(3, 13))]


async def generate(broker: RunningBroker) -> None:
    generator = Generator.connect(broker.channel, run_id=RUN)

    async def follow_policy() -> None:
        request = broker_pb2.WatchPolicyRequest(run_id=RUN)
        async for response in broker.stub.WatchPolicy(request):
            generator.beat(credits=SAMPLES_PER_STEP, version=response.policy_version)

    async with asyncio.TaskGroup() as group:
        group.create_task(follow_policy())
        while True:
            [lease] = await generator.leases(1)
            stop = types_pb2.FINISH_REASON_STOP
            errors = await generator.put(
                chunk(lease, tokens_of(lease.key), version=generator.version, finish=stop), run_id=RUN
            )
            assert errors == []


async def reward(broker: RunningBroker) -> None:
    worker = Worker.connect(broker.channel, run_id=RUN)
    while True:
        [lease] = await worker.leases(1)
        await worker.report(result(lease, float(lease.item.key.sample_index % 2)))


@asynccontextmanager
async def working(*works: Any) -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def scorer(target: str, worker_id: str) -> ScoringSession:
    return ScoringSession(
        Connection(target),
        run_id=RUN,
        worker_id=worker_id,
        max_leases=4,
        task=broker_pb2.SCORING_TASK_REFERENCE_LOGPROBS,
    )


async def trained(
    folder: Path, model: Path, algorithm: dict[str, Any], *, loses_a_scorer: bool = False
) -> tuple[list[dict[str, Any]], broker_pb2.Audit]:
    """The lines of a run's metrics, and its audit."""
    async with serving(MemoryStore()) as broker:
        target = f"127.0.0.1:{broker.server.port}"
        document = run_document(folder, model, target, num_steps=NUM_STEPS, num_eval_prompts=0)
        document["run"]["dir"] = str(folder / algorithm.get("reference", "trainer"))
        document["algorithm"] |= {"max_staleness": 0, "kl_coefficient": 0.05, **algorithm}
        training = asyncio.create_task(run_alone(document, run_id=RUN))
        await eventually(lambda: is_open(broker))
        async with working(generate(broker), reward(broker)):
            if algorithm.get("reference"):
                if loses_a_scorer:
                    await lose_a_scorer(target)
                session = scorer(target, "scorer-1")
                pool = LogprobPool(
                    session, FrozenModel(model, device="cpu"), tokens_per_pack=64, max_batch_size=2, max_pass_s=60
                )
                async with working(session.run(), pool.run()):
                    run_dir = await training
                assert session.num_leased >= NUM_STEPS * SAMPLES_PER_STEP
            else:
                run_dir = await training
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        return lines, await broker.audit(RUN)


async def lose_a_scorer(target: str) -> None:
    """One that takes leases and dies with them."""
    session = scorer(target, "scorer-0")
    async with working(session.run()):
        await session.take(max_items=4)


def losses(lines: list[dict[str, Any]]) -> Iterator[dict[str, float]]:
    for line in lines:
        yield {name: value for name, value in line.items() if name.startswith(("loss/", "optimizer/grad_norm"))}


async def test_ppo_with_its_reference_in_a_service_has_the_losses_of_ppo_with_all_in_one(
    tmp_path: Path, model: Path
) -> None:
    """The first scorer dies with leases, which the second takes over; no sample is lost."""
    ppo = {"name": "ppo", "num_minibatches": 2, "correction": "none"}
    alone, audit_alone = await trained(tmp_path, model, ppo)
    apart, audit = await trained(tmp_path, model, {**ppo, "reference": "service"}, loses_a_scorer=True)
    assert len(apart) == NUM_STEPS
    for one, other in zip(losses(alone), losses(apart), strict=True):
        assert {"loss/loss", "loss/value_loss"} <= one.keys()
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
    assert audit.trained == audit_alone.trained == NUM_STEPS * SAMPLES_PER_STEP
    assert not {"reference_failed", "too_many_leases"} & audit.dropped.keys()


@pytest.mark.parametrize("num_minibatches", [1, 2])
async def test_the_kl_term_of_a_loss_reads_what_a_scorer_computed(
    tmp_path: Path, model: Path, num_minibatches: int
) -> None:
    grpo = {"name": "grpo", "num_minibatches": num_minibatches}
    alone, _ = await trained(tmp_path, model, grpo)
    apart, _ = await trained(tmp_path, model, {**grpo, "reference": "service"})
    assert apart[-1]["loss/reference_kl"] > 0
    for one, other in zip(losses(alone), losses(apart), strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
