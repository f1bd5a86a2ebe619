"""Finds leases that have ended without looking at every lease every time. Pure.

A holder's leases are looked at again when the first of them may have ended. Until then renewals and new leases only
make that later; where changes are undone, which may make it earlier, everything is forgotten. Holders that are gone are
forgotten too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from services.broker.records.store import SampleId

MAX_LOOKED = 8_192
"""Leases looked at at once, about 10 ms; the next time goes on from there."""


class LeaseEnds:
    """See the module; of leases of one kind."""

    def __init__(self) -> None:
        self._first_s: dict[str, float] = {}
        """By holder: none of its leases ends before this."""

    def forget(self) -> None:
        """Look at every lease again: some may end earlier than they did."""
        self._first_s.clear()

    def none_before_s(self, holder: str) -> float:
        """None of a holder's leases ends before this, as far as is known."""
        return self._first_s.get(holder, -math.inf)

    def note(self, holder: str, first_s: float) -> None:
        """All of a holder's leases were looked at, and end at this time or later."""
        self._first_s[holder] = first_s

    def ended(
        self, leases: Mapping[str, Mapping[str, SampleId]], end_s: Callable[[SampleId], float], now_s: float
    ) -> dict[str, list[int]]:
        """The samples whose leases have ended, as indices by group, which the caller then takes back."""
        ended: dict[str, list[int]] = {}
        first_s: dict[str, float] = {}
        num_looked = 0
        for holder, held in leases.items():
            known_s = self._first_s.get(holder, -math.inf)
            if now_s < known_s or num_looked >= MAX_LOOKED:
                first_s[holder] = known_s
                continue
            num_looked += len(held)
            earliest_s = math.inf
            for sample in held.values():
                at_s = end_s(sample)
                if at_s <= now_s:
                    ended.setdefault(sample[0], []).append(sample[1])
                else:
                    earliest_s = min(earliest_s, at_s)
            if earliest_s < math.inf:
                first_s[holder] = earliest_s
        self._first_s = first_s
        return ended
