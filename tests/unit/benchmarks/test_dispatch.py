"""The dispatch simulator, and what it says of the policies."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.dispatch.emulated_fleet import EmulatedGenerator
from benchmarks.dispatch.fresh_scenarios import ARRIVALS, make_fresh_scenario
from benchmarks.dispatch.queue_simulation import Report, Scenario, lower_bound_s, simulate
from benchmarks.dispatch.scenarios import histogram_lengths, make_scenario
from services.broker.dispatch import auto as auto_module
from services.broker.dispatch.auto import Candidates
from services.broker.dispatch.latency import LatencyModel
from services.broker.dispatch.length_draws import Draw, Item, QueuedPrompt
from services.broker.dispatch.lookahead import finish_s
from services.broker.dispatch.policies import make_policy
from services.broker.dispatch.situation import Situation
from services.generator.emulation.length_law import STREAMRL_HISTOGRAM

pytestmark = pytest.mark.slow

POLICIES = ("fifo", "least_loaded", "lpt", "streamrl")
MODEL = LatencyModel(base_s=1.0, per_sample_s=0.5, max_samples=2)
GRID = (
    pytest.param("8 alike, 16 slots", "short", "good", marks=pytest.mark.grid),
    ("4 and 4 at 40 %", "short", "good"),
    ("6 bound by KV", "short", "exact"),
)


def scenario_of(lengths: list[list[int]], *models: LatencyModel) -> Scenario:
    """Generators of these models, no forecasts."""
    generators = [EmulatedGenerator(generator_id=f"g{index}", model=model) for index, model in enumerate(models)]
    return Scenario(name="test", generators=generators, lengths=lengths, forecasts=[None] * len(lengths), tick_s=1e6)


def test_one_generator_takes_as_long_as_the_steps_summed_by_hand() -> None:
    # Two slots. 4 and 6 tokens together for 4 steps of 2 s; then 6 has 2 to go, beside 3: 2 steps; then 3 has 1: 1.5 s.
    report = simulate(scenario_of([[4], [6], [3]], MODEL), "fifo")
    assert report.makespan_s == pytest.approx(4 * 2 + 2 * 2 + 1 * 1.5)
    assert report.busy_share == pytest.approx(1.0)


@pytest.mark.parametrize("policy", [*POLICIES, "auto"])
def test_nothing_is_sooner_than_the_lower_bound(policy: str) -> None:
    scenario = make_scenario(
        fleet="4 and 4 at 40 %", workload="short", forecast="good", num_groups=8, group_size=4, seed=1
    )
    assert simulate(scenario, policy).makespan_s >= lower_bound_s(scenario)


def test_the_same_seed_gives_the_same_run() -> None:
    def run() -> Report:
        scenario = make_scenario(
            fleet="2 big, 6 small", workload="short", forecast="poor", num_groups=8, group_size=4, seed=3
        )
        return simulate(scenario, "auto")

    assert run() == run()


def test_a_sample_stuck_on_a_slow_generator_moves_and_the_step_ends_sooner() -> None:
    # Both start with one sample, first come, first served; the fast one is done long before the slow one.
    slow, fast = LatencyModel(base_s=0.5, max_samples=1), LatencyModel(base_s=0.05, max_samples=1)
    generators = [EmulatedGenerator(generator_id=f"g{index}", model=model) for index, model in enumerate((slow, fast))]
    scenario = Scenario(
        name="stuck", generators=generators, lengths=[[1000], [1000]], forecasts=[1000.0] * 2, tick_s=1.0
    )
    stays, moves = simulate(scenario, "fifo", can_move=False), simulate(scenario, "fifo")
    assert moves.num_moves >= 1
    assert moves.makespan_s < 0.5 * stays.makespan_s


def test_prompts_that_come_later_are_decoded_too() -> None:
    # One slot. The second prompt is submitted when the first is done, the third when both are.
    model = LatencyModel(base_s=1.0, per_sample_s=0.0, max_samples=1)
    scenario = replace(scenario_of([[4], [6], [3]], model), after_ended=[0, 1, 2], groups_per_step=1)
    assert simulate(scenario, "lpt").makespan_s == pytest.approx(13.0)


@pytest.mark.parametrize("arrival", ARRIVALS)
def test_fresh_scenarios_run_to_their_end(arrival: str) -> None:
    scenario = make_fresh_scenario(
        fleet="5 of all speeds", lengths="pareto", forecast="a third short", arrival=arrival, seed=0
    )
    assert simulate(scenario, "fifo").makespan_s >= lower_bound_s(scenario)


def test_lengths_follow_the_histogram() -> None:
    lengths = sorted(histogram_lengths(random.Random(0), scale=1.0, count=20_000))
    assert sum(STREAMRL_HISTOGRAM) == pytest.approx(1.0, abs=0.01)
    # StreamRL's mean is 4.9 thousand tokens, its median 3.2 thousand.
    assert sum(lengths) / len(lengths) == pytest.approx(4930, rel=0.05)
    assert lengths[len(lengths) // 2] == pytest.approx(3200, rel=0.1)


def looked_at(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> list[Situation]:
    """What auto sees each time that it looks ahead."""
    seen: list[Situation] = []

    def look(situation: Situation, candidates: Candidates, _budget: object) -> dict[str, float]:
        seen.append(situation.copy())
        return dict.fromkeys(candidates, 1.0)

    monkeypatch.setattr(auto_module, "looks_ahead", look)
    simulate(scenario, "auto")
    return seen


@pytest.mark.parametrize("policy", ["fifo", "lpt", "streamrl"])
def test_a_look_ahead_at_the_true_lengths_is_the_simulation(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who gets what when, who is left, what moves: the look ahead must play it as the broker does it."""
    scenario = make_scenario(
        fleet="2 big, 6 small", workload="reasoning", forecast="exact", num_groups=32, group_size=8, seed=1
    )
    report = simulate(scenario, policy)
    situation = looked_at(scenario, monkeypatch)[0]
    draw = Draw(
        [
            QueuedPrompt(
                waiting=[
                    Item(predicted=forecast or 0.0, expected=forecast or 0.0, tokens=length)
                    for length in reversed(lengths)
                ]
            )
            for forecast, lengths in zip(scenario.forecasts, scenario.lengths, strict=True)
        ]
    )
    assert finish_s(make_policy(policy), situation, draw) == pytest.approx(report.makespan_s, rel=0.002)
    assert policy not in ("fifo", "streamrl") or report.num_moves > 0


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("fleet", "workload", "forecast"), GRID)
def test_auto_is_never_worse_than_the_best_policy_by_more_than_one_percent(
    fleet: str, workload: str, forecast: str
) -> None:
    """Summed over seeds: one draw of true lengths is luck, which no choice made beforehand can follow."""
    makespans = dict.fromkeys((*POLICIES, "auto"), 0.0)
    for seed in range(6, 12):
        scenario = make_scenario(
            fleet=fleet, workload=workload, forecast=forecast, num_groups=16, group_size=8, seed=seed
        )
        for policy in makespans:
            makespans[policy] += simulate(scenario, policy).makespan_s
    assert makespans["auto"] <= 1.01 * min(makespans[policy] for policy in POLICIES)
