"""Shares work by load relative to speed, in order of arrival. Pure.

Each sample goes to the generator that is done first with it (`placing`), so that a slow generator does not take what a
faster one would have finished sooner.
"""

from __future__ import annotations

from services.broker.dispatch.placing import USUAL_RISK, EarliestFinish
from services.broker.dispatch.situation import Order, Situation


class LeastLoaded:
    """See the module.

    Args:
        risk: See `EarliestFinish`.
    """

    name: str = "least_loaded"
    order: Order = Order.ARRIVAL
    needs_situation = True

    def __init__(self, *, risk: float = USUAL_RISK) -> None:
        self._risk = risk

    def review(self, situation: Situation) -> None:
        """Nothing to review."""

    def decide(self, situation: Situation) -> EarliestFinish:
        """Place everything in the policy's order."""
        return EarliestFinish.over_fleet(situation, risk=self._risk)
