"""Dispatches the longest predicted first, each sample to the generator that finishes it first. Pure.

Source: Graham (1969), longest processing time first, within 4/3 of the best makespan on equal machines; the order that
StreamRL (Zhong et al. 2025), section 5.4, uses inside an instance. Differences: over the whole fleet of unequal
generators, and only among one step's groups, so that short prompts are never postponed for ever.
"""

from __future__ import annotations

from services.broker.dispatch.placing import USUAL_RISK, EarliestFinish
from services.broker.dispatch.situation import Order, Situation


class LongestFirst:
    """See the module.

    Args:
        risk: See `EarliestFinish`.
    """

    name = "lpt"
    order = Order.LENGTH
    needs_situation = True

    def __init__(self, *, risk: float = USUAL_RISK) -> None:
        self._risk = risk

    def review(self, situation: Situation) -> None:
        """Nothing to review."""

    def decide(self, situation: Situation) -> EarliestFinish:
        """Place everything, longest first."""
        return EarliestFinish.over_fleet(situation, risk=self._risk)
