"""Renews the leases that generators' heartbeats name. Pure operations on a RunState.

A lease is renewed when half of its duration is over. Whenever the record of a group is written for that, the leases
of its other samples are renewed with it, as of the heartbeats that named them: a group's samples are often at several
generators, and its record is written once for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.stall_limits import SilenceLimit
from penstock.v1 import broker_pb2
from services.broker.records_pb2 import GroupRecord, SampleRecord
from services.broker.rules.limits import Limits
from services.broker.state.run_state import RunState

_LEASED = broker_pb2.SAMPLE_STATE_LEASED


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


def renew(
    state: RunState,
    heard: Heard,
    now_s: float,
    *,
    unbroken_since_s: float = 0.0,
    others: Mapping[str, Heard] | None = None,
) -> list[str]:
    """Renew the leases that a generator still works on; one with more than half of its duration left is not rewritten.

    A lease without a new token for too long (`Limits.token_silence`) is left to expire: the next generator continues
    from the stored tokens. Silence counts from `unbroken_since_s` at the earliest, see `run_clock`. `others` are
    generators whose leases may be renewed with it, by id. Returns leases that are left to expire, of those looked at.
    """
    held, dues = state.generation_leases.get(heard.holder_id, {}), state.generation_dues
    lease_ids = dues.take_due(heard.holder_id, heard.lease_ids, now_s) if held else ()
    if not lease_ids:
        return []
    life_s, silence_s = state.limits.generation_lease_s, heard.silence(state.limits).value_s
    silent: list[str] = []
    due: dict[str, list[int]] = {}
    for lease_id in lease_ids:
        sample_id = held.get(lease_id)
        if sample_id is None:
            continue
        group_id, index = sample_id
        sample = state.groups[group_id].samples[index]
        if now_s - _token_s(sample, unbroken_since_s) > silence_s:
            silent.append(lease_id)
        elif sample.lease_expire_s - now_s < life_s / 2:
            due.setdefault(group_id, []).append(index)
            continue
        dues.note(heard.holder_id, lease_id, sample.lease_expire_s - life_s / 2)
    for group_id, indices in due.items():
        state.grow(group_id)
        group = state.groups[group_id]
        for index in indices:
            _renew(state, group.samples[index], now_s)
        if others:
            _renew_others(state, group, others, now_s, unbroken_since_s)
    return silent


def _renew(state: RunState, sample: SampleRecord, from_s: float) -> None:
    life_s = state.limits.generation_lease_s
    sample.lease_expire_s = from_s + life_s
    state.generation_dues.note(sample.generator_id, sample.lease_id, from_s + life_s / 2)


def _renew_others(
    state: RunState, group: GroupRecord, others: Mapping[str, Heard], now_s: float, unbroken_since_s: float
) -> None:
    """Renew a group's leases as of when they were last named, if that is later than they were renewed."""
    for sample in group.samples:
        heard = others.get(sample.generator_id)
        if heard is None or sample.state != _LEASED or sample.lease_id not in heard.lease_ids:
            continue
        from_s = min(heard.heard_s, now_s)
        if from_s + state.limits.generation_lease_s <= sample.lease_expire_s:
            continue
        if now_s - _token_s(sample, unbroken_since_s) <= heard.silence(state.limits).value_s:
            _renew(state, sample, from_s)


def _token_s(sample: SampleRecord, unbroken_since_s: float) -> float:
    """When a leased sample's last token came, or its lease began, or the run's clock had its last gap."""
    return max(sample.lease_s, sample.last_chunk_s, unbroken_since_s)
