"""Deals the front of a run's queue to the generators attached to this process: one round leases to all of them.

A sample is placed once, on the generator that finishes it first (`dispatch.dealing`), and is leased to it at once:
nothing is kept for a generator. Only the table of generators outlives a round, and it is a hint. A sample that is
placed on a generator attached to another broker, or that should wait for a faster one, is left in the queue.

The order of starts is law: a group that is left in the queue keeps its place in admission. Younger groups are judged as
if it had been started, so that none takes its room and it can be started whenever its generator comes, or whenever it
is no longer left to that one. Otherwise a group could wait for ever at `max_staleness` 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from services.broker.dispatch.dealing.table import Table
from services.broker.dispatch.latency import Load
from services.broker.dispatch.situation import DispatchPolicy
from services.broker.fleet.deal_round import Deal, DealRound, Seat
from services.broker.fleet.snapshot import MAX_LEASES_READ, REFRESH_S, Fleet, GeneratorStatus
from services.broker.operations import leasing
from services.broker.state.run_state import RunState

MEMBER_S = 0.0005
"""Generators are read again after REFRESH_S, or this long for each: ten times the time that it takes."""
SLICE = 128
"""Generators that one round reads, about 5 ms; of a larger fleet the next round reads the next ones."""
MANY = 64
"""In a larger fleet only a round that reads measures which generators are faster, and lets new ones in."""
MAX_WAIT_S = 2.0
"""A generator at another broker that took nothing of what was left to it for this long is not counted on."""


@dataclass(slots=True)
class _Wait:
    """Since when work has been left to a generator at another broker, and the number of samples it has held since."""

    since_s: float
    last_s: float
    num_held: int


class Dealer:
    """See the module.

    Args:
        fleet: The loads of the run's generators.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._table: Table | None = None
        """None before there is a rule, and where the policy has none."""
        self._has_rule = False
        """Whether the policy was asked for its rule since the run or the policy changed."""
        self._made_for: tuple[object, ...] = ()
        self._mean_tokens = 1.0
        self._begun_s = -math.inf
        """When the generators were last begun to be read."""
        self._source: Mapping[str, GeneratorStatus] = {}
        self._unread: list[str] = []
        """Generators of `_source` that are not read yet."""
        self._statuses: dict[str, GeneratorStatus] = {}
        self._loads: dict[str, Load] = {}
        """What was read of each generator."""
        self._waits: dict[str, _Wait] = {}

    def deal(
        self,
        state: RunState,
        policy: DispatchPolicy,
        seats: Mapping[str, Seat],
        statuses: Callable[[], Mapping[str, GeneratorStatus]],
        now_s: float,
        *,
        make_suffix: Callable[[], str],
        longest_context_tokens: int | None,
    ) -> Deal | None:
        """Lease what is queued to the seats; None if the policy gives a generator that asks all that it can hold.

        Args:
            state: The run.
            policy: Its policy.
            seats: The generators attached to this process; not changed.
            statuses: Returns every generator that counts for dispatch, those of the seats among them.
            now_s: Unix seconds.
            make_suffix: See `leasing.lease`.
            longest_context_tokens: See `GeneratorFacts`.
        """
        has_read = self._read(state, policy, seats, statuses, now_s)
        table = self._table
        if table is None:
            return None
        self._bring_up_to_date(state, table, seats, now_s)
        if has_read or len(table) <= MANY:
            admission = state.admission()
            versions = {member.kind.policy_version for member in table}
            table.see_queue(state.queued_lengths, self._mean_tokens)
            table.measure_faster(
                {version for version in versions if admission.judge(generator_version=version).is_allowed}
            )
        dealt = DealRound(
            state,
            table,
            seats,
            now_s=now_s,
            mean_tokens=self._mean_tokens,
            make_suffix=make_suffix,
            longest_context_tokens=longest_context_tokens,
            is_short=has_read and len(table) > MANY,
        ).run()
        self._note_waits(state, dealt.left_to, now_s)
        return dealt

    def _read(
        self,
        state: RunState,
        policy: DispatchPolicy,
        seats: Mapping[str, Seat],
        statuses: Callable[[], Mapping[str, GeneratorStatus]],
        now_s: float,
    ) -> bool:
        """Read the next slice of the generators, if they are due; returns whether there was one."""
        if self._is_due(state, policy, seats, now_s):
            self._begin(state, policy, statuses(), now_s)
        names, self._unread = self._unread[:SLICE], self._unread[SLICE:]
        if not names:
            return False
        read = {name: self._source[name] for name in names}
        self._statuses.update(read)
        loads = self._fleet.loads(state, read, now_s)
        self._loads.update(loads)
        if not self._unread or not self._has_rule:
            self._set_rule(state, policy, loads)
        if self._table is not None:
            self._put(state, self._table, seats, loads, now_s)
        return True

    def _is_due(self, state: RunState, policy: DispatchPolicy, seats: Mapping[str, Seat], now_s: float) -> bool:
        if self._made_for != _made_for(state, policy):
            return True
        age_s, table = now_s - self._begun_s, self._table
        if table is None:
            return age_s >= REFRESH_S
        if age_s >= max(REFRESH_S, MEMBER_S * len(table)):
            return True
        return len(table) <= MANY and any(table.get(name) is None for name in seats)

    def _begin(
        self, state: RunState, policy: DispatchPolicy, statuses: Mapping[str, GeneratorStatus], now_s: float
    ) -> None:
        """Begin to read every generator again; those that are gone are forgotten."""
        self._begun_s, made_for = now_s, _made_for(state, policy)
        self._has_rule = self._has_rule and made_for == self._made_for
        # First those that the last time did not come to.
        names = dict.fromkeys([name for name in self._unread if name in statuses]) | dict.fromkeys(statuses)
        self._made_for, self._source, self._unread = made_for, statuses, list(names)
        self._mean_tokens = self._fleet.mean_tokens(state)
        self._fleet.forget_others(statuses.keys(), now_s)
        for name in self._loads.keys() - statuses.keys():
            del self._loads[name], self._statuses[name]
            if self._table is not None:
                self._table.remove(name)

    def _set_rule(self, state: RunState, policy: DispatchPolicy, loads: Mapping[str, Load]) -> None:
        """Ask the policy for its rule. Another one needs a new table, in which generators besides `loads` follow."""
        situation = self._fleet.situation_of(state, self._statuses, self._loads, next(iter(self._loads)))
        rule, error, table = policy.rule(situation), situation.length_error, self._table
        self._has_rule = True
        if rule is None:
            self._table = None
            return
        if table is None or table.is_sparse or (table.rule, table.length_error) != (rule, error):
            self._table = Table(rule, length_error=error)
            self._unread = list(dict.fromkeys([*self._unread, *(name for name in self._loads if name not in loads)]))
        else:
            table.forget_unused_kinds()

    def _put(
        self, state: RunState, table: Table, seats: Mapping[str, Seat], loads: Mapping[str, Load], now_s: float
    ) -> None:
        """Put these generators in the table as they are known; most have not changed."""
        for name, load in loads.items():
            seat = seats.get(name)
            if seat is None and not self._counts_on(state, name, now_s):
                table.remove(name)
                continue
            if seat is not None and leasing.holds_abandoned(state, seat.facts):
                load.max_leases = 0
            version = self._statuses[name].policy_version if seat is None else seat.facts.policy_version
            member = table.get(name)
            if member is None or not member.is_same(load, version, is_here=seat is not None):
                table.put(name, load, policy_version=version, is_here=seat is not None)

    def _bring_up_to_date(self, state: RunState, table: Table, seats: Mapping[str, Seat], now_s: float) -> None:
        """Bring the numbers in the table to the records and the seats; most have not changed."""
        leases = state.generation_leases
        may_read = state.leased_lengths.num_samples <= MAX_LEASES_READ
        for member in list(table):
            seat, load = seats.get(member.name), member.load
            num_held = len(leases.get(member.name, ()))
            num_free = load.max_leases if seat is None else seat.num_free
            version = member.kind.policy_version if seat is None else seat.facts.policy_version
            if (seat is None) == member.is_here:
                table.remove(member.name)
                continue
            is_same = load.num_samples == num_held and load.max_leases == num_free
            if is_same and member.kind.policy_version == version:
                continue
            if load.num_samples != num_held:
                if may_read:
                    load = self._loads[member.name] = self._fleet.read(state, self._statuses[member.name], now_s)
                else:
                    load.resize(num_held, self._mean_tokens)
            is_abandoned = seat is not None and leasing.holds_abandoned(state, seat.facts)
            load.max_leases = 0 if is_abandoned else num_free
            table.put(member.name, load, policy_version=version, is_here=member.is_here)

    def has_room(self, name: str) -> bool:
        """Whether, by what is known of it, a generator could hold one more sample."""
        member = self._table.get(name) if self._table else None
        return member is None or member.load.room > 0

    # -- generators at other brokers -----------------------------------------------------------------------------------

    def _counts_on(self, state: RunState, name: str, now_s: float) -> bool:
        """Whether a generator at another broker still seems to take the work that is left to it."""
        wait = self._wait(state, name, now_s)
        return wait is None or now_s - wait.since_s < MAX_WAIT_S

    def _note_waits(self, state: RunState, left_to: Iterable[str], now_s: float) -> None:
        waits = {name: self._wait(state, name, now_s) for name in left_to}
        self._waits = {
            name: _Wait(now_s if wait is None else wait.since_s, now_s, _num_held(state, name))
            for name, wait in waits.items()
        }

    def _wait(self, state: RunState, name: str, now_s: float) -> _Wait | None:
        wait = self._waits.get(name)
        if wait is None or wait.num_held != _num_held(state, name) or now_s - wait.last_s > MAX_WAIT_S:
            return None
        return wait


def _num_held(state: RunState, name: str) -> int:
    return len(state.generation_leases.get(name, ()))


def _made_for(state: RunState, policy: DispatchPolicy) -> tuple[object, ...]:
    """What a table depends on besides the generators."""
    return (policy, state.run.owner.instance_id, state.run.history, state.run.policy_version)
