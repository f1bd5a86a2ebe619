import asyncio
import itertools
import time

import pytest
from structlog.testing import capture_logs

from penstock.clock import ManualClock
from penstock.errors import DeadlineError, InternalError, InvalidFieldError, QueueFullError, ServiceUnavailableError
from penstock.process.tasks import end
from penstock.rewards import ModelAwayError
from penstock.v1 import reward_pb2, types_pb2
from services.reward.attempts import Attempts
from services.reward.breaker import Breaker
from services.reward.config import RewardModelConfig
from services.reward.pool import ScoringPool
from tests.helpers.rewards.fake_source import FakeSource
from tests.helpers.waiting import until

OK, TIMEOUT, FAILED = types_pb2.SCORE_STATUS_OK, types_pb2.SCORE_STATUS_TIMEOUT, types_pb2.SCORE_STATUS_FAILED


class FakeModel:
    """Fails as told: `behave(items)` raises or returns values."""

    name = "fake"

    def __init__(self, behave):
        self.behave = behave
        self.is_up = True
        self.num_calls = 0
        self.num_running = 0
        self.most_running = 0
        self.num_probes = 0

    async def probe(self):
        self.num_probes += 1
        if not self.is_up:
            raise ModelAwayError("connection refused")

    async def describe(self):
        return reward_pb2.GetRewardModelResponse()

    async def score(self, items, *, timeout_s):
        self.num_calls += 1
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(0)
            if not self.is_up:
                raise ModelAwayError("connection refused")
            values = self.behave(items)
            return [types_pb2.Score(status=OK, value=value) for value in values]
        finally:
            self.num_running -= 1

    async def close(self):
        pass


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch):
    def delays(**_):
        while True:
            yield 0.001

    monkeypatch.setattr("services.reward.pool.backoff_s", delays)
    monkeypatch.setattr("services.reward.breaker.backoff_s", delays)


async def run_pool(source, model, condition, *, texts=None, monotonic_s=time.monotonic, **config):
    config = RewardModelConfig(**config)
    pool = ScoringPool(source=source, model=model, config=config, texts=texts, monotonic_s=monotonic_s)
    task = asyncio.create_task(pool.run())
    try:
        await until(lambda: task.done() or condition())
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return pool


def right(items):
    return [1.0] * len(items)


async def test_every_lease_is_answered_once_and_concurrency_is_bounded():
    source, model = FakeSource(100), FakeModel(right)

    await run_pool(source, model, lambda: not source.held, max_batch_size=7, max_concurrent_batches=3)

    assert sorted(source.scores) == list(range(100))
    assert source.num_answers == 100
    assert model.most_running <= 3
    assert {score.model for score in source.scores.values()} == {"fake"}
    assert all(score.HasField("latency") for score in source.scores.values())


async def test_a_model_that_is_away_costs_no_sample():
    source, model = FakeSource(20), FakeModel(right)
    model.is_up = False
    pool = ScoringPool(source=source, model=model, config=RewardModelConfig(max_batch_size=4, max_retries=0))
    task = asyncio.create_task(pool.run())
    await until(lambda: model.num_probes > 20)
    assert pool.holding_reason
    assert source.num_answers == 0
    assert model.num_calls <= 5

    model.is_up = True
    await until(lambda: not source.held)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert {score.status for score in source.scores.values()} == {OK}
    assert not pool.holding_reason


@pytest.mark.parametrize("error", [DeadlineError, QueueFullError, ServiceUnavailableError])
async def test_what_may_pass_is_tried_again(error):
    failures = iter(range(2))

    def behave(items):
        if next(failures, None) is not None:
            raise error("not now")
        return right(items)

    source = FakeSource(3)
    await run_pool(source, FakeModel(behave), lambda: not source.held, max_retries=2)

    assert {score.status for score in source.scores.values()} == {OK}


async def test_retries_end_with_timeout_and_never_with_a_value():
    def behave(items):
        raise DeadlineError("too slow")

    source = FakeSource(2)
    await run_pool(source, FakeModel(behave), lambda: not source.held, max_retries=1)

    assert {score.status for score in source.scores.values()} == {TIMEOUT}
    assert not any(score.HasField("value") for score in source.scores.values())
    assert "too slow" in source.scores[0].message


@pytest.mark.parametrize("error", [InternalError, InvalidFieldError, DeadlineError])
async def test_one_bad_sample_costs_its_neighbours_nothing(error):
    def behave(items):
        if any(item.key.sample_index == 5 for item in items):
            raise error("sample 5 breaks it")
        return right(items)

    source = FakeSource(16)
    await run_pool(source, FakeModel(behave), lambda: not source.held, max_batch_size=16, max_retries=0)

    expected = TIMEOUT if error is DeadlineError else FAILED
    assert [source.scores[number].status for number in range(16)] == [expected if n == 5 else OK for n in range(16)]


