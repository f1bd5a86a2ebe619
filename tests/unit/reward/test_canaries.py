"""Canaries: a grader that drifts is held by name; samples are neither lost nor scored meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from penstock.config import ConfigError
from penstock.rewards import BatchReward, ModelAwayError, RewardItem, RewardModel, RewardResult, ScoreStatus
from penstock.rewards.local import LocalModel
from penstock.rewards.serving import reward_service
from services.reward.canaries.config import CanariesConfig
from services.reward.canaries.known import MAX_CANARIES, read_canaries
from services.reward.config import RewardModelConfig
from services.reward.models.build import build_model
from services.reward.pool import ScoringPool
from tests.helpers.rewards.fake_source import FakeSource
from tests.helpers.serving import serving
from tests.helpers.waiting import until

KNOWN = [
    {"prompt": "p", "completion": "right", "answer": "4", "value": 1.0},
    {"completion": "wrong", "metadata": {"level": 1}, "value": 0.0, "tolerance": 0.5},
    {"prompt": [{"role": "user", "content": "?"}], "completion": "", "status": "invalid"},
]


def is_drifted() -> float | None:
    return REGISTRY.get_sample_value("penstock_reward_is_drifted", {"model": "grader"})


class Grader(BatchReward):
    """Gives 1, and canaries what they are known to get, plus `drift`."""

    name = "grader"

    def __init__(self) -> None:
        self.drift = 0.0
        self.is_away = False
        self.num_rounds = 0
        self.num_samples = 0
        self.may_score = asyncio.Event()
        self.may_score.set()

    async def score(self, items: Sequence[RewardItem]) -> Sequence[RewardResult]:
        drift = self.drift
        if self.is_away:
            raise ModelAwayError("refused")
        if not items[0].must_be_fresh:
            self.num_samples += len(items)
            await self.may_score.wait()
        else:
            self.num_rounds += any(item.completion == "right" for item in items)
        return [self._one(item, drift) for item in items]

    def _one(self, item: RewardItem, drift: float) -> RewardResult:
        if not item.completion:
            return RewardResult(status=ScoreStatus.INVALID, message="nothing there")
        return RewardResult(0.0 if item.completion == "wrong" else 1.0 + drift)


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    def delays(**_: float) -> Iterator[float]:
        while True:
            yield 0.001

    for place in ("canaries.watch", "pool", "breaker"):
        monkeypatch.setattr(f"services.reward.{place}.backoff_s", delays)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


@asynccontextmanager
async def pool_of(
    model: RewardModel, source: FakeSource, tmp_path: Path, *, every: int = 8, **changes: Any
) -> AsyncIterator[ScoringPool]:
    canaries = {"path": write(tmp_path / "known.jsonl", *KNOWN), "every": every}
    document = {"canaries": canaries, "max_batch_size": 4, "max_concurrent_batches": 2, **changes}
    pool = ScoringPool(source=source, model=model, config=RewardModelConfig.model_validate(document))
    task = asyncio.create_task(pool.run())
    try:
        yield pool
        await until(lambda: task.done() or not source.held)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_rounds_come_before_the_first_sample_and_at_a_fixed_interval(tmp_path: Path) -> None:
    grader, source = Grader(), FakeSource(100)
    async with pool_of(LocalModel(grader), source, tmp_path, max_batch_size=2) as pool:
        await until(lambda: not source.held)
    # 100 samples in batches of at most 2, a round after each 8 of them and one before all.
    assert 9 <= grader.num_rounds <= 13
    assert {score.value for score in source.scores.values()} == {1.0}
    assert (source.num_answers, pool.holding_reason) == (100, "")


async def test_batches_of_more_samples_than_lie_between_two_rounds_are_scored_after_one_round_each(
    tmp_path: Path,
) -> None:
    grader, source = Grader(), FakeSource(12)
    async with pool_of(LocalModel(grader), source, tmp_path, every=2, max_concurrent_batches=1):
        await until(lambda: not source.held)
    assert (source.num_answers, grader.num_rounds) == (12, 3)


async def test_a_grader_that_is_wrong_from_the_start_scores_nothing(tmp_path: Path) -> None:
    grader, source = Grader(), FakeSource(8)
    grader.drift = -1.0
    async with pool_of(LocalModel(grader), source, tmp_path) as pool:
        await until(lambda: grader.num_rounds > 5)
        assert pool.holding_reason == (
            "reward model grader drifts: 1 of 3 canaries: line 1 got 0, known is 1 (tolerance 1e-06)"
        )
        assert (grader.num_samples, source.scores) == (0, {})
        grader.drift = 0.0
    assert [score.value for score in source.scores.values()] == [1.0] * 8


@pytest.mark.parametrize("is_remote", [False, True], ids=["in this process", "behind gRPC"])
async def test_samples_wait_out_a_drift_and_what_was_under_way_is_scored_again(tmp_path: Path, is_remote: bool) -> None:
    grader, source = Grader(), FakeSource(40)
    grader.may_score.clear()
    async with serving(reward_service(LocalModel(grader))) as (_, target):
        model = build_model(f"grpc://{target}") if is_remote else LocalModel(grader)
        with capture_logs() as logs:
            async with pool_of(model, source, tmp_path) as pool:
                await until(lambda: grader.num_samples == 8)
                grader.drift = 0.25
                grader.may_score.set()
                await until(lambda: "drifts" in pool.holding_reason)
                num_answered, rounds = source.num_answers, grader.num_rounds
                await until(lambda: grader.num_rounds > rounds + 5)
                # Of the two batches before the round that was due; none that was begun after it.
                assert source.num_answers == num_answered <= 8
                assert len(source.held) + num_answered == 40
                assert "line 1 got 1.25, known is 1" in pool.holding_reason
                assert is_drifted() == 1
                grader.drift = 0.0
            assert (pool.holding_reason, is_drifted()) == ("", 0)
        await model.close()
    assert sorted(source.scores) == list(range(40))
    assert source.num_answers == 40
    assert {score.value for score in source.scores.values()} == {1.0}
    told = [log["event"] for log in logs if "canar" in log["event"]]
    assert len(told) == 2
    assert told[0].endswith("samples wait until canaries pass")
    assert "pass again after" in told[1]


async def test_what_is_being_scored_while_a_drift_is_found_is_scored_again(tmp_path: Path) -> None:
    class Slow(Grader):
        """Its first batch of samples comes back only after a drift was found."""

        def __init__(self) -> None:
            super().__init__()
            self.first_may_end = asyncio.Event()
            self.num_batches = 0

        async def score(self, items: Sequence[RewardItem]) -> Sequence[RewardResult]:
            if items[0].must_be_fresh:
                return await super().score(items)
            self.num_batches += 1
            if self.num_batches == 1:
                await self.first_may_end.wait()
                return [RewardResult(-7.0)] * len(items)
            return await super().score(items)

    grader, source = Slow(), FakeSource(24)
    grader.may_score.clear()
    async with pool_of(LocalModel(grader), source, tmp_path) as pool:
        await until(lambda: grader.num_batches > 1)
        grader.drift = 1.0
        grader.may_score.set()
        await until(lambda: bool(pool.holding_reason))
        grader.first_may_end.set()
        grader.drift = 0.0
    assert -7.0 not in {score.value for score in source.scores.values()}
    assert sorted(source.scores) == list(range(24))


async def test_another_status_is_a_drift_and_a_model_that_is_away_is_none(tmp_path: Path) -> None:
    class Other(Grader):
        def _one(self, item: RewardItem, drift: float) -> RewardResult:
            return RewardResult(1.0) if drift and not item.completion else super()._one(item, 0.0)

    grader, source = Other(), FakeSource(8)
    grader.drift = 1.0
    async with pool_of(LocalModel(grader), source, tmp_path) as pool:
        await until(lambda: "line 3 got ok, known is invalid" in pool.holding_reason)
        grader.is_away = True
        await until(lambda: pool.holding_reason == "reward model grader is unreachable: refused")
        grader.drift, grader.is_away = 0.0, False
    assert len(source.scores) == 8


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"completion": "a"}], "line 1: give the known value, or a known status other than ok"),
        ([{"completion": "a", "value": 1, "status": "invalid"}], "line 1: give the known value"),
        ([KNOWN[0], {"completion": "a", "status": "judge_error"}], "line 2: status"),
        ([{"completion": "a", "status": "failed"}], "line 1: status"),
        ([{"completion": "a", "reward": 1}], "line 1: reward"),
        ([{"completion": "a", "value": 1e300}], "is no reward"),
        ([], "0 canaries; 1 to 1024"),
        ([KNOWN[0]] * (MAX_CANARIES + 1), "1025 canaries"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path: Path, rows: list[Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_canaries(CanariesConfig(path=write(tmp_path / "known.jsonl", *rows)))
    with pytest.raises(ConfigError, match=r"reward\.canaries\.path: .*cannot be read"):
        read_canaries(CanariesConfig(path=tmp_path / "none.jsonl"))
