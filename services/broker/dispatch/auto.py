"""Picks among the other policies by looking ahead with each. Pure.

- Nothing known, neither lengths nor speeds: `fifo`.
- Speeds known, lengths not: `least_loaded`; looking ahead tells nothing where all samples are alike.
- Lengths forecast: every candidate is played to the end by the latency model (`virtual`), in several draws of how long
  samples may turn out, given how wrong forecasts were so far; the one that is done first on average is taken. Before
  the first look, `lpt`.

Hysteresis: the present one stays while it is within MIN_GAIN of the best. It looks again when the queue or the fleet
has changed, and while more is queued than under way: what decided most of a step then also ends it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from statistics import fmean

from services.broker.dispatch.draws import drawn, scaled_down
from services.broker.dispatch.fifo import Fifo
from services.broker.dispatch.latency import token_s
from services.broker.dispatch.least_loaded import LeastLoaded
from services.broker.dispatch.lpt import LongestFirst
from services.broker.dispatch.streamrl import StreamRl
from services.broker.dispatch.types import Decision, DispatchPolicy, Order, Situation
from services.broker.dispatch.virtual import finish_s

MIN_GAIN = 0.005
"""Of the best policy's time: the present one is kept if it is no worse than that."""
MIN_CHANGE = 0.5
"""Of the queue: after a smaller change of it the last answer still holds."""
NUM_DRAWS = 4
"""Of true lengths, in each of which every policy is tried."""
HOPELESS = 0.05
"""A policy this much worse than the best one in the first draw is not tried again; half of it after two, and so on."""
MIN_SPREAD = 1.1
"""The slowest generator's time for a token over the fastest one's, from which on caution matters."""

Candidates = Mapping[str, Callable[[], DispatchPolicy]]
"""The first of those that are as good as each other is taken."""

ALIKE: Candidates = {
    "lpt": LongestFirst,
    "streamrl": StreamRl,
    "least_loaded": LeastLoaded,
    "fifo": Fifo,
}
UNLIKE: Candidates = {
    "wary lpt": partial(LongestFirst, risk=4.0),
    **ALIKE,
    "bold lpt": partial(LongestFirst, risk=1.0),
}
"""Where generators differ: how much longer than forecast a sample may turn out is also tried; of equals, the cautious.

A prompt's samples turn out long together, which a look ahead does not know.
"""


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
        if not situation.has_forecasts:
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
    """When each policy would be done, on average over the draws: seconds from now; without those that are hopeless."""
    situation = scaled_down(situation)
    times_s: dict[str, list[float]] = {name: [] for name in candidates}
    for seed in range(NUM_DRAWS if situation.length_error else 1):
        items = drawn(situation, seed)
        for name, found in times_s.items():
            found.append(finish_s(candidates[name](), situation, items))
        most_s = min(map(fmean, times_s.values())) * (1 + HOPELESS / (seed + 1))
        times_s = {name: found for name, found in times_s.items() if fmean(found) <= most_s}
        if len(times_s) == 1:
            break
    return {name: fmean(found) for name, found in times_s.items()}


def _spread(situation: Situation) -> float:
    times_s = [token_s(load) for load in situation.loads.values()]
    return max(times_s) / min(times_s)


def usual_policy(situation: Situation) -> DispatchPolicy:
    """What to do without looking ahead."""
    if situation.has_forecasts:
        return LongestFirst()
    return LeastLoaded() if situation.has_speeds else Fifo()
