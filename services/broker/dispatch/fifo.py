"""Dispatches first come, first served: a generator gets the longest-waiting work, as much as it can hold. Pure."""

from __future__ import annotations

from services.broker.dispatch.situation import Situation


class Fifo:
    """See the module."""

    name = "fifo"
    needs_situation = False

    def review(self, situation: Situation) -> None:
        """Nothing to review."""

    def rule(self, situation: Situation) -> None:
        """None: a generator that asks gets what it can hold."""
