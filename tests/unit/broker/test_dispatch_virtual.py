"""Looks ahead on the virtual clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pstdev

import pytest

from services.broker.dispatch import draws
from services.broker.dispatch.calibration import normal
from services.broker.dispatch.draws import Item, drawn, scaled_down
from services.broker.dispatch.latency import LatencyModel, Load
from services.broker.dispatch.lengths import LengthCounts
from services.broker.dispatch.moving import is_worth_moving, late_generators
from services.broker.dispatch.registry import make_policy
from services.broker.dispatch.types import Order, Situation, Work
from services.broker.dispatch.virtual import finish_s


def situation_of(
    models: dict[str, LatencyModel], lengths: Sequence[float], *, error: float = 0.0, max_tokens: float = 1e9
) -> Situation:
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
        max_tokens=max_tokens,
        length_error=error,
        calibration=normal(shared_error=0.0, own_error=error),
    )


def groups_of(*lengths: float, forecast: float | None = None) -> list[list[Item]]:
    """A prompt of one sample for each length."""
    return [[Item(predicted=forecast or tokens, expected=forecast or tokens, tokens=tokens)] for tokens in lengths]


def lengths_of(groups: Sequence[Sequence[Item]]) -> list[float]:
    return [item.tokens for group in groups for item in group]


def test_one_generator_takes_as_long_as_the_steps_summed_by_hand() -> None:
    model = LatencyModel(base_s=1.0, per_sample_s=0.5, max_samples=2)
    # Two slots. 4 and 6 tokens together for 4 steps of 2 s; then 6 has 2 to go, beside 3: 2 steps; then 3 has 1: 1.5 s.
    situation = situation_of({"a": model}, [4, 6, 3])
    assert finish_s(make_policy("fifo"), situation, groups_of(4, 6, 3)) == pytest.approx(4 * 2 + 2 * 2 + 1 * 1.5)


def test_the_policy_sees_forecasts_and_time_passes_by_true_lengths() -> None:
    model = LatencyModel(base_s=1.0, per_sample_s=0.0, max_samples=1)
    situation = situation_of({"a": model}, [10, 10])
    assert finish_s(make_policy("lpt"), situation, groups_of(30, 4, forecast=10)) == pytest.approx(34.0)


def test_a_sample_stuck_on_a_slow_generator_is_taken_over() -> None:
    fast = LatencyModel(base_s=0.05, max_samples=1)
    situation = situation_of({"a-slow": fast.scaled(10.0), "b-fast": fast}, [1000, 1000])
    # First come, first served: alone the slow one takes 500 s, the fast one both in 100 s.
    assert 50.0 < finish_s(make_policy("fifo"), situation, groups_of(1000, 1000)) < 150.0


def test_draws_are_as_wrong_as_forecasts_were_and_bounded() -> None:
    situation = situation_of({"a": LatencyModel()}, [100.0] * 200, error=0.5, max_tokens=250.0)
    one, other = drawn(situation, 0), drawn(situation, 1)
    assert lengths_of(one) == lengths_of(drawn(situation, 0))
    assert lengths_of(one) != lengths_of(other)
    lengths = sorted(lengths_of(one))
    assert lengths[100] == pytest.approx(situation.queue.sum_tokens(0.0) / 200, rel=0.05)
    # A standard deviation up: exp(0.5).
    assert lengths[168] / lengths[100] == pytest.approx(1.65, rel=0.1)
    assert lengths[-1] == 250.0


def test_the_samples_of_a_prompt_turn_out_long_together() -> None:
    situation = replace(
        situation_of({"a": LatencyModel()}, [100.0] * 400),
        group_size=4,
        calibration=normal(shared_error=0.8, own_error=0.1),
    )
    groups = [[math.log(item.tokens) for item in group] for group in drawn(situation, 0)]
    assert [len(group) for group in groups] == [4] * 100
    assert 0.0 < max(map(pstdev, groups)) < 0.3
    assert pstdev(map(fmean, groups)) == pytest.approx(0.8, rel=0.15)


def test_what_was_begun_is_queued_before_what_is_longer() -> None:
    class TakesOne:
        """One sample of the first prompt that is not the longest."""

        name, order, needs_situation = "one", Order.LENGTH, True
        is_done = False

        def __init__(self) -> None:
            self.seen: list[float] = []

        def review(self, situation: Situation) -> None: ...

        def decide(self, situation: Situation) -> TakesOne:
            self.seen.clear()
            return self

        def take(self, work: Work, most: int) -> int:
            self.seen.append(work.length_tokens)
            return 1 if len(self.seen) == 2 else 0

    policy = TakesOne()
    situation = situation_of({"a": LatencyModel(base_s=1.0, per_sample_s=0.0)}, [3, 3, 2, 2, 1, 1])
    groups = [[Item(predicted=n, expected=n, tokens=n)] * 2 for n in (1.0, 3.0, 2.0)]
    assert finish_s(policy, situation, groups) == math.inf
    # 2 was begun and comes first; 3 then is the second, and so on until only one prompt is left.
    assert policy.seen == [3.0]


@pytest.mark.parametrize("policy", ["lpt", "streamrl", "least_loaded"])
def test_a_long_queue_scaled_down_ends_about_when_the_whole_one_would(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {name: LatencyModel(max_samples=64) for name in "abcd"}
    situation = situation_of(models, [2000.0] * 40 + [300.0] * 1000)
    small = scaled_down(situation)
    assert small.queue.num_samples <= draws.MAX_ITEMS
    monkeypatch.setattr(draws, "MAX_ITEMS", 10_000)
    assert scaled_down(situation) is situation
    whole_s = finish_s(make_policy(policy), situation, drawn(situation, 0))
    assert finish_s(make_policy(policy), small, drawn(small, 0)) == pytest.approx(whole_s, rel=0.05)


def test_a_queue_of_a_million_is_looked_at_as_far_as_the_fleet_gets_soon() -> None:
    situation = situation_of({"a": LatencyModel(max_samples=16)}, [])
    situation.queue.add(500.0, 1_000_000)
    assert scaled_down(situation).queue.num_samples == draws.MAX_ROUNDS * 16


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
