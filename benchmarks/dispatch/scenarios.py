"""Scenarios of dispatch: mixed fleets, long-tailed lengths, forecasts of every quality. Everything follows from a seed.

Two sets: the grid that dispatch was tuned on, and a fresh one (`fresh_scenarios`) that nothing was tuned on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.dispatch.emulated_fleet import EmulatedGenerator
from benchmarks.dispatch.queue_simulation import Scenario
from services.broker.dispatch.latency import LatencyModel
from services.generator.emulation.length_law import STREAMRL_BIN_TOKENS, STREAMRL_FIRST_TOKENS, STREAMRL_HISTOGRAM

WITHIN_GROUP_SIGMA = 0.25
"""Standard deviation of the logarithm of a sample's length over its prompt's."""


def lognormal_lengths(rng: random.Random, *, median: float, sigma: float, most: int, count: int) -> list[int]:
    """Lengths with a normal logarithm, clipped at `most`."""
    return [max(1, min(most, round(median * rng.lognormvariate(0.0, sigma)))) for _ in range(count)]


def histogram_quantile(share: float) -> float:
    """The quantile in tokens of StreamRL's histogram at this share, 0 to 1, uniform inside a bin."""
    rest = share * sum(STREAMRL_HISTOGRAM)
    for index, weight in enumerate(STREAMRL_HISTOGRAM):
        if rest <= weight:
            return STREAMRL_FIRST_TOKENS + STREAMRL_BIN_TOKENS * (index + rest / weight)
        rest -= weight
    return STREAMRL_FIRST_TOKENS + STREAMRL_BIN_TOKENS * len(STREAMRL_HISTOGRAM)


def histogram_lengths(rng: random.Random, *, scale: float, count: int) -> list[int]:
    """Lengths of StreamRL's histogram, uniform inside a bin, times `scale`."""
    bins = rng.choices(range(len(STREAMRL_HISTOGRAM)), weights=STREAMRL_HISTOGRAM, k=count)
    places = [STREAMRL_FIRST_TOKENS + STREAMRL_BIN_TOKENS * (index + rng.random()) for index in bins]
    return [max(1, round(scale * place)) for place in places]


def _even(count: int, model: LatencyModel, *, is_stated: bool = True, first: int = 0) -> list[EmulatedGenerator]:
    return [
        EmulatedGenerator(generator_id=f"gen-{first + index}", model=model, is_stated=is_stated)
        for index in range(count)
    ]


_H800 = LatencyModel(max_samples=256)
"""StreamRL's Figure 6 as a straight line."""


def fleets() -> dict[str, list[EmulatedGenerator]]:
    """Fleets by name."""
    narrow = replace(_H800, max_samples=16)
    small = LatencyModel(base_s=0.016, per_sample_s=0.0002, max_samples=32)
    big = LatencyModel(base_s=0.005, per_sample_s=0.00004, max_samples=256)
    reads = replace(_H800, per_kv_token_s=1.5e-8, kv_capacity_tokens=400_000, prefill_tokens_per_second=20_000.0)
    cpu = LatencyModel(base_s=0.0006, per_sample_s=0.0001, max_samples=128)
    return {
        "8 alike": _even(8, _H800),
        "8 alike, 16 slots": _even(8, narrow),
        "7 and 1 at a fifth": [*_even(7, narrow), *_even(1, narrow.scaled(5.0), first=7)],
        "4 and 4 at 40 %": [*_even(4, _H800), *_even(4, _H800.scaled(2.5), first=4)],
        "2 big, 6 small": [*_even(2, big), *_even(6, small, first=2)],
        "6 bound by KV": _even(6, reads),
        "4 unstated": _even(4, narrow.scaled(1.7), is_stated=False),
        "2 CPUs": _even(2, cpu),
    }


def workloads(rng: random.Random, *, num_groups: int, group_size: int) -> dict[str, list[list[int]]]:
    """Lengths by group and sample, by name; samples of a prompt vary around the prompt's length."""
    bases = {
        "reasoning": histogram_lengths(rng, scale=0.5, count=num_groups),
        "lognormal": lognormal_lengths(rng, median=1200, sigma=0.9, most=16_384, count=num_groups),
        "short": lognormal_lengths(rng, median=33, sigma=0.8, most=256, count=num_groups),
    }
    return {
        name: [
            [max(1, round(base * rng.lognormvariate(0.0, WITHIN_GROUP_SIGMA))) for _ in range(group_size)]
            for base in lengths
        ]
        for name, lengths in bases.items()
    }


TICK_S = {"reasoning": 2.0, "lognormal": 2.0, "short": 0.25}
"""About a hundredth of a step: looking every second would slow the simulator and change little."""

FORECASTS: dict[str, float | None] = {"exact": 0.0, "good": 0.25, "poor": 0.7, "none": None}
"""Standard deviation of the logarithm of forecast over the prompt's mean length; None means no forecast."""


def make_scenario(*, fleet: str, workload: str, forecast: str, num_groups: int, group_size: int, seed: int) -> Scenario:
    """A scenario of the grid."""
    name = f"{fleet}/{workload}/{forecast}/{seed}"
    lengths, forecasts = _step(random.Random(name), workload, forecast, num_groups, group_size)
    before = _step(random.Random(f"before {name}"), workload, forecast, num_groups, group_size)
    return Scenario(
        name=f"{fleet}, {workload}, {forecast}",
        generators=fleets()[fleet],
        lengths=lengths,
        forecasts=forecasts,
        before=[(value or 0.0, group) for group, value in zip(*before, strict=True)],
        tick_s=TICK_S[workload],
    )


def _step(
    rng: random.Random, workload: str, forecast: str, num_groups: int, group_size: int
) -> tuple[list[list[int]], list[float | None]]:
    """Lengths by group and sample, and forecasts by group."""
    lengths = workloads(rng, num_groups=num_groups, group_size=group_size)[workload]
    sigma = FORECASTS[forecast]
    forecasts = [
        None if sigma is None else sum(group) / len(group) * rng.lognormvariate(0.0, sigma) for group in lengths
    ]
    return lengths, forecasts


def workload_names() -> Sequence[str]:
    """Names of the workloads."""
    return tuple(TICK_S)
