"""Draws of how long samples turn out, given what is known of them."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist, fmean, median, pstdev

import pytest

from services.broker.dispatch import length_draws
from services.broker.dispatch.calibration import Calibration, calibrated, normal
from services.broker.dispatch.latency import LatencyModel, Load
from services.broker.dispatch.length_draws import Draw, Draws, scaled_down
from services.broker.dispatch.length_histogram import LengthCounts
from services.broker.dispatch.lookahead import cost_s, finish_s
from services.broker.dispatch.lpt import LongestFirst
from services.broker.dispatch.policies import make_policy
from services.broker.dispatch.situation import Prompt, Situation


def situation_of(
    *prompts: Prompt, calibration: Calibration, generators: str = "a", max_samples: int = 128, max_tokens: float = 1e9
) -> Situation:
    """Idle generators that are alike."""
    return Situation(
        asking=generators[0],
        loads={
            name: Load(model=LatencyModel(max_samples=max_samples), max_samples=max_samples, max_leases=max_samples)
            for name in generators
        },
        queue=LengthCounts(),
        under_way=LengthCounts(),
        mean_tokens=100.0,
        has_forecasts=True,
        has_speeds=True,
        max_tokens=max_tokens,
        calibration=calibration,
        prompts=prompts,
    )


def normal_error(error: float) -> Calibration:
    """The samples of a prompt share nothing."""
    return normal(shared_error=0.0, own_error=error)


def queued(draw: Draw) -> list[float]:
    return [item.tokens for prompt in draw.queued for item in prompt.waiting]


def num_queued(situation: Situation) -> int:
    return sum(prompt.num_queued for prompt in situation.prompts)


def test_draws_are_as_wrong_as_forecasts_were_and_bounded() -> None:
    prompts = [Prompt(predicted_tokens=100.0, num_queued=1)] * 200
    drawn = Draws(situation_of(*prompts, calibration=normal_error(0.5), max_tokens=250.0))
    assert queued(drawn.draw(0)) == queued(drawn.draw(0)) != queued(drawn.draw(1))
    lengths = sorted(queued(drawn.draw(0)))
    assert lengths[100] == pytest.approx(100.0, rel=0.05)
    # A standard deviation up: exp(0.5).
    assert lengths[168] / lengths[100] == pytest.approx(1.65, rel=0.1)
    assert lengths[-1] == 250.0


def test_the_samples_of_a_prompt_turn_out_long_together() -> None:
    prompts = [Prompt(predicted_tokens=100.0, num_queued=4)] * 100
    draw = Draws(situation_of(*prompts, calibration=normal(shared_error=0.8, own_error=0.1))).draw(0)
    groups = [[math.log(item.tokens) for item in prompt.waiting] for prompt in draw.queued]
    assert [len(group) for group in groups] == [4] * 100
    assert 0.0 < max(map(pstdev, groups)) < 0.3
    assert pstdev(map(fmean, groups)) == pytest.approx(0.8, rel=0.15)


def test_a_prompt_of_which_some_have_ended_turns_out_as_long_as_they() -> None:
    ended = [Prompt(predicted_tokens=100.0, num_queued=1, ended=(200, 220, 180))] * 50
    seen = normal(shared_error=0.6, own_error=0.1)
    lengths = queued(Draws(situation_of(*ended, calibration=seen)).draw(0))
    assert fmean(lengths) == pytest.approx(200.0, rel=0.1)
    assert max(lengths) < 300.0


def test_siblings_that_are_long_already_make_a_prompt_longer() -> None:
    seen = normal(shared_error=0.6, own_error=0.1)
    prompts = [Prompt(predicted_tokens=100.0, num_queued=1, running=[("a", num_tokens)]) for num_tokens in (0, 10, 200)]
    medians = []
    for prompt in prompts:
        medians.append(median(queued(Draws(situation_of(*[prompt] * 100, calibration=seen)).draw(0))))
    assert medians[0] == pytest.approx(medians[1], rel=0.05)
    assert medians[2] > 1.8 * medians[1]


@pytest.mark.parametrize("num_tokens", [50, 100, 150, 100_000])
def test_what_is_under_way_turns_out_longer_than_it_is(num_tokens: int) -> None:
    prompts = [Prompt(predicted_tokens=100.0, num_queued=0, running=[("a", num_tokens)])] * 400
    draw = Draws(situation_of(*prompts, calibration=normal_error(0.5))).draw(0)
    assert draw.queued == []
    lengths = [item.tokens for name, item in draw.under_way if name == "a" and item.num_done == num_tokens]
    assert len(lengths) == 400
    assert min(lengths) > num_tokens
    if num_tokens < 1000:
        # The median of a normal variable cut off below.
        passed = NormalDist().cdf(math.log(num_tokens / 100.0) / 0.5)
        usual = 100.0 * math.exp(0.5 * NormalDist().inv_cdf((1 + passed) / 2))
        assert median(lengths) == pytest.approx(usual, rel=0.1)


def test_evidence_against_everything_seen_is_taken_as_far_as_it_goes() -> None:
    """A sample of a million tokens where none had more than a hundred: no weight may become zero or not a number."""
    seen = calibrated([(100.0, [90, 100, 110])] * 8)
    outlook = seen.outlook(100.0, ended=[1_000_000], running=[1_000_000])
    assert math.exp(outlook.median(0.5)) == pytest.approx(100.0, rel=0.1)


@pytest.mark.parametrize("policy", ["lpt", "streamrl", "least_loaded"])
def test_a_long_queue_scaled_down_ends_about_when_the_whole_one_would(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = ([2000.0] + [300.0] * 25) * 40
    whole = situation_of(
        *(Prompt(predicted_tokens=tokens, num_queued=1) for tokens in lengths),
        calibration=normal_error(0.0),
        generators="abcd",
        max_samples=64,
    )
    small = scaled_down(whole)
    assert num_queued(small) <= length_draws.MAX_ITEMS
    monkeypatch.setattr(length_draws, "MAX_ITEMS", 10_000)
    assert scaled_down(whole) is whole
    whole_s = finish_s(make_policy(policy), whole, Draws(whole).draw(0))
    assert finish_s(make_policy(policy), small, Draws(small).draw(0)) == pytest.approx(whole_s, rel=0.05)


def test_what_is_under_way_is_scaled_down_alike() -> None:
    begun = Prompt(predicted_tokens=300.0, num_queued=0, running=[("a", 10), ("b", 20)])
    situation = situation_of(
        *[begun] * 40, Prompt(predicted_tokens=300.0, num_queued=1024), calibration=normal_error(0.0), generators="ab"
    )
    small = scaled_down(situation)
    assert [load.max_samples for load in small.loads.values()] == [32, 32]
    held = [name for prompt in small.prompts for name, _ in prompt.running]
    assert (held.count("a"), held.count("b")) == (10, 10)


def test_a_queue_of_a_million_is_looked_at_as_far_as_the_fleet_gets_soon() -> None:
    prompts = [Prompt(predicted_tokens=500.0, num_queued=1000)] * 1000
    situation = situation_of(*prompts, calibration=normal_error(0.0), max_samples=16)
    assert num_queued(scaled_down(situation)) == length_draws.MAX_ROUNDS * 16


def test_steps_are_played_one_after_the_other() -> None:
    """The longest first inside a step only: here the short ones of the first go before the long one of the second."""
    prompts = [
        Prompt(predicted_tokens=tokens, num_queued=1, step=step) for tokens, step in ((1.0, 0), (9.0, 1), (2.0, 0))
    ]
    situation = situation_of(*prompts, calibration=normal_error(0.0), max_samples=1)
    draw = Draws(situation).draw(0)
    # One slot: the mean of the ends tells the order, while the last end does not.
    overlapping = replace(situation, steps_overlap=True)
    mean_end_s = cost_s(LongestFirst(), overlapping, draw) - finish_s(LongestFirst(), situation, draw)
    token_s = situation.loads["a"].model.step_s(1)
    assert mean_end_s == pytest.approx(token_s * (2.0 + 3.0 + 12.0) / 3)
