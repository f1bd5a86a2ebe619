"""`penstock status` over a real stall: it says who is silent, since when, and what happens when."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from console.inspect.status import status_command
from penstock.clients.scoring import ScoringSession
from penstock.clock import ManualClock
from penstock.config import ConfigError
from penstock.network.connection import Connection
from penstock.rewards import FunctionReward, ModelAwayError
from penstock.rewards.local import LocalModel
from penstock.v1 import broker_pb2, types_pb2
from services.broker.storage.memory_store import MemoryStore
from services.reward.config import RewardModelConfig
from services.reward.pool import ScoringPool
from tests.helpers.brokers.broker import (
    RUN,
    Generator,
    RunningBroker,
    Trainer,
    Worker,
    chunk,
    duration,
    eventually,
    prompt,
    serving,
)
from tests.helpers.ports import free_address

pytestmark = pytest.mark.slow


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def broker(clock: ManualClock) -> AsyncIterator[RunningBroker]:
    async with serving(MemoryStore(clock), clock=clock) as running:
        await running.open(groups_per_step=3, generation_lease=duration(60))
        yield running


async def pass_time(broker: RunningBroker, clock: ManualClock, seconds: float) -> None:
    """In steps that the broker's caretaker sees: more at once would be a gap, in which nobody is silent."""
    await eventually(lambda: has_ticked(broker, clock))
    while seconds > 0:
        step_s = min(seconds, 4.0)
        clock.advance(step_s)
        seconds -= step_s
        await eventually(lambda: has_ticked(broker, clock))


async def has_ticked(broker: RunningBroker, clock: ManualClock) -> bool:
    """Whether the run's clock was advanced after the last step."""
    store = broker.run_registry.store
    assert isinstance(store, MemoryStore)
    return store._runs[RUN].clock._at_s == clock.now_s()


async def first_wait(broker: RunningBroker) -> broker_pb2.Wait:
    run = await broker.call("GetRun", broker_pb2.GetRunRequest(run_id=RUN))
    wait: broker_pb2.Wait = run.waits[0]
    return wait


async def test_a_generator_that_goes_silent_is_reported_of_until_its_lease_ends(
    broker: RunningBroker, clock: ManualClock
) -> None:
    await broker.submit(prompt("g17"))
    silent, trainer = Generator.connect(broker.channel, "gen-2"), Trainer.connect(broker.channel)
    silent.beat(credits=2)
    leases = await silent.leases(2)
    assert await silent.put(chunk(leases[0], [7, 8])) == []
    await pass_time(broker, clock, 41)
    awake = Generator.connect(broker.channel, "gen-1")
    awake.beat()
    await awake.idle_reason()
    wait = await first_wait(broker)
    assert f"{wait.waiter} waits for {wait.owner}: {wait.reason}" == (
        "trainer waits for generator gen-2: 3 of 3 groups are missing; sample g17/0 and 1 more are leased by gen-2, "
        "silent for 41 s, lease ends in 19 s, then another continues from token 2"
    )
    assert wait.since_time.seconds == 1_000_000
    assert wait.deadline_time.seconds == 1_000_060
    # The trainer's own stream is told the same.
    while "silent for 41 s" not in (reason := (await trainer.waiting()).reason):
        pass
    assert reason == wait.reason
    await pass_time(broker, clock, 20)
    awake.beat(credits=2)
    [again, _] = await awake.leases(2)
    assert len(again.prefix_token_ids) == 8
    assert (await first_wait(broker)).owner == "generator gen-1"


async def test_a_reward_worker_that_left_is_missed(broker: RunningBroker, clock: ManualClock) -> None:
    await broker.submit(prompt("a"))
    generator, worker = Generator.connect(broker.channel), Worker.connect(broker.channel)
    worker.stream.send(broker_pb2.StreamScoringRequest())
    generator.beat(credits=2)
    leases = await generator.leases(2)
    worker.stream.call.cancel()
    await generator.finish(leases)
    await pass_time(broker, clock, 12)
    generator.beat()
    await generator.idle_reason()
    wait = await first_wait(broker)
    assert wait.reason == "3 of 3 groups are missing; no reward worker is connected; 2 finished samples wait for 12 s"


