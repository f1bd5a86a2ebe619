"""Dispatches first come, first served: a generator gets the longest-waiting work, as much as it can hold. Pure."""

from __future__ import annotations

from services.broker.dispatch.situation import Order, Situation, Work


class TakeAll:
    """A `Decision` that gives everything."""

    is_done = False

    def take(self, work: Work, most: int) -> int:
        """See `Decision`."""
        return min(work.num_samples, most)


class Fifo:
    """See the module."""

    name = "fifo"
    order = Order.ARRIVAL
    needs_situation = False

    def review(self, situation: Situation) -> None:
        """Nothing to review."""

    def decide(self, situation: Situation) -> TakeAll:
        """Give everything to any generator that asks."""
        return TakeAll()
