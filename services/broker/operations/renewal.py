"""Renews the leases that generators' heartbeats name. Pure operations on a RunState.

A lease is renewed when half of its duration is over. Whenever the record of a group is written for that, the leases
of its other samples are renewed with it, as of the heartbeats that named them: a group's samples are often at several
generators, and its record is written once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.stall_limits import SilenceLimit
from penstock.v1 import broker_pb2
from services.broker.records_pb2 import SampleRecord
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
    by_group: dict[str, list[tuple[int, str]]] = {}
    for lease_id in lease_ids:
        sample_id = held.get(lease_id)
        if sample_id is not None:
            by_group.setdefault(sample_id[0], []).append((sample_id[1], lease_id))
    silent: list[str] = []
    due_s: dict[str, float] = {}
    for group_id, named in by_group.items():
        samples = state.groups[group_id].samples
        num_due = 0
        for index, lease_id in named:
            sample = samples[index]
            expire_s = sample.lease_expire_s
            if now_s - _token_s(sample, unbroken_since_s) > silence_s:
                silent.append(lease_id)
            elif expire_s - now_s < life_s / 2:
                if not num_due:
                    state.grow(group_id)
                num_due += 1
                sample.lease_expire_s = expire_s = now_s + life_s
            due_s[lease_id] = expire_s - life_s / 2
        if others and 0 < num_due < len(samples):
            _renew_others(state, samples, others, now_s, unbroken_since_s)
    dues.note(heard.holder_id, due_s)
    return silent


def _renew_others(
    state: RunState,
    samples: Iterable[SampleRecord],
    others: Mapping[str, Heard],
    now_s: float,
    unbroken_since_s: float,
) -> None:
    """Renew a group's leases as of when they were last named, if that is later than they were renewed."""
    life_s = state.limits.generation_lease_s
    for sample in samples:
        heard = others.get(sample.generator_id)
        if heard is None or sample.state != _LEASED:
            continue
        lease_id, expire_s = sample.lease_id, min(heard.heard_s, now_s) + life_s
        if expire_s <= sample.lease_expire_s or lease_id not in heard.lease_ids:
            continue
        if now_s - _token_s(sample, unbroken_since_s) <= heard.silence(state.limits).value_s:
            sample.lease_expire_s = expire_s
            state.generation_dues.note(heard.holder_id, {lease_id: expire_s - life_s / 2})


def _token_s(sample: SampleRecord, unbroken_since_s: float) -> float:
    """When a leased sample's last token came, or its lease began, or the run's clock had its last gap."""
    return max(sample.lease_s, sample.last_chunk_s, unbroken_since_s)
