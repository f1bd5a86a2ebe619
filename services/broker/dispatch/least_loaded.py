"""Shares work by load relative to speed, in order of arrival. Pure.

Each sample goes to the generator that is done first with it (`dealing.table`), so that a slow generator does not take
what a faster one would have finished sooner.
"""

from __future__ import annotations

from services.broker.dispatch.situation import USUAL_RISK, Order, Rule, Situation


class LeastLoaded:
    """See the module.

    Args:
        risk: See `Rule`.
    """

    name: str = "least_loaded"
    order: Order = Order.ARRIVAL
    needs_situation = True

    def __init__(self, *, risk: float = USUAL_RISK) -> None:
        self._risk = risk

    def review(self, situation: Situation) -> None:
        """Nothing to review."""

    def rule(self, situation: Situation) -> Rule:
        """Deal everything in the policy's order."""
        return Rule(order=self.order, risk=self._risk)
