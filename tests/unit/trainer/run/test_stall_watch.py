"""A run that waits too long for a group, on a clock that a test moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock.clock import ManualClock
from penstock.v1 import broker_pb2
from services.trainer.run.stall_watch import StallWatch


class _Run:
    """What `StallWatch` needs of a RunContext."""

    def __init__(self, *, max_new_tokens: int, tokens_per_second: float) -> None:
        self.time_s, self.call_s, self.num_calls = 0.0, 0.0, 0
        self._tokens_per_second = tokens_per_second
        self.run_id = "r"
        self.clock: Any = SimpleNamespace(monotonic_s=lambda: self.time_s)
        self.client = SimpleNamespace(get_run=self._get_run)
        self.config = SimpleNamespace(sampling=SimpleNamespace(max_new_tokens=max_new_tokens))

    async def _get_run(self, _run_id: str) -> broker_pb2.GetRunResponse:
        self.num_calls += 1
        self.time_s += self.call_s
        view = broker_pb2.GeneratorView(measured_tokens_per_second=self._tokens_per_second)
        view.hello.generator_id = "gen-1"
        return broker_pb2.GetRunResponse(generators=[view])


def silence(run: Any, configured_s: float | None = None) -> StallWatch:
    return StallWatch(run, setting="trainer.max_silence_s", configured_s=configured_s, least_s=1800.0)


async def test_long_completions_are_waited_for_and_others_are_not() -> None:
    run = _Run(max_new_tokens=32_768, tokens_per_second=20.0)
    watched = silence(run)
    for run.time_s in (1799.0, 1801.0, 3600.0, 4915.0):
        assert await watched.exceeded() is None
    run.time_s = 4980.0
    limit = await watched.exceeded()
    assert limit is not None
    assert "4915 s (3 x 32768 tokens at 20 tokens/s of gen-1; trainer.max_silence_s" in str(limit)
    run = _Run(max_new_tokens=256, tokens_per_second=20.0)
    watched = silence(run)
    run.time_s = 1801.0
    assert str(await watched.exceeded()).startswith("1800 s (the least")


async def test_the_speed_is_asked_for_once_a_minute_and_only_when_it_matters() -> None:
    run = _Run(max_new_tokens=32_768, tokens_per_second=20.0)
    watched = silence(run)
    for second in range(2000):
        run.time_s = float(second)
        await watched.exceeded()
    assert run.num_calls == 4


async def test_time_in_which_the_broker_was_away_does_not_count() -> None:
    run = _Run(max_new_tokens=256, tokens_per_second=20.0)
    watched = silence(run)
    run.time_s = 1801.0
    run.call_s = 600.0
    assert await watched.exceeded() is None
    run.call_s = 0.0
    run.time_s += 1800.0
    assert await watched.exceeded() is None
    run.time_s += 1.0
    assert await watched.exceeded() is not None


async def test_a_limit_that_is_set_needs_no_speed() -> None:
    run = _Run(max_new_tokens=256, tokens_per_second=20.0)
    watched = silence(run, configured_s=5.0)
    run.time_s = 5.5
    assert str(await watched.exceeded()) == "5 s (as trainer.max_silence_s says)"
    assert run.num_calls == 0
    watched.restart()
    assert await watched.exceeded() is None


async def test_a_wall_clock_that_is_set_is_no_silence() -> None:
    run = _Run(max_new_tokens=256, tokens_per_second=20.0)
    clock = ManualClock()
    run.clock = clock
    watched = silence(run, configured_s=30.0)
    for jump_s in (60.0, -60.0, 3600.0, -3600.0):
        clock.set_wall(jump_s)
        assert await watched.exceeded() is None
    clock.set_wall(-3600.0)
    clock.advance(31.0)
    assert await watched.exceeded() is not None
