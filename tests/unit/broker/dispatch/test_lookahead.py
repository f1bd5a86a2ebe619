"""Looks ahead on the virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from services.broker.dispatch.fifo import Fifo
from services.broker.dispatch.latency import LatencyModel, Load
from services.broker.dispatch.length_draws import Draw, Item, QueuedPrompt
from services.broker.dispatch.length_histogram import LengthCounts
from services.broker.dispatch.lookahead import Budget, TooLateError, cost_s, finish_s
from services.broker.dispatch.lpt import LongestFirst
from services.broker.dispatch.policies import make_policy
from services.broker.dispatch.situation import Situation
from services.broker.dispatch.stealing_rule import is_worth_moving, late_generators


def situation_of(models: dict[str, LatencyModel], lengths: Sequence[float]) -> Situation:
    """Idle generators, and one queued sample of each length."""
    queue = LengthCounts()
    for tokens in lengths:
        queue.add(tokens)
    return Situation(
        asking=min(models),
        loads={
            name: Load(model=model, max_samples=model.max_samples, max_leases=model.max_samples)
            for name, model in models.items()
        },
        queue=queue,
        under_way=LengthCounts(),
        mean_tokens=100.0,
        has_forecasts=True,
        has_speeds=True,
    )


def item_of(tokens: float, forecast: float | None = None) -> Item:
    return Item(predicted=forecast or tokens, expected=forecast or tokens, tokens=tokens)


def draw_of(*lengths: float, forecast: float | None = None) -> Draw:
    """A prompt of one sample for each length."""
    return Draw([QueuedPrompt(waiting=[item_of(tokens, forecast)]) for tokens in lengths])


def test_one_generator_takes_as_long_as_the_steps_summed_by_hand() -> None:
    model = LatencyModel(base_s=1.0, per_sample_s=0.5, max_samples=2)
    # Two slots. 4 and 6 tokens together for 4 steps of 2 s; then 6 has 2 to go, beside 3: 2 steps; then 3 has 1: 1.5 s.
    situation = situation_of({"a": model}, [4, 6, 3])
    assert finish_s(make_policy("fifo"), situation, draw_of(4, 6, 3)) == pytest.approx(4 * 2 + 2 * 2 + 1 * 1.5)


def test_where_steps_overlap_a_look_also_costs_when_samples_are_done_on_average() -> None:
    model = LatencyModel(base_s=1.0, per_sample_s=0.0, max_samples=1)
    situation = situation_of({"a": model}, [4, 6])
    draw = draw_of(4, 6)
    # The first is done after 4 s, the second after 10 s.
    assert cost_s(make_policy("fifo"), situation, draw) == pytest.approx(10.0)
    overlapping = replace(situation, steps_overlap=True)
    assert cost_s(make_policy("fifo"), overlapping, draw) == pytest.approx(10.0 + 7.0)


def test_the_policy_sees_forecasts_and_time_passes_by_true_lengths() -> None:
    model = LatencyModel(base_s=1.0, per_sample_s=0.0, max_samples=1)
    situation = situation_of({"a": model}, [10, 10])
    assert finish_s(make_policy("lpt"), situation, draw_of(30, 4, forecast=10)) == pytest.approx(34.0)


def test_a_sample_stuck_on_a_slow_generator_is_taken_over() -> None:
    fast = LatencyModel(base_s=0.05, max_samples=1)
    situation = situation_of({"a-slow": fast.scaled(10.0), "b-fast": fast}, [1000, 1000])
    # First come, first served: alone the slow one takes 500 s, the fast one both in 100 s.
    assert 50.0 < finish_s(make_policy("fifo"), situation, draw_of(1000, 1000)) < 150.0


def test_a_policy_is_reviewed_with_what_is_under_way_now() -> None:
    class Watched(LongestFirst):
        def review(self, situation: Situation) -> None:
            seen.append((situation.queue.num_samples, situation.under_way.num_samples))

    seen: list[tuple[int, int]] = []
    model = LatencyModel(base_s=1.0, per_sample_s=0.0, max_samples=2)
    # One beside one that the generator holds already.
    draw = Draw(draw_of(20, 20, 20).queued, under_way=[("a", item_of(20))])
    assert finish_s(Watched(), situation_of({"a": model}, [20] * 3), draw) == pytest.approx(40.0)
    # Both end at once, and before the rest is leased the policy is reviewed.
    assert set(seen) == {(3, 1), (2, 2), (2, 0)}


def test_what_was_begun_is_dealt_before_what_is_longer() -> None:
    # One slot. The last of all is the same in any order, the mean is not.
    situation = situation_of({"a": LatencyModel(base_s=1.0, per_sample_s=0.0, max_samples=1)}, [3, 2, 1])
    prompts = [QueuedPrompt(waiting=[item_of(n)], is_begun=n == 1) for n in (2, 3, 1)]
    cost = cost_s(LongestFirst(), replace(situation, steps_overlap=True), Draw(prompts))
    assert cost == pytest.approx(6 + (1 + 4 + 6) / 3)


def held(base_s: float, *remaining: float) -> Load:
    load = Load(model=LatencyModel(base_s=base_s, per_sample_s=0.0), max_samples=8, max_leases=8)
    for tokens in remaining:
        load.add(tokens, 0.0)
    return load


def test_only_generators_whose_longest_sample_may_be_the_last_give_it_away() -> None:
    donors = {"last": held(1.0, 100), "near": held(1.0, 60), "early": held(1.0, 20)}
    assert late_generators(held(1.0), donors, length_error=0.0) == ["last"]
    # Two standard deviations: 60 may become 109.
    assert late_generators(held(1.0), donors, length_error=0.3) == ["last", "near"]
    # The one that asks is itself done last: nothing that moves to it shortens the step.
    assert late_generators(held(1.0, 500), donors, length_error=0.0) == []


def test_a_move_must_gain_a_fifth_and_a_second() -> None:
    assert is_worth_moving(held(0.1), 100, 0, there_s=20.0)
    assert not is_worth_moving(held(0.1), 100, 0, there_s=11.0)
    assert not is_worth_moving(held(0.01), 10, 0, there_s=1.2)


def test_a_look_ends_when_its_time_is_over_though_a_slow_generator_is_full_for_ever() -> None:
    class Watched(Fifo):
        def review(self, situation: Situation) -> None:
            seen.append(situation.queue.num_samples)

    seen: list[int] = []
    situation = situation_of({"a": LatencyModel(base_s=60.0, max_samples=1)}, [1000] * 3)
    with pytest.raises(TooLateError):
        cost_s(Watched(), situation, draw_of(1000, 1000, 1000), Budget(0.0))
    assert seen == []
