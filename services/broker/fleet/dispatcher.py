"""Dispatches one run in one broker process: applies its policy to a snapshot of the fleet.

Everything here is a hint that may be lost: decisions are kept in the run's records. Every wait ends: a generator that
is left without work for MAX_LEFT_S although some is queued and it may take it, gets it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from penstock.heartbeat_interval import LONGEST_ASKED_S
from penstock.v1 import broker_pb2
from services.broker.dispatch.auto import Auto
from services.broker.dispatch.fifo import Fifo
from services.broker.dispatch.latency import Load
from services.broker.dispatch.policies import make_policy
from services.broker.dispatch.situation import DispatchPolicy, Prompt
from services.broker.fleet import work_stealing
from services.broker.fleet.deal_round import Deal, Seat
from services.broker.fleet.dealer import SLICE, Dealer
from services.broker.fleet.snapshot import Fleet, GeneratorStatus, prompts_in_slices
from services.broker.fleet.statuses import FleetStatuses, Statuses
from services.broker.fleet.work_stealing import Moves
from services.broker.fleet.worker_registry import Peers
from services.broker.operations import leasing
from services.broker.operations.leasing import GeneratorFacts
from services.broker.state.run_state import RunState

MAX_LEFT_S = 30.0
REVIEW_EVERY_S = 1.0
MAX_REVIEW_SHARE = 0.05
"""Fraction of a core that reviews may use; a large fleet is reviewed less often."""
MAX_LOOK_S = 5.0
"""Budget of a look-ahead: a later answer would be about a queue that is gone."""
MAX_BEAT_AGE_S = 2 * LONGEST_ASKED_S
"""A generator with an older last heartbeat is not expected to take work. At the longest interval that a busy broker
asks for, one may be late by as much again."""
MAX_LEASES_AT_ONCE = 256
"""Leases that one generator gets from a round in which it gets everything."""
MANY = 32
STEAL_S = 0.0001
"""In a fleet of more than MANY, only one idle generator looks for work to steal in this time for each generator."""


class Dispatcher:
    """See the module."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._fleet = Fleet()
        self._dealer = Dealer(self._fleet)
        self._statuses = Statuses()
        self._policy: DispatchPolicy = Fifo()
        self._left_since_s: dict[str, float] = {}
        self._review_s = self._steal_s = -math.inf
        self._num_slices = 0

    def deal(
        self,
        state: RunState,
        asking: str,
        seats: Mapping[str, Seat],
        now_s: float,
        *,
        make_suffix: Callable[[], str],
    ) -> Deal:
        """Lease what is queued to the generators attached to this process.

        Args:
            state: The run.
            asking: The generator that asks, among `seats`: it alone gets leases if the policy is first come, first
                served, or if it was left without work for too long.
            seats: All of them; not changed.
            now_s: Unix seconds.
            make_suffix: See `leasing.lease`.
        """
        policy, seat = self._policy_of(state), seats[asking]
        longest = self._peers.longest_context_tokens()
        may_deal = policy.needs_situation and not self.is_overdue(asking, now_s)
        if may_deal and not state.run.is_closed and not leasing.holds_abandoned(state, seat.facts):
            dealt = self._dealer.deal(
                state,
                policy,
                seats,
                lambda: self._statuses_of(state, seats),
                now_s,
                make_suffix=make_suffix,
                longest_context_tokens=longest,
            )
            if dealt is not None:
                return dealt
        found = leasing.lease(
            state,
            replace(seat.facts, longest_context_tokens=longest),
            max_leases=min(seat.num_free, MAX_LEASES_AT_ONCE),
            now_s=now_s,
            make_suffix=make_suffix,
        )
        deal = Deal(grants={asking: found.grants} if found.grants else {}, is_partial=True)
        deal.note_reason(seat.facts, found.reason)
        return deal

    def why_none(self, state: RunState, facts: GeneratorFacts, deal: Deal) -> str:
        """Why a generator got nothing from a round, in readable words."""
        reason = deal.reason(facts)
        if reason in ("", leasing.LEFT_TO_OTHERS) and not self._dealer.has_room(facts.generator_id):
            return leasing.NO_ROOM
        return reason or (leasing.LEFT_TO_OTHERS if state.queue else leasing.NOTHING_QUEUED)

    def is_overdue(self, generator_id: str, now_s: float) -> bool:
        """Whether a generator has been idle long enough to get whatever is queued."""
        return now_s - self._left_since_s.get(generator_id, now_s) >= MAX_LEFT_S

    def note(self, generator_id: str, *, is_left: bool, now_s: float) -> None:
        """Report the outcome: whether the generator was left without work that it may take."""
        if not is_left:
            self._left_since_s.pop(generator_id, None)
        else:
            self._left_since_s.setdefault(generator_id, now_s)

    def forget(self, generator_id: str) -> None:
        """A generator left: nothing was left to others at its expense until it is back."""
        self._left_since_s.pop(generator_id, None)

    async def review(self, state: RunState, now_s: float) -> None:
        """Reconsider the choices that outlast one answer; called by the caretaker.

        In a thread, on a copy of the snapshot that is taken in slices: a look-ahead takes up to seconds, and streams
        must not wait. It gives way to them every few milliseconds, and is abandoned after MAX_LOOK_S.
        """
        policy = self._policy_of(state)
        if not policy.needs_situation or now_s < self._review_s:
            return
        self._review_s = now_s + REVIEW_EVERY_S
        self._fleet.measure(state)
        statuses = self._statuses.of(self._starting(state))
        if not statuses or not state.queue:
            return
        names = list(statuses)
        read: dict[str, GeneratorStatus] = {}
        loads: dict[str, Load] = {}
        for first in range(0, len(names), SLICE):
            some = {name: statuses[name] for name in names[first : first + SLICE]}
            read.update(some)
            loads.update({name: load.copy() for name, load in self._fleet.loads(state, some, now_s).items()})
            await asyncio.sleep(0)
        situation = self._fleet.situation_of(state, read, loads, names[0]).copy()
        prompts: list[Prompt] = []
        for part in prompts_in_slices(state):
            prompts += part
            await asyncio.sleep(0)
        started_s = time.perf_counter()
        await asyncio.to_thread(policy.review, replace(situation, prompts=prompts))
        self._review_s = now_s + max(REVIEW_EVERY_S, (time.perf_counter() - started_s) / MAX_REVIEW_SHARE)

    def take_over(
        self, state: RunState, generator: GeneratorFacts, max_leases: int, now_s: float, make_suffix: Callable[[], str]
    ) -> Moves:
        """Move work of other generators to one that finds nothing to lease; see `work_stealing`."""
        # All generators: near the end of a step none may start anything, and that is when work moves.
        live = self._live()
        if len(live) > MANY:
            if now_s < self._steal_s:
                return Moves()
            self._steal_s = now_s + STEAL_S * len(live)
        name = generator.generator_id
        statuses = self._statuses.of(live)
        read = {other: statuses[other] for other in self._next_slice(list(statuses))}
        read[name] = self._statuses.of_asking(self._peers.generator(name), generator, max_leases)
        known = {other: load for other in statuses if (load := self._fleet.known(other)) is not None}
        loads = {**known, **self._fleet.loads(state, read, now_s)}
        situation = self._fleet.situation_of(state, read, loads, name)
        num_waiting = {view.hello.generator_id: view.beat.num_waiting for view in live}
        return work_stealing.take_over(
            state, generator, situation, num_waiting=num_waiting, now_s=now_s, make_suffix=make_suffix
        )

    def _next_slice(self, names: Sequence[str]) -> Sequence[str]:
        """The generators to read now: of a large fleet another part each time."""
        first = SLICE * self._num_slices
        self._num_slices = self._num_slices + 1 if first + SLICE < len(names) else 0
        return names[first : first + SLICE]

    def describe(self, state: RunState, forecasts: str) -> str:
        """How dispatch decides now, for display; `forecasts` says where lengths come from."""
        policy = self._policy_of(state)
        if isinstance(policy, Auto) and policy.picked is not None:
            why = f" (a look-ahead took longer than {MAX_LOOK_S:g} s)" if policy.is_late else ""
            return f"auto, now {policy.picked.name}{why}: {forecasts}"
        return f"{policy.name}: {forecasts}"

    def _policy_of(self, state: RunState) -> DispatchPolicy:
        if self._policy.name != state.policy.dispatch:
            self._policy = make_policy(state.policy.dispatch, look_limit_s=MAX_LOOK_S)
        return self._policy

    def _live(self) -> list[broker_pb2.GeneratorView]:
        return self._peers.generators(max_age_s=MAX_BEAT_AGE_S)

    def _starting(self, state: RunState) -> list[broker_pb2.GeneratorView]:
        """The generators that may start new work now."""
        admission = state.admission()
        live = [view for view in self._live() if not view.beat.is_draining]
        versions = {view.beat.policy_version for view in live}
        allowed = {version for version in versions if admission.judge(generator_version=version).is_allowed}
        return [view for view in live if view.beat.policy_version in allowed]

    def _statuses_of(self, state: RunState, seats: Mapping[str, Seat]) -> FleetStatuses:
        """The generators attached here, whether they may start work or not, and those elsewhere that may.

        Those here may continue samples that others began, and they ask with a newer version than their last report has.
        """
        makers = {
            name: partial(self._statuses.of_asking, self._peers.generator(name), seat.facts, seat.num_free)
            for name, seat in seats.items()
        }
        return self._statuses.of(self._starting(state)).with_seats(makers)