@asynccontextmanager
async def judged_by(
    broker: RunningBroker, model: LocalModel, config: RewardModelConfig | None = None
) -> AsyncIterator[None]:
    """Two finished samples that a reward worker holds."""
    await broker.submit(prompt("a"))
    generator = Generator.connect(broker.channel)
    generator.beat(credits=2)
    await generator.finish(await generator.leases(2))
    session = ScoringSession(
        Connection(f"127.0.0.1:{broker.server.port}"), run_id=RUN, worker_id="judge-0", max_leases=2
    )
    pool = ScoringPool(source=session, model=model, config=config or RewardModelConfig())
    session.holding_reason = lambda: pool.holding_reason
    tasks = [asyncio.create_task(work) for work in (session.run(), pool.run())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_shown(broker: RunningBroker, clock: ManualClock, reason: str) -> None:
    generator = Generator.connect(broker.channel)
    # The worker renews its leases in real time: further seconds of the broker's clock would end them.
    await pass_time(broker, clock, 10)

    async def is_shown() -> bool:
        generator.beat()
        return reason in (await first_wait(broker)).reason

    await eventually(is_shown)


async def test_a_reward_worker_whose_model_is_away_says_so(broker: RunningBroker, clock: ManualClock) -> None:
    class Away(LocalModel):
        async def probe(self) -> None:
            raise ModelAwayError("connection refused")

        async def score(self, items: Sequence[Any], *, timeout_s: float) -> list[types_pb2.Score]:
            raise ModelAwayError("connection refused")

    async with judged_by(broker, Away(FunctionReward(lambda completion: 0.0, name="judge"))):
        reason = "judge-0 holds 2 finished samples: reward model judge is unreachable: connection refused"
        await until_shown(broker, clock, reason)


async def test_a_reward_worker_whose_canaries_drift_says_so(
    broker: RunningBroker, clock: ManualClock, tmp_path: Path
) -> None:
    known = tmp_path / "known.jsonl"
    known.write_text('{"completion": "right", "value": 1}\n')
    config = RewardModelConfig.model_validate({"canaries": {"path": known}})
    async with judged_by(broker, LocalModel(FunctionReward(lambda completion: 0.0, name="judge")), config):
        reason = (
            "judge-0 holds 2 finished samples: reward model judge drifts: 1 of 1 canaries: line 1 got 0, known is 1"
        )
        await until_shown(broker, clock, reason)


def options(broker: str, **changes: Any) -> dict[str, Any]:
    return {"broker": broker, "runs_dir": Path("none"), "is_watched": False, "as_json": False} | changes


async def test_the_command_shows_it_on_one_screen(broker: RunningBroker, capsys: pytest.CaptureFixture[str]) -> None:
    await broker.submit(prompt("a"))
    target = f"127.0.0.1:{broker.server.port}"
    generator = Generator.connect(broker.channel, "gen-7")
    generator.beat(credits=1, num_running=1, tokens_per_second=120.4, kv_cache_usage=0.5, num_waiting=3)
    await generator.leases(1)
    assert await asyncio.to_thread(lambda: status_command(RUN, **options(target))) == 0
    shown = capsys.readouterr().out
    for words in ("run run-1 (open), policy version 0", "queued 1", "reward workers: none", "gen-7", "120", "50 %"):
        assert words in shown
    assert "trainer waits for generator gen-7" in shown
    assert await asyncio.to_thread(lambda: status_command(RUN, **options(target, as_json=True))) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["waits"][0]["owner"] == "generator gen-7"
    assert document["waits"][0]["deadline_s"] > document["waits"][0]["since_s"]
    assert document["generators"][0]["num_leases"] == 1
    with pytest.raises(ConfigError, match="not open"):
        await asyncio.to_thread(lambda: status_command("nobody", **options(target)))


async def test_a_broker_that_is_away_is_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    target = free_address()
    assert await asyncio.to_thread(lambda: status_command(RUN, **options(target))) == 1
    assert f"broker {target}" in capsys.readouterr().out
    assert await asyncio.to_thread(lambda: status_command(RUN, **options(target, as_json=True))) == 1
    assert f"broker {target}" in json.loads(capsys.readouterr().out)["broker_problem"]
