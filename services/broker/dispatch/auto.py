"""Picks among the other policies by looking ahead with each. Pure.

- Nothing known, neither lengths nor speeds: `fifo`.
- Speeds known, lengths not: `least_loaded`; looking ahead tells nothing where all samples are alike.
- One generator, lengths forecast: `lpt`; there is nobody to choose.
- Lengths forecast: every candidate is played to the end by the latency model (`virtual`), in several draws of how long
  samples may turn out, given how wrong forecasts were so far; the one that is done first on average is taken, and
  where steps overlap it also counts when the samples are done on average. Before the first look, `lpt`.

Hysteresis: the present one stays while it is within MIN_GAIN of the best. It looks again when the queue or the fleet
has changed, and while more is queued than under way: what decided most of a step then also ends it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean, stdev

from services.broker.dispatch.fifo import Fifo
from services.broker.dispatch.latency import token_s
from services.broker.dispatch.least_loaded import LeastLoaded
from services.broker.dispatch.length_draws import Draws, scaled_down
from services.broker.dispatch.lookahead import cost_s
from services.broker.dispatch.lpt import LongestFirst
from services.broker.dispatch.situation import Decision, DispatchPolicy, Order, Situation
from services.broker.dispatch.streamrl import StreamRl

MIN_GAIN = 0.005
"""Of the best policy's time: the present one is kept if it is no worse than that."""
MIN_CHANGE = 0.5
"""Of the queue: after a smaller change of it the last answer still holds."""
MAX_DRAWS = 16
"""Of true lengths, in each of which every policy is tried that may still be the best."""
MIN_DRAWS = 6
"""Before anything is said of how differences between policies are spread."""
SURE = 2.5
"""Standard errors by which a policy must be worse than the best one to be given up."""
HOPELESS = 0.1
"""A policy this much worse than the best one is given up at once."""
MIN_SPREAD = 1.1
"""The slowest generator's time for a token over the fastest one's, from which on caution matters."""

Candidates = Mapping[str, Callable[[], DispatchPolicy]]
"""By name; the first of those that are as good as each other is taken."""

ALIKE: Candidates = {
    "lpt": LongestFirst,
    "streamrl": StreamRl,
    "least_loaded": LeastLoaded,
    "fifo": Fifo,
}
UNLIKE: Candidates = {
    **ALIKE,
    "wary lpt": partial(LongestFirst, risk=4.0),
    "bold lpt": partial(LongestFirst, risk=1.0),
}
"""Where generators differ: how much longer than forecast a sample may turn out is also tried."""


class Auto:
    """See the module."""

    name = "auto"
    needs_situation = True

    def __init__(self) -> None:
        self.picked: DispatchPolicy | None = None
        """None before anything was asked."""
        self._candidate = ""
        """What `picked` is called among the candidates; empty where it was not chosen from them."""
        self._looked_at: tuple[frozenset[str], int] | None = None
        """The fleet and the length of the queue at the last look ahead."""

    @property
    def order(self) -> Order:
        """Of the policy that gave the last answer."""
        return self.picked.order if self.picked else Order.ARRIVAL

    def review(self, situation: Situation) -> None:
        """Look ahead and pick, where enough is queued and has changed."""
        if not situation.has_forecasts or len(situation.loads) == 1:
            self.picked, self._candidate, self._looked_at = usual_policy(situation), "", None
            return
        if self._is_due(situation):
            self._looked_at = (frozenset(situation.loads), situation.queue.num_samples)
            self._pick(situation)
        elif self.picked is not None:
            self.picked.review(situation)

    def decide(self, situation: Situation) -> Decision:
        """The picked policy's answer."""
        if self.picked is None:
            self.picked = usual_policy(situation)
        return self.picked.decide(situation)

    def _is_due(self, situation: Situation) -> bool:
        if self._looked_at is None:
            return True
        generators, num_queued = self._looked_at
        if situation.queue.num_samples < situation.under_way.num_samples:
            return False
        is_other_queue = abs(situation.queue.num_samples - num_queued) > MIN_CHANGE * num_queued
        return is_other_queue or generators != situation.loads.keys()

    def _pick(self, situation: Situation) -> None:
        candidates = UNLIKE if _spread(situation) > MIN_SPREAD else ALIKE
        times_s = looks_ahead(situation, candidates)
        good_s = (1 + MIN_GAIN) * min(times_s.values())
        best = next(name for name in (self._candidate, *candidates) if times_s.get(name, math.inf) <= good_s)
        if best != self._candidate:
            picked = candidates[best]()
            picked.review(situation)
            self.picked, self._candidate = picked, best


def looks_ahead(situation: Situation, candidates: Candidates) -> dict[str, float]:
    """What each policy costs (`cost_s`), on average over the draws, in seconds; without those given up.

    A race: the draws are the same for all, so that a difference between two is known far better than either's time. A
    policy leaves when it is worse than the best one for sure; the race ends when what is left is as good.
    """
    situation = scaled_down(situation)
    draws = Draws(situation)
    times_s: dict[str, list[float]] = {name: [] for name in candidates}
    twins: dict[str, str] = {}
    for seed in range(MAX_DRAWS if situation.length_error else 1):
        draw = draws.draw(seed)
        for name, found in times_s.items():
            found.append(cost_s(candidates[name](), situation, draw))
        if seed + 1 == MIN_DRAWS:
            twins = _twins(times_s)
            times_s = {name: found for name, found in times_s.items() if name not in twins}
        times_s = _still_good(times_s)
        if len(times_s) == 1 or _are_as_good(times_s):
            break
    means_s = {name: fmean(found) for name, found in times_s.items()}
    return means_s | {name: means_s[twin] for name, twin in twins.items() if twin in means_s}


def _twins(times_s: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Policies that did as an earlier one in every draw, and which."""
    first: dict[tuple[float, ...], str] = {}
    found: dict[str, str] = {}
    for name, times in times_s.items():
        if first.setdefault(tuple(times), name) != name:
            found[name] = first[tuple(times)]
    return found


def _still_good(times_s: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """The policies that may be the best one."""
    best = min(times_s.values(), key=fmean)
    num_draws = len(best)
    if num_draws < MIN_DRAWS:
        most_s = fmean(best) * (1 + HOPELESS)
        return {name: times for name, times in times_s.items() if fmean(times) <= most_s}
    return {name: times for name, times in times_s.items() if times is best or _least_difference(times, best) <= 0}


def _are_as_good(times_s: Mapping[str, Sequence[float]]) -> bool:
    """Whether none can turn out better than the best one by enough to matter."""
    best = min(times_s.values(), key=fmean)
    if len(best) < MIN_DRAWS:
        return False
    return all(_least_difference(times, best) >= -MIN_GAIN * fmean(best) for times in times_s.values())


def _least_difference(times_s: Sequence[float], best_s: Sequence[float]) -> float:
    """By how much a policy is worse than the best one at the least, in seconds; negative where it may be better."""
    if math.inf in times_s:
        return math.inf
    differences = [one - other for one, other in zip(times_s, best_s, strict=True)]
    return fmean(differences) - SURE * stdev(differences) / math.sqrt(len(differences))


def _spread(situation: Situation) -> float:
    times_s = [token_s(load) for load in situation.loads.values()]
    return max(times_s) / min(times_s)


def usual_policy(situation: Situation) -> DispatchPolicy:
    """What to do without looking ahead."""
    if situation.has_forecasts:
        return LongestFirst()
    return LeastLoaded() if situation.has_speeds else Fifo()
