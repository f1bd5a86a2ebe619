"""Scenarios of dispatch that nothing was tuned on: other fleets, lengths, forecast errors and seeds than `scenarios`.

Besides single steps: late arrival of a quarter of the prompts, and three steps in a row, each submitted when three
quarters of the previous one are done. Everything follows from a seed.
"""

from __future__ import annotations

import random
from dataclasses import replace

from benchmarks.dispatch.emulated_fleet import EmulatedGenerator
from benchmarks.dispatch.queue_simulation import Scenario
from services.broker.dispatch.latency import LatencyModel

NUM_GROUPS, GROUP_SIZE = 24, 8
STEP_GROUPS = 12
"""Groups of each of the steps in a row."""
FIRST_SEED = 1000
WITHIN_GROUP_SIGMA = 0.35
TICK_S = 1.0
_MID = LatencyModel(
    base_s=0.011, per_sample_s=0.00012, per_kv_token_s=5e-9, max_samples=24, prefill_tokens_per_second=12_000.0
)
FLEETS: dict[str, list[LatencyModel]] = {
    "12 alike": [replace(_MID, max_samples=12)] * 12,
    "5 of all speeds": [_MID.scaled(factor) for factor in (1.0, 1.4, 2.0, 3.0, 4.5)],
    "3 big, 9 small": [replace(_MID, max_samples=64).scaled(0.6)] * 3 + [replace(_MID, max_samples=8).scaled(1.8)] * 9,
}
LENGTHS = ("bimodal", "pareto", "uniform")
FORECASTS: dict[str, tuple[float, float]] = {"fair": (1.0, 0.45), "a third short": (0.67, 0.2)}
"""Bias, and standard deviation of the logarithm, of forecast over the prompt's mean length."""
ARRIVALS = ("at once", "a quarter late", "three steps")


def names() -> list[tuple[str, str, str, str]]:
    """Every scenario: fleet, lengths, forecasts, arrivals."""
    return [
        (fleet, lengths, forecast, arrival)
        for fleet in FLEETS
        for lengths in LENGTHS
        for forecast in FORECASTS
        for arrival in ARRIVALS
    ]


def make_fresh_scenario(*, fleet: str, lengths: str, forecast: str, arrival: str, seed: int) -> Scenario:
    """A fresh scenario."""
    name = f"{fleet}, {lengths}, {forecast}, {arrival}"
    rng = random.Random(f"{name}/{FIRST_SEED + seed}")
    num_groups = 3 * STEP_GROUPS if arrival == "three steps" else NUM_GROUPS
    samples, forecasts = _step(rng, lengths, forecast, num_groups)
    before = _step(random.Random(f"before {name}/{FIRST_SEED + seed}"), lengths, forecast, NUM_GROUPS)
    return Scenario(
        name=name,
        generators=[
            EmulatedGenerator(generator_id=f"gen-{index:02}", model=model) for index, model in enumerate(FLEETS[fleet])
        ],
        lengths=samples,
        forecasts=forecasts,
        before=[(value, group) for group, value in zip(*before, strict=True)],
        after_ended=_after_ended(arrival),
        groups_per_step=STEP_GROUPS if arrival == "three steps" else None,
        num_prompt_tokens=256,
        tick_s=TICK_S,
    )


def _step(rng: random.Random, lengths: str, forecast: str, num_groups: int) -> tuple[list[list[int]], list[float]]:
    """Lengths by group and sample, and forecasts by group."""
    samples = [_group(rng, _prompt_length(rng, lengths)) for _ in range(num_groups)]
    bias, sigma = FORECASTS[forecast]
    return samples, [bias * sum(group) / len(group) * rng.lognormvariate(0.0, sigma) for group in samples]


def _prompt_length(rng: random.Random, lengths: str) -> float:
    match lengths:
        case "bimodal":
            return rng.lognormvariate(0.0, 0.3) * (4000.0 if rng.random() < 0.15 else 350.0)
        case "pareto":
            return min(8192.0, 400.0 * rng.paretovariate(1.4))
        case _:
            return rng.uniform(100.0, 3000.0)


def _group(rng: random.Random, length: float) -> list[int]:
    return [max(1, round(length * rng.lognormvariate(0.0, WITHIN_GROUP_SIGMA))) for _ in range(GROUP_SIZE)]


def _after_ended(arrival: str) -> list[int]:
    match arrival:
        case "a quarter late":
            num_late = NUM_GROUPS // 4
            # When a third of the others have ended.
            return [0] * (NUM_GROUPS - num_late) + [(NUM_GROUPS - num_late) * GROUP_SIZE // 3] * num_late
        case "three steps":
            step = STEP_GROUPS * GROUP_SIZE
            return [max(0, index // STEP_GROUPS * step - step // 4) for index in range(3 * STEP_GROUPS)]
        case _:
            return []
