"""Renews the leases that generators' heartbeats name. Pure operations on a RunState.

A generator's leases are renewed together, by one small record (`RenewalRecord`), when one that its heartbeat names has
lost more than RENEWED_AFTER of its duration. In between, a heartbeat costs hardly more for many leases than for one.
`RunState.lease_end_s` says when a lease ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.stall_limits import SilenceLimit
from services.broker.records_pb2 import RenewalRecord
from services.broker.rules.limits import Limits
from services.broker.state.run_state import RunState

RENEWED_AFTER = 0.25
"""Part of a lease. So much, and the time between two heartbeats, is what a heartbeat may not be late by: a busy broker
reads them late, and leases of the generators that it then hears must not have ended."""
MAX_FORGOTTEN = 256
"""Renewals removed at once; the next time goes on from there."""


@dataclass(slots=True, kw_only=True, eq=False)
class Heard:
    """What a generator's last heartbeat said of its leases."""

    holder_id: str
    lease_ids: frozenset[str]
    heard_s: float
    """When it was read, by the run's clock."""
    tokens_per_second: float | None = None
    """Measured speed of the generator's samples, if known."""
    _silence: SilenceLimit | None = None

    def silence(self, limits: Limits) -> SilenceLimit:
        """How long its leases last without a token."""
        if self._silence is None:
            self._silence = limits.token_silence(self.holder_id, self.tokens_per_second)
        return self._silence


def renew(state: RunState, heard: Heard, now_s: float, *, unbroken_since_s: float = 0.0) -> list[str]:
    """Renew the leases that a generator still works on, from when the heartbeat that names them was read.

    Those that it holds and does not name end when they would have. So does a lease without a new token for too long
    (`Limits.token_silence`): the next generator continues from the stored tokens. Silence counts from
    `unbroken_since_s` at the earliest, see `run_clock`. Returns leases that are left to expire, of those looked at.
    """
    life_s, heard_s = state.limits.generation_lease_s, min(heard.heard_s, now_s)
    held, due_s = state.generation_leases.get(heard.holder_id, {}), heard_s + (1 - RENEWED_AFTER) * life_s
    if state.generation_ends.none_before_s(heard.holder_id) >= due_s or held.keys().isdisjoint(heard.lease_ids):
        return []
    last = state.renewals.get(heard.holder_id, RenewalRecord())
    silence_s = heard.silence(state.limits).value_s
    is_due = 0.0 < last.renewed_s < due_s - life_s and now_s - max(last.oldest_token_s, unbroken_since_s) <= silence_s
    # Then none of them is silent, and those that are named are renewed without looking at each.
    looked = held.keys() - heard.lease_ids if is_due else held.keys()
    # A heartbeat may be stored after a later one that another process read: nothing ends earlier for it.
    renewed_s = max(heard_s, last.renewed_s)
    oldest_token_s = last.oldest_token_s if is_due else renewed_s
    ends_s, other_ends_s, silent = list[float](), dict[str, float](), list[str]()
    for lease_id in looked:
        group_id, index = held[lease_id]
        sample = state.groups[group_id].samples[index]
        end_s, token_s = state.lease_end_s(sample), max(sample.lease_s, sample.last_chunk_s)
        ends_s.append(end_s)
        oldest_token_s = min(oldest_token_s, token_s)
        if lease_id in heard.lease_ids:
            if now_s - max(token_s, unbroken_since_s) > silence_s:
                silent.append(lease_id)
            else:
                is_due = is_due or end_s < due_s
                end_s = max(end_s, heard_s + life_s)
        if sample.lease_s <= renewed_s and end_s < max(sample.lease_expire_s, renewed_s + life_s):
            other_ends_s[lease_id] = end_s
    if is_due:
        renewal = RenewalRecord(renewed_s=renewed_s, other_ends_s=other_ends_s, oldest_token_s=oldest_token_s)
        state.set_renewal(heard.holder_id, renewal)
        ends_s = [renewed_s + life_s, *other_ends_s.values()]
    state.generation_ends.note(heard.holder_id, min(ends_s))
    return silent


def after_last(state: RunState, holder_id: str, now_s: float) -> float:
    """The present for a lease granted now: after the last renewal, which is not of it, though clocks may be uneven."""
    last = state.renewals.get(holder_id)
    return now_s if last is None else max(now_s, math.nextafter(last.renewed_s, math.inf))


def forget_gone(state: RunState, now_s: float) -> None:
    """Remove the renewals of generators that hold no leases, unless they have held some lately and may again."""
    gone = state.renewals.keys() - state.generation_leases.keys()
    old_s = now_s - state.limits.generation_lease_s
    for holder_id in [name for name in gone if state.renewals[name].renewed_s < old_s][:MAX_FORGOTTEN]:
        state.set_renewal(holder_id, None)