async def test_a_lost_lease_is_not_scored_again():
    source = FakeSource(2)

    def behave(items):
        source.held.pop("1", None)
        if len(items) == 2:
            raise ServiceUnavailableError("again")
        return right(items)

    await run_pool(source, FakeModel(behave), lambda: not source.held)

    assert list(source.scores) == [0]
    assert source.num_answers == 1


async def test_an_open_breaker_lets_one_batch_through_at_a_time_and_burns_none():
    running_while_open = []

    def behave(items):
        if model.num_calls > 10:
            running_while_open.append(model.num_running)
        if model.num_calls < 100:
            raise ServiceUnavailableError("the model loads")
        return right(items)

    source, model = FakeSource(64), FakeModel(behave)
    await run_pool(source, model, lambda: not source.held, max_batch_size=8, max_concurrent_batches=8, max_retries=1)

    assert set(running_while_open[:80]) == {1}
    assert {score.status for score in source.scores.values()} == {OK}


@pytest.mark.parametrize("max_concurrent_batches", [1, 4])
async def test_a_sample_that_breaks_the_model_each_time_is_given_up_alone(max_concurrent_batches):
    def behave(items):
        if any(item.key.sample_index == 5 for item in items):
            raise ServiceUnavailableError("connection reset")
        return right(items)

    source = FakeSource(40)
    seconds = itertools.count(step=10)
    await run_pool(
        source,
        FakeModel(behave),
        lambda: not source.held,
        monotonic_s=lambda: float(next(seconds)),
        max_batch_size=4,
        max_concurrent_batches=max_concurrent_batches,
        max_retries=1,
    )

    assert [number for number, score in source.scores.items() if score.status == TIMEOUT] == [5]
    assert sum(score.status == OK for score in source.scores.values()) == 39


async def test_unavailability_counts_once_a_minute_while_no_call_succeeds():
    now_s = 0.0
    attempts = Attempts(max_tries=2, num_successes=lambda: 0, monotonic_s=lambda: now_s)
    away = ServiceUnavailableError("loads")

    assert not attempts.are_exhausted_by(away)
    now_s = 59.0
    assert not attempts.are_exhausted_by(away)
    now_s = 61.0
    assert attempts.are_exhausted_by(away)


async def test_the_log_says_who_is_away_since_when_and_how_many_wait_but_not_too_often():
    now_s = 0.0
    model = FakeModel(right)
    breaker = Breaker(model, num_waiting=lambda: 37, monotonic_s=lambda: now_s)
    with capture_logs() as logs:
        breaker.failed("refused", is_away=True)
        for now_s in (1.0, 9.0, 12.0, 13.0, 20.0):  # noqa: B007 -- the breaker reads it
            breaker.failed("refused", is_away=True)
        now_s = 31.0
        breaker.succeeded()

    assert [entry["event"] for entry in logs] == [
        "reward model fake is unreachable, since 0 s; 37 samples wait",
        "reward model fake is unreachable, since 12 s; 37 samples wait",
        "reward model fake answers again after 31 s",
    ]


async def test_failures_in_a_row_open_the_breaker_and_a_success_closes_it():
    breaker = Breaker(FakeModel(right), num_waiting=lambda: 0)
    breaker.failed("slow", is_away=False)
    breaker.failed("slow", is_away=False)
    breaker.succeeded()
    breaker.failed("slow", is_away=False)
    breaker.failed("slow", is_away=False)
    assert not breaker.is_open
    breaker.failed("slow", is_away=False)
    assert breaker.is_open
    async with breaker.permit():
        breaker.succeeded()
    assert not breaker.is_open


class ErringModel(FakeModel):
    """A grader whose sandbox fails for the samples that `breaks` says."""

    def __init__(self, breaks):
        super().__init__(lambda items: [1.0] * len(items))
        self.breaks = breaks
        self.status = types_pb2.SCORE_STATUS_SANDBOX_ERROR

    async def score(self, items, *, timeout_s):
        await super().score(items, timeout_s=timeout_s)
        broken = types_pb2.Score(status=self.status, message="no namespaces")
        return [broken if self.breaks(item) else types_pb2.Score(status=OK, value=1.0) for item in items]


async def test_a_sample_that_breaks_the_grader_each_time_is_given_up_and_costs_its_neighbours_nothing():
    source = FakeSource(40)
    model = ErringModel(lambda item: item.key.sample_index == 3)
    pool = await run_pool(source, model, lambda: not source.held, max_retries=2, max_batch_size=8)
    assert source.scores[3].status == types_pb2.SCORE_STATUS_SANDBOX_ERROR
    assert [score.status for index, score in source.scores.items() if index != 3] == [OK] * 39
    assert pool.holding_reason == ""


async def test_samples_wait_for_a_broken_grader_and_are_scored_when_it_works_again():
    source = FakeSource(40)
    model = ErringModel(lambda _: True)
    pool = ScoringPool(model=model, config=RewardModelConfig(max_retries=0, max_batch_size=20), source=source)
    task = asyncio.create_task(pool.run())
    try:
        await until(lambda: bool(pool.holding_reason))
        assert pool.holding_reason.startswith("reward model fake cannot judge: SANDBOX_ERROR for ")
        assert pool.holding_reason.endswith(" samples: no namespaces")
        calls = model.num_calls
        await until(lambda: model.num_calls > calls)
        assert source.scores == {}
        model.breaks = lambda _: False
        await until(lambda: not source.held)
    finally:
        task.cancel()
    assert [score.status for score in source.scores.values()] == [OK] * 40
    assert pool.holding_reason == ""


