"""Finds leases that are due for renewal without looking at every lease at every heartbeat. Pure.

A lease is looked at when a heartbeat is the first to name it, and again when it may be due. Until then renewals only
make that later; a lease whose renewal is undone is looked at again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

FEW = 64
"""Holders that are gone are forgotten once there are more than this beside twice those that hold leases."""


@dataclass(slots=True)
class _Holder:
    due_s: dict[str, float] = field(default_factory=dict)
    """By lease: it is not due before this."""
    next_s: float = math.inf
    """None of them is due before this."""


class LeaseDues:
    """See the module; of leases of one kind."""

    def __init__(self) -> None:
        self._holders: dict[str, _Holder] = {}

    def forget(self, holder_id: str, lease_id: str) -> None:
        """Look at a lease again: it may be due earlier than it was."""
        if holder_id in self._holders:
            self._holders[holder_id].due_s.pop(lease_id, None)

    def forget_others(self, holders: Collection[str]) -> None:
        """Forget holders other than these, once they are many."""
        if len(self._holders) > 2 * len(holders) + FEW:
            self._holders = {name: self._holders[name] for name in holders if name in self._holders}

    def take_due(self, holder_id: str, named: frozenset[str], now_s: float) -> Collection[str]:
        """Those of the leases that a holder names which may be due: `note` says when they are next."""
        holder = self._holders.setdefault(holder_id, _Holder())
        unknown = named.difference(holder.due_s)
        if now_s < holder.next_s:
            return unknown
        past = [lease_id for lease_id, due_s in holder.due_s.items() if due_s <= now_s]
        for lease_id in past:
            del holder.due_s[lease_id]
        holder.next_s = min(holder.due_s.values(), default=math.inf)
        return unknown.union(named.intersection(past))

    def note(self, holder_id: str, due_s: Mapping[str, float]) -> None:
        """Leases of a holder were looked at or renewed, and are not due before this."""
        holder = self._holders.setdefault(holder_id, _Holder())
        holder.due_s.update(due_s)
        holder.next_s = min(holder.next_s, min(due_s.values(), default=math.inf))
