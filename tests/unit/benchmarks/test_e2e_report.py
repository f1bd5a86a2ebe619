"""What is made of learning curves: rates without the first step, the time at which a reward was reached, ratios."""

from __future__ import annotations

import pytest

from benchmarks.e2e.curve import Curve, Step
from benchmarks.e2e.ideal import Alone
from benchmarks.e2e.suite import Measured, report


def curve(rewards: list[float], *, begin_s: float = 100.0, step_s: float = 2.0, first_s: float = 10.0) -> Curve:
    steps = [
        Step(time_s=begin_s + first_s + index * step_s, reward=reward, num_samples=256, num_tokens=5_000)
        for index, reward in enumerate(rewards)
    ]
    return Curve(begin_s=begin_s, steps=steps)


def measured(
    penstock: list[Curve], trl: list[Curve], *, generation: float = 200.0, training: float = 160.0
) -> Measured:
    alone = [Alone(generation=generation, training=training)] * len(penstock)
    return Measured(penstock=penstock, trl=trl, alone=alone, trl_threads={1: 30.0, 2: 40.0}, best_threads=2)


def test_a_rate_leaves_out_the_first_step_and_what_came_before_it() -> None:
    assert curve([0.1, 0.2, 0.3], first_s=1000.0).samples_per_second == pytest.approx(128.0)
    assert curve([0.1, 0.2, 0.3], first_s=1000.0).tokens_per_second == pytest.approx(2500.0)


def test_a_rate_of_one_step_is_refused() -> None:
    with pytest.raises(ValueError, match="two steps"):
        _ = curve([0.1]).samples_per_second


def test_a_reward_is_reached_when_the_mean_of_a_window_is_and_its_time_counts_from_the_beginning() -> None:
    rising = curve([0.9, 0.1, 0.5, 0.7, 0.6])
    assert rising.steps_to_reward(0.6, window_steps=3) == 5
    assert rising.seconds_to_reward(0.6, window_steps=3) == pytest.approx(10.0 + 4 * 2.0)


def test_a_reward_that_was_never_reached_has_no_time_and_no_ratio() -> None:
    assert curve([0.1] * 9).seconds_to_reward() is None
    result = report(measured([curve([0.7] * 9), curve([0.1] * 9)], [curve([0.7] * 9)] * 2))
    assert result["penstock"]["seconds_to_reward_0_6"] is None
    assert result["trl"]["seconds_to_reward_0_6"] is not None
    assert result["time_ratio_to_trl"] is None


def test_ratios_are_between_medians_and_the_ideal_is_the_slower_side_alone() -> None:
    penstock = [curve([0.7] * 9, step_s=step_s) for step_s in (1.0, 2.0, 50.0)]
    result = report(measured(penstock, [curve([0.7] * 9, step_s=8.0)] * 3))
    assert result["penstock"]["samples_per_second"] == pytest.approx(128.0)
    assert result["ratio_to_trl"] == pytest.approx(4.0)
    assert result["time_ratio_to_trl"] == pytest.approx((10 + 4 * 2) / (10 + 4 * 8))
    assert result["ideal_samples_per_second"] == 160.0
    assert result["ratio_to_ideal"] == pytest.approx(0.8)
    assert result["penstock"]["spread"]["samples_per_second"] == pytest.approx([256 / 50, 256.0])
    assert result["trl"]["samples_per_second_by_threads"] == {"1": 30.0, "2": 40.0}
