"""Moves work to an idle generator. Pure operations on a RunState.

A generator that finds nothing to lease looks at the others' leases: first those never started, then samples that may
end last of all. It steals one if by the latency model the sample ends sooner here by a stated gain, prefill of its
prompt and prefix included.

Fencing: the old lease ends in the commit that grants the new one, at the last stored chunk. Tokens that the old
generator decoded beyond it are refused with LEASE_LOST and discarded (less than its flush interval, usually 0.2 s), so
no token is stored twice and no stored one is lost. The old generator learns of it from a revocation or the refusal.

A sample in a token shard takes a detour: its lease ends, its shard counts its tokens, and the queue is dealt as always.

Hysteresis: a sample moves at most once in MIN_STAY_S, and only for the gain that `dispatch.stealing_rule` demands.
Moves do not count against `max_leases_per_sample`: nothing went wrong with the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from penstock.v1 import broker_pb2
from services.broker.dispatch.latency import kv_reads
from services.broker.dispatch.length_histogram import remaining_tokens
from services.broker.dispatch.situation import Situation
from services.broker.dispatch.stealing_rule import MAX_MOVES, MIN_STAY_S, is_worth_moving, late_generators
from services.broker.operations import leasing
from services.broker.operations.leasing import GeneratorFacts, Grant
from services.broker.records.store import SampleId
from services.broker.records_pb2 import SampleRecord
from services.broker.state.run_state import RunState

MAX_DONORS = 16
"""Generators whose leases one look reads."""
MIN_WAIT_S = 1.0
"""A lease without tokens counts as never started after this long: its first chunk may be on its way."""


@dataclass(slots=True)
class Moves:
    """Samples taken from other generators."""

    num_moved: int = 0
    grants: list[Grant] = field(default_factory=list)
    """The new leases of those that are not sealed first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A leased sample as the generator that asks sees it."""

    sample: SampleId
    remaining: float
    context: float
    is_begun: bool
    lease_s: float


def take_over(
    state: RunState,
    generator: GeneratorFacts,
    situation: Situation,
    *,
    num_waiting: Mapping[str, int],
    now_s: float,
    make_suffix: Callable[[], str],
) -> Moves:
    """Move samples to an idle generator.

    Args:
        state: The run.
        generator: The idle one; its load is `situation.loads[situation.asking]`.
        situation: The fleet.
        num_waiting: Samples that wait inside each other generator, by its last heartbeat.
        now_s: Unix seconds.
        make_suffix: See `leasing.lease`.
    """
    taker = _Taker(state, generator, situation, num_waiting, now_s)
    moves = Moves()
    while moves.num_moved < MAX_MOVES and (sample := taker.next()) is not None:
        grant = _move(state, generator, sample, now_s, make_suffix)
        moves.num_moved += 1
        moves.grants += [grant] if grant else []
    return moves


class _Taker:
    """Finds samples worth moving, one after the other."""

    def __init__(
        self,
        state: RunState,
        generator: GeneratorFacts,
        situation: Situation,
        num_waiting: Mapping[str, int],
        now_s: float,
    ) -> None:
        self._state, self._generator, self._now_s = state, generator, now_s
        self._mean_tokens = situation.mean_tokens
        self._has_speeds = situation.has_speeds
        self._length_error = situation.length_error
        self._asking = situation.loads[situation.asking].copy()
        self._donors = {name: load for name, load in situation.loads.items() if name != situation.asking}
        self._num_waiting = dict(num_waiting)
        self._held: dict[str, list[_Held]] = {}

    def next(self) -> SampleId | None:
        """The next sample to move, recorded in the loads as moved; None if none is worth it."""
        if not self._asking.room:
            return None
        found = self._never_begun() or self._last_to_end()
        if found is None:
            return None
        name, item = found
        self._held[name].remove(item)
        self._shift(name, item)
        return item.sample

    def _never_begun(self) -> tuple[str, _Held] | None:
        """The newest lease without tokens of an engine in which samples wait: engines begin in turn."""
        waiting_at = [name for name in self._donors if self._num_waiting.get(name, 0) > 0]
        for name in waiting_at[:MAX_DONORS]:
            load = self._donors[name]
            self._num_waiting[name] -= 1
            waiting = [
                item for item in self._held_by(name) if not item.is_begun and self._now_s - item.lease_s >= MIN_WAIT_S
            ]
            item = max(waiting, key=lambda item: item.lease_s, default=None)
            if item is not None and self._gains(load.later_s(item.remaining, item.context), item):
                return name, item
        return None

    def _last_to_end(self) -> tuple[str, _Held] | None:
        """The longest sample of a generator that may end last: only moving such a one shortens the step."""
        if not self._has_speeds:
            return None
        late = late_generators(self._asking, self._donors, length_error=self._length_error)
        for name in late[:MAX_DONORS]:
            begun = [item for item in self._held_by(name) if item.is_begun]
            item = max(begun, key=lambda item: item.remaining, default=None)
            if item is not None and self._gains(self._donors[name].finish_s(), item):
                return name, item
        return None

    def _held_by(self, name: str) -> list[_Held]:
        if name not in self._held:
            self._held[name] = list(_movable(self._state, self._generator, name, self._mean_tokens, self._now_s))
        return self._held[name]

    def _gains(self, there_s: float, item: _Held) -> bool:
        """Whether the sample ends sooner here by enough."""
        return is_worth_moving(self._asking, item.remaining, item.context, there_s=there_s)

    def _shift(self, name: str, item: _Held) -> None:
        """Record a move in the loads."""
        donor = self._donors[name] = self._donors[name].copy()
        self._asking.add(item.remaining, item.context)
        donor.num_samples -= 1
        donor.sum_tokens -= item.remaining
        donor.sum_kv_tokens -= kv_reads(item.remaining, item.context)
        donor.longest_tokens = max((other.remaining for other in self._held[name]), default=0.0)


def _movable(
    state: RunState, generator: GeneratorFacts, holder: str, mean_tokens: float, now_s: float
) -> Iterable[_Held]:
    """The samples of another generator that this one may take."""
    for group_id, index in state.generation_leases.get(holder, {}).values():
        group = state.groups[group_id]
        sample = group.samples[index]
        if sample.move_s and now_s - sample.move_s < MIN_STAY_S:
            continue
        if not leasing.may_take(state, generator, group, index):
            continue
        yield _Held(
            sample=(group_id, index),
            remaining=remaining_tokens(sample.predicted_tokens or mean_tokens, sample.num_tokens),
            context=group.num_prompt_tokens + sample.num_tokens,
            is_begun=_is_begun(sample),
            lease_s=sample.lease_s,
        )


def _is_begun(sample: SampleRecord) -> bool:
    """Whether tokens arrived under its current lease."""
    return sample.last_chunk_s >= sample.lease_s


def _move(
    state: RunState, generator: GeneratorFacts, sample_id: SampleId, now_s: float, make_suffix: Callable[[], str]
) -> Grant | None:
    group_id, index = sample_id
    with state.edit(group_id) as group:
        sample = group.samples[index]
        sample.num_moves += 1
        sample.move_s = now_s
        if group.token_shard:
            leasing.end_lease(state, group, index)
            return None
        sample.state = broker_pb2.SAMPLE_STATE_QUEUED
        return leasing.lease_sample(state, generator, group, index, now_s, make_suffix)
