"""Work that moves to an idle generator. Pure operations on a RunState.

A generator that finds nothing to lease looks at what the others hold: first leases that were never begun, then the
samples that will be done last. One is taken over when the latency model says that it is done sooner here by a stated
gain, prefill of its prompt and prefix included.

Fencing: the old lease ends in the same commit in which the new one is given, at the last stored chunk. What the old
generator decoded beyond it is refused with LEASE_LOST and thrown away (less than its flush interval, usually 0.2 s), so
no token is stored twice and none that was stored is lost. The old generator is told by a revocation, or by the refusal.

Hysteresis: a sample moves at most once in MIN_STAY_S, and never for less than MIN_GAIN_S and MIN_GAIN. Moves do not
count against `max_leases_per_sample`: nothing went wrong with the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from penstock.v1 import broker_pb2
from services.broker import generation
from services.broker.dispatch.latency import Load, kv_reads
from services.broker.dispatch.lengths import remaining_tokens
from services.broker.dispatch.types import Situation
from services.broker.generation import GeneratorFacts, Grant
from services.broker.records_pb2 import SampleRecord
from services.broker.run_state import RunState
from services.broker.store import SampleId

MIN_STAY_S = 10.0
MIN_GAIN_S = 1.0
MIN_GAIN = 0.2
"""Of the time the sample would still take where it is."""
MOVE_COST_S = 0.3
"""Hand-over and the tokens thrown away."""
MIN_WAIT_S = 1.0
"""A lease without tokens counts as never begun after this long: its first chunk may be on its way."""
MAX_MOVES = 8
"""At once; the loads are guesses, and the next look is a second away."""


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
) -> list[Grant]:
    """Move samples to an idle generator; returns its new leases.

    Args:
        state: The run.
        generator: The idle one; its load is `situation.loads[situation.asking]`.
        situation: The fleet; the loads are used up.
        num_waiting: Samples that wait inside each other generator, as its last beat says.
        now_s: Now.
        make_suffix: See `generation.lease`.
    """
    asking = situation.loads[situation.asking]
    grants: list[Grant] = []
    donors = sorted(
        (name for name in situation.loads if name != situation.asking),
        key=lambda name: situation.loads[name].finish_s(),
        reverse=True,
    )
    for name in donors:
        held = list(_movable(state, generator, name, situation.mean_tokens, now_s))
        for item in _in_order(held, num_waiting.get(name, 0), now_s):
            if len(grants) >= MAX_MOVES or not asking.room:
                return grants
            if not _gains(asking, situation.loads[name], item):
                if item.is_begun:
                    break
                continue
            grants.append(_move(state, generator, item.sample, now_s, make_suffix))
            _shift(situation.loads[name], asking, item, held)
            held.remove(item)
    return grants


def _movable(
    state: RunState, generator: GeneratorFacts, holder: str, mean_tokens: float, now_s: float
) -> Iterable[_Held]:
    """What another generator holds that this one may take."""
    for group_id, index in state.generation_leases.get(holder, {}).values():
        group = state.groups[group_id]
        sample = group.samples[index]
        if sample.move_s and now_s - sample.move_s < MIN_STAY_S:
            continue
        if not generation.may_take(state, generator, group, index):
            continue
        yield _Held(
            sample=(group_id, index),
            remaining=remaining_tokens(sample.predicted_tokens or mean_tokens, sample.num_tokens),
            context=group.num_prompt_tokens + sample.num_tokens,
            is_begun=_is_begun(sample),
            lease_s=sample.lease_s,
        )


def _is_begun(sample: SampleRecord) -> bool:
    """Whether tokens came under its current lease."""
    return sample.last_chunk_s >= sample.lease_s


def _in_order(held: list[_Held], num_waiting: int, now_s: float) -> list[_Held]:
    """As many never begun as wait, newest first (engines begin in turn); then the others, most tokens to go first."""
    unbegun = [item for item in held if not item.is_begun and now_s - item.lease_s >= MIN_WAIT_S]
    unbegun.sort(key=lambda item: -item.lease_s)
    begun = sorted((item for item in held if item.is_begun), key=lambda item: -item.remaining)
    return [*unbegun[:num_waiting], *begun]


def _gains(asking: Load, donor: Load, item: _Held) -> bool:
    """Whether the sample is done here sooner by enough."""
    here_s = MOVE_COST_S + asking.sample_s(item.remaining, item.context)
    there_s = donor.finish_s() if item.is_begun else donor.later_s(item.remaining, item.context)
    if item.is_begun and item.remaining < donor.longest_tokens:
        there_s *= item.remaining / donor.longest_tokens
    return there_s - here_s >= max(MIN_GAIN_S, MIN_GAIN * there_s)


def _move(
    state: RunState, generator: GeneratorFacts, sample_id: SampleId, now_s: float, make_suffix: Callable[[], str]
) -> Grant:
    group_id, index = sample_id
    with state.edit(group_id) as group:
        sample = group.samples[index]
        sample.state = broker_pb2.SAMPLE_STATE_QUEUED
        sample.num_moves += 1
        sample.move_s = now_s
        return generation.lease_sample(state, generator, group, index, now_s, make_suffix)


def _shift(donor: Load, asking: Load, item: _Held, held: list[_Held]) -> None:
    """Note a move in the loads."""
    asking.add(item.remaining, item.context)
    donor.num_samples -= 1
    donor.sum_tokens -= item.remaining
    donor.sum_kv_tokens -= kv_reads(item.remaining, item.context)
    donor.longest_tokens = max((other.remaining for other in held if other is not item), default=0.0)
