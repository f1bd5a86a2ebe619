"""Picks among the other policies by looking ahead with each. Pure.

- Nothing known, neither lengths nor speeds: `fifo`.
- Speeds known, lengths not: `least_loaded`; looking ahead tells nothing where all samples are alike.
- Lengths forecast: `lpt`, unless another policy is done sooner by MIN_GAIN in two looks ahead (`virtual`), one that
  believes the forecasts and one in which they are as wrong as they were so far. One alone is not enough: a policy that
  only looks good while nothing is wrong, or only in one unlucky draw, loses more than the others gain.
- Where forecasts are off by more than MAX_ERROR, or generators differ by more than MAX_SPREAD in speed, `lpt` without
  looking: in simulation nothing was better by a percent there, and what looked better was worse by up to a quarter.
  StreamRL's split, too, is made for instances that are alike and a ranker that finds most of the long tail.

Reviewed about once a second while more is queued than under way; what decided most of a step then also ends it.
"""

from __future__ import annotations

from dataclasses import replace

from services.broker.dispatch.fifo import Fifo
from services.broker.dispatch.latency import token_s
from services.broker.dispatch.least_loaded import LeastLoaded
from services.broker.dispatch.lpt import LongestFirst
from services.broker.dispatch.streamrl import StreamRl
from services.broker.dispatch.types import Decision, DispatchPolicy, Order, Situation
from services.broker.dispatch.virtual import finish_s

MIN_GAIN = 0.01
"""Of the usual policy's time; the simulator and the look ahead agree to about a percent."""

MAX_ERROR = 0.5
"""Standard deviation of the logarithm of true length over forecast."""
MAX_SPREAD = 1.25
"""The slowest generator's time for a token over the fastest one's."""


class Auto:
    """See the module."""

    name = "auto"
    needs_situation = True

    def __init__(self) -> None:
        self.picked: DispatchPolicy | None = None
        """None before anything was asked."""

    @property
    def order(self) -> Order:
        """Of the policy that gave the last answer."""
        return self.picked.order if self.picked else Order.ARRIVAL

    def review(self, situation: Situation) -> None:
        """Look ahead and pick."""
        if self.picked is not None and situation.queue.num_samples < situation.under_way.num_samples:
            return
        usual = usual_policy(situation)
        if not situation.has_forecasts:
            self.picked = usual
            return
        if situation.length_error > MAX_ERROR or _spread(situation) > MAX_SPREAD:
            self.picked = usual
            return
        others: tuple[DispatchPolicy, ...] = (StreamRl(), LeastLoaded(), Fifo())
        for policy in others:
            policy.review(situation)
        views = [situation]
        if situation.length_error:
            views.append(replace(situation, length_error=0.0))
        gains = dict.fromkeys(others, 1.0)
        for view in views:
            usual_s = finish_s(usual, view)
            for policy in list(gains):
                gains[policy] = min(gains[policy], 1 - finish_s(policy, view) / usual_s)
                if gains[policy] < MIN_GAIN:
                    del gains[policy]
        self.picked = max(gains, key=lambda policy: gains[policy], default=usual)

    def decide(self, situation: Situation) -> Decision:
        """The picked policy's answer."""
        if self.picked is None:
            self.picked = usual_policy(situation)
        return self.picked.decide(situation)


def usual_policy(situation: Situation) -> DispatchPolicy:
    """What to do without looking ahead."""
    if situation.has_forecasts:
        return LongestFirst()
    return LeastLoaded() if situation.has_speeds else Fifo()


def _spread(situation: Situation) -> float:
    times_s = [token_s(load) for load in situation.loads.values()]
    return max(times_s) / min(times_s)
