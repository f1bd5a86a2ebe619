"""A judge among the services: a generator's own endpoint as judge, and a slow one beside a trainer."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

from penstock.clients.scoring import ScoringSession
from penstock.network.connection import Connection
from penstock.v1 import broker_pb2, types_pb2
from services.broker.storage.memory_store import MemoryStore
from services.generator.engines.base_config import ServedModel
from services.generator.engines.transformers.config import TransformersEngineConfig
from services.generator.engines.transformers.transformers_engine import TransformersEngine
from services.reward.config import RewardModelConfig
from services.reward.models.build import build_model
from services.reward.pool import ScoringPool
from tests.helpers.brokers import broker as real
from tests.helpers.brokers.scripted_scoring import scoring_item
from tests.helpers.generators.openai_endpoint import endpoint_bench, save_chat_model
from tests.helpers.rewards.fake_source import FakeSource
from tests.helpers.rewards.scripted_judge import material, scripted_judge, verdict
from tests.helpers.waiting import until

RUBRIC = {"correct": "The answer is right."}


def settings(url: str, **changes: Any) -> RewardModelConfig:
    judge = {"url": url, "model": "tiny", "rubric": RUBRIC, "response_format": "none", "max_tokens": 128, **changes}
    return RewardModelConfig.model_validate({"model": "judge", "judge": judge, "max_retries": 0, "timeout_s": 20})


def leases(count: int) -> list[broker_pb2.ScoringLease]:
    return [
        broker_pb2.ScoringLease(lease_id=str(n), item=scoring_item(n, completion=f"#### {n}")) for n in range(count)
    ]


async def test_a_generators_endpoint_judges_and_what_it_cannot_say_is_never_a_number(tmp_path: Path) -> None:
    path = save_chat_model(tmp_path, has_weights=True)
    document = json.loads((path / "config.json").read_text())
    # The tokenizer is of bytes: instructions alone are longer than the model's own context.
    (path / "config.json").write_text(json.dumps(document | {"max_position_embeddings": 8192}))
    async with endpoint_bench(path, lambda _: verdict(correct=8)) as bench:
        config = settings(bench.base_url)
        model = build_model(RewardModelConfig(model="judge", judge=config.judge))
        [result] = await ScoringPool(model=model, config=config).score(leases(1))
        await model.close()
        assert (result.score.value, result.score.details["answered"]) == (0.8, "tiny@policy-0")
        assert "BEGIN" in bench.engine.prompts[0]
    engine = TransformersEngine(TransformersEngineConfig(max_concurrent_samples=8), ServedModel(model_path=path))
    await engine.start()
    try:
        async with endpoint_bench(path, engine=engine) as bench:
            # An untrained model says nothing that is a verdict.
            config = settings(bench.base_url, max_tokens=16)
            model = build_model(RewardModelConfig(model="judge", judge=config.judge))
            results = await ScoringPool(model=model, config=config).score(leases(2))
            assert {result.score.status for result in results} == {types_pb2.SCORE_STATUS_JUDGE_ERROR}
            assert not any(result.score.HasField("value") for result in results)
            # A grader that never says anything else is waited for, by name.
            source = FakeSource(16)
            pool = ScoringPool(model=model, config=config, source=source)
            task = asyncio.create_task(pool.run())
            await until(lambda: bool(pool.holding_reason), timeout_s=30)
            assert pool.holding_reason.startswith("reward model judge:tiny cannot judge: JUDGE_ERROR for ")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await model.close()
            assert {score.HasField("value") for score in source.scores.values()} <= {False}
    finally:
        await engine.stop()


async def idle_rounds(max_staleness: int, *, num_steps: int = 6, latency: int = 2) -> int:
    """Rounds in which a trainer that could take a step waits for scores, after its first step.

    Each round the judge answers what it was asked `latency` rounds ago, then the trainer takes a step if it has the
    groups, then a generator decodes whatever the broker admits.
    """
    gates: dict[str, asyncio.Event] = {}
    asked: Counter[str] = Counter()

    async def behave(body: dict[str, Any]) -> str:
        name = material(body)["prompt"]
        asked[name] += 1
        await gates.setdefault(name, asyncio.Event()).wait()
        return verdict(correct=5)

    async with real.serving(MemoryStore()) as broker, scripted_judge(behave) as judge:
        await broker.open(groups_per_step=2, group_size=1, max_staleness=max_staleness)
        names = [f"g{number}" for number in range(40)]
        await broker.submit(*(real.prompt(name, group_size=1, text=name) for name in names))
        target = f"127.0.0.1:{broker.server.port}"
        session = ScoringSession(Connection(target), run_id=real.RUN, worker_id="judge-0", max_leases=64)
        config = settings(judge.url)
        model = build_model(RewardModelConfig(model="judge", judge=config.judge))
        pool = ScoringPool(source=session, model=model, config=config)
        tasks = [asyncio.create_task(work) for work in (session.run(), pool.run())]
        generator, trainer = real.Generator.connect(broker.channel), real.Trainer.connect(broker.channel)
        by_round: list[list[str]] = []
        version = num_leased = num_released = num_idle = 0
        try:
            for now in itertools.count():
                for name in by_round[now - latency] if now >= latency else []:
                    gates.setdefault(name, asyncio.Event()).set()
                    num_released += 1
                while True:
                    audit = await broker.audit()
                    num_ready = audit.in_flight_by_state["scored"]
                    if num_ready == num_released - 2 * version:
                        break
                    await asyncio.sleep(0.005)
                if num_ready >= 2:
                    groups = await trainer.groups(2)
                    version += 1
                    assert {group.trajectories[0].score.details["votes"] for group in groups} == {"[0.5]"}
                    await trainer.ack([group.prompt.group_id for group in groups], version)
                elif version:
                    num_idle += 1
                if version == num_steps:
                    return num_idle
                num_admitted = 2 * (version + 1 + max_staleness) - num_leased
                generator.beat(credits=num_admitted, version=version)
                found = await generator.leases(num_admitted)
                await generator.finish(found)
                by_round.append([lease.key.group_id for lease in found])
                num_leased += num_admitted
                await until(lambda: len(asked) == num_leased)  # noqa: B023 -- awaited in the same round
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await model.close()
    raise AssertionError("unreachable")


async def test_a_judge_slower_than_a_step_never_idles_the_trainer_while_staleness_leaves_room() -> None:
    assert await idle_rounds(2) == 0
    # Without room the trainer waits for the judge before each step.
    assert await idle_rounds(0) == 5
