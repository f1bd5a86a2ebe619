"""How true lengths follow from forecasts."""

from __future__ import annotations

import math
import random
from statistics import NormalDist, pstdev

import pytest

from services.broker.dispatch.calibration import Calibration, calibrated, normal

SIGMA = NormalDist().cdf(1.0)
"""Share that stays below one standard deviation."""


def prompts_of(rng: random.Random, *, own: float, noise: float, bias: float = 1.0) -> list[tuple[float, list[int]]]:
    """Forecasts of 128 prompts of 8 samples: the prompt's own length, wrong by a factor that is random and a bias."""
    found: list[tuple[float, list[int]]] = []
    for _ in range(128):
        usual = 5000 * rng.lognormvariate(0.0, 1.0)
        lengths = [max(1, round(usual * rng.lognormvariate(0.0, own))) for _ in range(8)]
        found.append((bias * usual * rng.lognormvariate(0.0, noise), lengths))
    return found


def usual_tokens(seen: Calibration, forecast: float, share: float) -> float:
    return math.exp(seen.outlook(forecast).median(share))


def test_bias_and_errors_of_samples_are_separated_from_what_a_prompt_shares() -> None:
    seen = calibrated(prompts_of(random.Random(1), own=0.3, noise=0.0, bias=0.5))
    assert seen.own_error == pytest.approx(0.3, rel=0.1)
    assert usual_tokens(seen, 1000.0, 0.5) == pytest.approx(2000.0, rel=0.1)
    # Nothing is shared: every prompt with this forecast is about as long.
    assert usual_tokens(seen, 1000.0, 0.95) == pytest.approx(usual_tokens(seen, 1000.0, 0.05), rel=0.1)


def test_of_noisy_forecasts_the_longest_turn_out_shorter_and_the_shortest_longer() -> None:
    seen = calibrated(prompts_of(random.Random(1), own=0.2, noise=1.0))
    assert seen.slope == pytest.approx(0.5, abs=0.15)
    assert usual_tokens(seen, 50_000.0, 0.5) < 30_000.0
    assert usual_tokens(seen, 500.0, 0.5) > 800.0
    # What is left of an error of 1 against lengths that spread by 1: 0.7.
    assert math.log(usual_tokens(seen, 5000.0, SIGMA) / usual_tokens(seen, 5000.0, 0.5)) == pytest.approx(0.7, rel=0.3)


def test_lengths_that_end_at_a_most_are_drawn_with_no_long_tail_beyond_it() -> None:
    rng = random.Random(2)
    lengths = [rng.uniform(100.0, 3000.0) for _ in range(128)]
    seen = calibrated([(length * rng.lognormvariate(0.0, 0.45), [round(length)]) for length in lengths])
    # By the spread of all prompts, taken for normal, it would be 6700.
    assert usual_tokens(seen, 4500.0, 0.99) < 5500.0


def test_a_few_prompts_tell_no_slope_and_none_at_all_are_believed() -> None:
    assert calibrated([]) == Calibration()
    assert usual_tokens(Calibration(), 700.0, 0.9) == pytest.approx(700.0)
    assert calibrated([(100.0, [200]), (1000.0, [500])]).slope == 1.0


def test_a_forecast_far_from_all_that_was_seen_is_judged_by_the_nearest() -> None:
    seen = Calibration(shared=((math.log(100.0), -1.0), (math.log(200.0), 1.0)), bandwidth=0.05)
    assert usual_tokens(seen, 10_000.0, 0.5) == pytest.approx(10_000.0 * math.e)


def test_a_normal_one_is_as_wrong_as_asked() -> None:
    seen = normal(shared_error=0.4, own_error=0.1)
    logs = [math.log(usual_tokens(seen, 100.0, (index + 0.5) / 100) / 100) for index in range(100)]
    assert pstdev(logs) == pytest.approx(0.4, rel=0.15)
    assert seen.own_error == 0.1
