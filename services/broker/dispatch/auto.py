"""Picks among the other policies by looking ahead with each. Pure.

- Neither lengths nor speeds known: `fifo`.
- Speeds known, lengths not: `least_loaded`; looking ahead shows nothing if all samples are alike.
- One generator, lengths forecast: `lpt`; there is no choice of generator.
- Lengths forecast: every candidate is played to the end by the latency model (`lookahead`), on several draws of
  possible lengths, given the errors of forecasts so far; the one that finishes first on average is picked, and if
  steps overlap the samples' average finish time counts too. Before the first look-ahead, `lpt`.

Hysteresis: the current policy stays while it is within MIN_GAIN of the best. It looks again when the queue or the
fleet has changed, and while more is queued than under way: the policy that decided most of a step also ends it. A
look-ahead that exceeds its budget is abandoned, and `lpt` is picked.
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
from services.broker.dispatch.lookahead import UNLIMITED, Budget, TooLateError, cost_s
from services.broker.dispatch.lpt import LongestFirst
from services.broker.dispatch.situation import DispatchPolicy, Rule, Situation
from services.broker.dispatch.streamrl import StreamRl

MIN_GAIN = 0.005
"""Fraction of the best policy's time by which the current one may be worse and is still kept."""
MIN_CHANGE = 0.5
"""Fraction of the queue: after a smaller change the last answer still holds."""
MAX_DRAWS = 16
"""Draws of true lengths; each tries every policy that may still be the best."""
MIN_DRAWS = 6
"""Draws before the spread of differences between policies is estimated."""
SURE = 2.5
"""Standard errors by which a policy must be worse than the best one to be eliminated."""
HOPELESS = 0.1
"""A policy this much worse than the best one is eliminated at once."""
MIN_SPREAD = 1.1
"""Ratio of the slowest generator's time per token to the fastest one's from which caution matters."""

Candidates = Mapping[str, Callable[[], DispatchPolicy]]
"""Candidates by name; the first of equally good ones is picked."""

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
"""Candidates if generators differ: also tries how much longer than forecast a sample may be."""


class Auto:
    """See the module.

    Args:
        look_limit_s: The budget of a look-ahead; None for as long as it takes.
    """

    name = "auto"
    needs_situation = True

    def __init__(self, *, look_limit_s: float | None = None) -> None:
        self._look_limit_s = look_limit_s
        self.is_late = False
        """Whether the last look-ahead exceeded its budget."""
        self.picked: DispatchPolicy | None = None
        """None before the first request."""
        self._candidate = ""
        """The name of `picked` among the candidates; empty if it was not chosen from them."""
        self._looked_at: tuple[frozenset[str], int] | None = None
        """The fleet and the length of the queue at the last look-ahead."""

    def review(self, situation: Situation) -> None:
        """Look ahead and pick, if enough is queued and has changed."""
        if not situation.has_forecasts or len(situation.loads) == 1:
            self.picked, self._candidate, self._looked_at = usual_policy(situation), "", None
            return
        if self._is_due(situation):
            self._looked_at = (frozenset(situation.loads), situation.queue.num_samples)
            self._pick(situation)
        elif self.picked is not None:
            self.picked.review(situation)

    def rule(self, situation: Situation) -> Rule | None:
        """The picked policy's rule."""
        if self.picked is None:
            self.picked = usual_policy(situation)
        return self.picked.rule(situation)

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
        try:
            times_s = looks_ahead(situation, candidates, Budget(self._look_limit_s))
        except TooLateError:
            self.is_late = True
            self.picked, self._candidate = LongestFirst(), "lpt"
            return
        self.is_late = False
        good_s = (1 + MIN_GAIN) * min(times_s.values())
        best = next(name for name in (self._candidate, *candidates) if times_s.get(name, math.inf) <= good_s)
        if best != self._candidate:
            picked = candidates[best]()
            picked.review(situation)
            self.picked, self._candidate = picked, best


def looks_ahead(situation: Situation, candidates: Candidates, budget: Budget = UNLIMITED) -> dict[str, float]:
    """Mean cost of each policy (`cost_s`) over the draws, in seconds; eliminated ones are left out.

    Raises TooLateError.

    A race: all policies share the draws, so that a difference between two is known far better than either's time. A
    policy is eliminated when it is surely worse than the best one; the race ends when the rest are equally good.
    """
    situation = scaled_down(situation)
    draws = Draws(situation)
    times_s: dict[str, list[float]] = {name: [] for name in candidates}
    twins: dict[str, str] = {}
    for seed in range(MAX_DRAWS if situation.length_error else 1):
        draw = draws.draw(seed)
        for name, found in times_s.items():
            found.append(cost_s(candidates[name](), situation, draw, budget))
        if seed + 1 == MIN_DRAWS:
            twins = _twins(times_s)
            times_s = {name: found for name, found in times_s.items() if name not in twins}
        times_s = _still_good(times_s)
        if len(times_s) == 1 or _are_as_good(times_s):
            break
    means_s = {name: fmean(found) for name, found in times_s.items()}
    return means_s | {name: means_s[twin] for name, twin in twins.items() if twin in means_s}


def _twins(times_s: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Policies that equalled an earlier one in every draw, with that one."""
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
    """Whether none can be better than the best one by enough to matter."""
    best = min(times_s.values(), key=fmean)
    if len(best) < MIN_DRAWS:
        return False
    return all(_least_difference(times, best) >= -MIN_GAIN * fmean(best) for times in times_s.values())


def _least_difference(times_s: Sequence[float], best_s: Sequence[float]) -> float:
    """Lower bound, in seconds, on how much worse a policy is than the best one; negative if it may be better."""
    if math.inf in times_s:
        return math.inf
    differences = [one - other for one, other in zip(times_s, best_s, strict=True)]
    return fmean(differences) - SURE * stdev(differences) / math.sqrt(len(differences))


def _spread(situation: Situation) -> float:
    times_s = [token_s(load) for load in situation.loads.values()]
    return max(times_s) / min(times_s)


def usual_policy(situation: Situation) -> DispatchPolicy:
    """The policy used without looking ahead."""
    if situation.has_forecasts:
        return LongestFirst()
    return LeastLoaded() if situation.has_speeds else Fifo()