async def test_what_is_judged_is_answered_while_others_of_its_batch_are_tried_again():
    source = FakeSource(8)
    model = ErringModel(lambda item: item.key.sample_index in (2, 5))
    pool = ScoringPool(model=model, config=RewardModelConfig(max_retries=20, max_error_share=1), source=source)
    task = asyncio.create_task(pool.run())
    try:
        await until(lambda: model.num_calls > 2)
        assert sorted(source.scores) == [0, 1, 3, 4, 6, 7]
        assert sorted(source.held) == ["2", "5"]
        model.breaks = lambda _: False
        await until(lambda: not source.held)
    finally:
        task.cancel()
    assert {score.status for score in source.scores.values()} == {OK}


def raising(error):
    def behave(items):
        raise error

    return FakeModel(behave)


def failing(status):
    model = ErringModel(lambda _: True)
    model.status = status
    return model


@pytest.mark.parametrize("kind", [InternalError("bug"), DeadlineError("slow"), FAILED, TIMEOUT])
async def test_a_grader_that_fails_too_often_is_waited_for_however_it_fails(kind):
    source = FakeSource(64)
    model = raising(kind) if isinstance(kind, Exception) else failing(kind)
    pool = ScoringPool(model=model, config=RewardModelConfig(max_retries=0, max_batch_size=4), source=source)
    task = asyncio.create_task(pool.run())
    try:
        await until(lambda: "cannot judge" in pool.holding_reason)
        num_dropped, num_calls = len(source.scores), model.num_calls
        await until(lambda: model.num_calls > num_calls + 50)
        # Those given up before it was known; with each worker one more at most.
        assert len(source.scores) <= max(num_dropped, 16) + 4
        model.behave, model.breaks = right, lambda _: False
        await until(lambda: not source.held)
    finally:
        task.cancel()
    assert pool.holding_reason == ""
    assert sum(score.status == OK for score in source.scores.values()) >= 64 - 20


async def test_a_reward_that_can_use_no_row_is_waited_for_and_one_that_has_used_some_is_not():
    source, model = FakeSource(200), failing(types_pb2.SCORE_STATUS_INVALID)
    pool = ScoringPool(model=model, config=RewardModelConfig(max_batch_size=8), source=source)
    task = asyncio.create_task(pool.run())
    try:
        await until(lambda: "cannot judge: INVALID for each of the " in pool.holding_reason)
        num_calls = model.num_calls
        await until(lambda: model.num_calls > num_calls)
        assert len(source.scores) < 100
        model.breaks = lambda item: item.key.sample_index % 2 == 0
        await until(lambda: not source.held)
    finally:
        task.cancel()
    assert pool.holding_reason == ""
    assert source.scores[199].status == OK


async def test_a_function_that_raises_is_called_again_and_one_that_took_too_long_is_not():
    for status, num_calls in ((FAILED, 3), (TIMEOUT, 1)):
        source, model = FakeSource(1), failing(status)
        await run_pool(source, model, lambda source=source: not source.held, max_retries=2)
        assert (source.scores[0].status, model.num_calls) == (status, num_calls)


async def test_each_sample_counts_once_however_often_it_is_tried():
    # One of eight fails, which is less than the share, and each is tried three times more.
    source, model = FakeSource(64), ErringModel(lambda item: item.key.sample_index % 8 == 0)
    await run_pool(source, model, lambda: not source.held, max_retries=3, max_concurrent_batches=1)
    assert sorted(index for index, score in source.scores.items() if score.status != OK) == list(range(0, 64, 8))


async def test_a_model_that_answers_probes_and_is_away_for_samples_costs_none_either():
    refusals = iter(range(20))

    def behave(items):
        if next(refusals, None) is not None:
            raise ModelAwayError("not a reward model")
        return right(items)

    source, seconds = FakeSource(3), itertools.count(step=100)
    await run_pool(
        source, FakeModel(behave), lambda: not source.held, max_retries=0, monotonic_s=lambda: float(next(seconds))
    )
    assert {score.status for score in source.scores.values()} == {OK}


async def test_the_rate_is_said_of_a_worker_that_was_as_busy_as_it_may_be():
    clock = ManualClock()

    def behave(items):
        clock.advance(2.0)
        return [1.0] * len(items)

    source = FakeSource(48)
    config = RewardModelConfig(max_batch_size=8, max_concurrent_batches=1)
    pool = ScoringPool(source=source, model=FakeModel(behave), config=config, monotonic_s=clock.monotonic_s)
    assert pool.samples_per_second == 0
    task = asyncio.create_task(pool.run())
    await until(lambda: len(source.scores) == 48)
    await end(task)
    assert pool.samples_per_second == 4.0
