"""Picks among the other policies by looking ahead with each. Pure.

At every review the situation is played through under each policy (`virtual`); the one that is done first decides until
the next review. A policy is left only for one that is sooner by MIN_GAIN, so that noise does not make it flutter. While
nothing is known, neither lengths nor speeds, it is `fifo`.
"""

from __future__ import annotations

from services.broker.dispatch.fifo import Fifo
from services.broker.dispatch.least_loaded import LeastLoaded
from services.broker.dispatch.lpt import LongestFirst
from services.broker.dispatch.streamrl import StreamRl
from services.broker.dispatch.types import Decision, DispatchPolicy, Order, Situation
from services.broker.dispatch.virtual import finish_s

MIN_GAIN = 0.01


class Auto:
    """See the module."""

    name = "auto"
    needs_situation = True

    def __init__(self) -> None:
        self.picked: DispatchPolicy | None = None
        """None before anything was asked."""
        self.finish_s: dict[str, float] = {}
        """When each policy would be done, as of the last review, seconds."""

    @property
    def order(self) -> Order:
        """Of the policy that gave the last answer."""
        return self.picked.order if self.picked else Order.ARRIVAL

    def review(self, situation: Situation) -> None:
        """Look ahead with each policy and pick."""
        if not (situation.has_forecasts or situation.has_speeds):
            self.picked, self.finish_s = Fifo(), {}
            return
        if not situation.queue.num_samples:
            return
        # Fresh ones: the picked policy goes on answering while this thinks, in another thread perhaps.
        policies: tuple[DispatchPolicy, ...] = (LongestFirst(), StreamRl(), LeastLoaded(), Fifo())
        for policy in policies:
            policy.review(situation)
        self.finish_s = {policy.name: finish_s(policy, situation) for policy in policies}
        best = min(policies, key=lambda policy: self.finish_s[policy.name])
        stay = next((policy for policy in policies if self.picked and policy.name == self.picked.name), best)
        # A queue that was just filled has nothing under way that a change of mind could spoil.
        is_fresh = self.picked is None or situation.under_way.num_samples < situation.queue.num_samples
        gain = 0.0 if is_fresh else MIN_GAIN
        self.picked = best if self.finish_s[best.name] < (1 - gain) * self.finish_s[stay.name] else stay

    def decide(self, situation: Situation) -> Decision:
        """The picked policy's answer."""
        if self.picked is None:
            self.picked = LongestFirst() if situation.has_forecasts or situation.has_speeds else Fifo()
        return self.picked.decide(situation)
