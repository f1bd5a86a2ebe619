"""Shares work by load relative to speed, in order of arrival. Pure.

Each sample goes to the generator that is done first with it (`placing`), so that a slow generator does not take what a
faster one would have finished sooner.
"""

from __future__ import annotations

from services.broker.dispatch.placing import EarliestFinish
from services.broker.dispatch.situation import Order, Situation


class LeastLoaded:
    """See the module."""

    name = "least_loaded"
    order = Order.ARRIVAL
    needs_situation = True

    def review(self, situation: Situation) -> None:
        """Nothing to review."""

    def decide(self, situation: Situation) -> EarliestFinish:
        """Place everything in order."""
        return EarliestFinish.over_fleet(situation)
