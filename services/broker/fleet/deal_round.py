"""One round of dealing: walks the front of the queue once and leases each sample to the generator it is placed on.

See `dealer`. An operation on a RunState: it may run again on another copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.v1 import broker_pb2, types_pb2
from services.broker.dispatch.dealing.table import Kind, Member, Table
from services.broker.dispatch.latency import Load
from services.broker.dispatch.situation import Work
from services.broker.operations import drops, leasing
from services.broker.operations.leasing import MAX_GROUPS_SCANNED, GeneratorFacts, Grant
from services.broker.records_pb2 import GroupRecord
from services.broker.rules.admission import AdmissionRule, Verdict
from services.broker.state.run_state import RunState

MAX_LEASES = 128
"""Leases of one round: about 5 ms."""
MAX_PLACED = 256
"""Samples placed in one round, those left to generators of other brokers included."""
SHORT = 8
"""A round for which the table of a large fleet was made leases this fraction: making it takes as long as the rest."""


@dataclass(slots=True, eq=False)
class Seat:
    """A generator attached to this process, as its lease stream keeps it."""

    facts: GeneratorFacts
    num_free: int = 0
    """Number of leases that it may get now."""
    grants: list[Grant] = field(default_factory=list)
    """Committed leases that the stream has to send."""
    wake: Callable[[], None] = lambda: None
    """Wakes the stream."""


@dataclass(slots=True, kw_only=True)
class Deal:
    """The outcome of a round."""

    grants: dict[str, list[Grant]] = field(default_factory=dict)
    """New leases by generator."""
    reasons: dict[tuple[float, int], str] = field(default_factory=dict)
    """Why a generator of this context and version got no more, in readable words."""
    left_to: dict[str, Member] = field(default_factory=dict)
    """Generators at other brokers that work was left to."""
    is_cut: bool = False
    """Whether the round ended before everything was dealt that could be."""
    is_partial: bool = False
    """Whether only the generator that asked was dealt to."""

    def note_reason(self, facts: GeneratorFacts, reason: str) -> None:
        """Note why generators like this one got no more."""
        self.reasons[facts.max_context_tokens, facts.policy_version] = reason

    def reason(self, facts: GeneratorFacts) -> str:
        """Why this generator got no more."""
        return self.reasons.get((facts.max_context_tokens, facts.policy_version), "")


class DealRound:
    """See the module; arguments as for `Dealer.deal`."""

    def __init__(
        self,
        state: RunState,
        table: Table,
        seats: Mapping[str, Seat],
        *,
        now_s: float,
        mean_tokens: float,
        make_suffix: Callable[[], str],
        longest_context_tokens: int | None,
        is_short: bool,
    ) -> None:
        self._state, self._table, self._seats = state, table, seats
        self._now_s, self._mean_tokens, self._make_suffix = now_s, mean_tokens, make_suffix
        self._longest_context_tokens = longest_context_tokens
        self._share = SHORT if is_short else 1
        self._deal = Deal()
        self._num_left = 0
        """Groups left in the queue that may have been started: they keep their places in admission."""
        self._num_placed = self._num_leased = 0
        self._lent: list[tuple[Member, Load]] = []
        table.see_queue(state.queued_lengths, mean_tokens)
        self._set_admission()

    def run(self) -> Deal:
        """Deal until no generator here has room, nothing more may be leased, or the round is long enough."""
        self._walk()
        if self._table.rule.long_tail_ids and self._table.is_open and not self._num_placed:
            # The front of the queue is all of the part whose generators are full: the others must not wait beside it.
            self._table.let_all_help()
            self._num_left = 0
            self._set_admission()
            self._walk()
        self._take_back()
        return self._deal

    def _walk(self) -> None:
        """Go through the front of the queue."""
        for rank in self._state.queued_in(self._table.rule.order)[:MAX_GROUPS_SCANNED]:
            if not self._table.is_open:
                break
            if self._share * self._num_leased >= MAX_LEASES or self._share * self._num_placed >= MAX_PLACED:
                self._deal.is_cut = self._num_leased > 0
                break
            group = self._state.groups.at(rank[-1])
            if group is not None and not self._deal_group(group):
                break

    def _deal_group(self, group: GroupRecord) -> bool:
        """Lease what can be leased of a group; False if no later one can be, as admission refuses all starts."""
        num_context_tokens = leasing.num_context_tokens_of(group)
        longest = self._longest_context_tokens
        if longest is not None and num_context_tokens > longest:
            drops.drop(self._state, group.group_id, drops.CONTEXT_TOO_LONG)
            return True
        oldest = self._state.index.versions.get(group.group_id)
        is_start = oldest is None and group.purpose == types_pb2.PURPOSE_TRAIN
        if not self._table.has_room_for(group.samples[0].predicted_tokens):
            self._num_left += is_start
            return True
        if is_start and self._num_left != self._num_left_seen:
            self._set_admission()
        if is_start and not self._may_start_any():
            return False
        kinds = self._kinds_for(group, oldest, num_context_tokens)
        if not kinds:
            return True
        work = leasing.work_of(group, self._mean_tokens)
        placed = self._place(work, kinds)
        here = [member for member in placed if member.is_here]
        if here:
            self._lease(group, here)
        elif is_start:
            self._num_left += 1
        if is_start:
            self._set_admission()
        if len(here) < work.num_samples:
            self._note_reason(kinds, leasing.LEFT_TO_OTHERS)
        return True

    # -- who may take it -----------------------------------------------------------------------------------------------

    def _set_admission(self) -> None:
        """Read admission again; groups that are left count as started when a start is judged."""
        admission = self._state.admission()
        self._join_rule = admission
        self._start_rule = replace(admission, num_started=admission.num_started + self._num_left)
        self._num_left_seen = self._num_left
        self._may_start: dict[int, Verdict] = {}

    def _may_start_any(self) -> bool:
        """Whether any kind of generator may start groups."""
        may = False
        for kind in self._table.kinds:
            verdict = self._may_start.get(kind.policy_version)
            if verdict is None:
                verdict = self._start_rule.judge(generator_version=kind.policy_version)
                self._may_start[kind.policy_version] = verdict
            if verdict.is_allowed:
                may = may or len(kind.open) > 0
            else:
                self._note_reason([kind], verdict.reason)
        return may

    def _kinds_for(self, group: GroupRecord, oldest: int | None, num_context_tokens: int) -> list[Kind]:
        """The kinds of generators that may take the group."""
        rule: AdmissionRule = self._start_rule if oldest is None else self._join_rule
        found: list[Kind] = []
        for kind in self._table.kinds:
            verdict = leasing.judge(
                rule,
                group,
                oldest,
                num_context_tokens,
                policy_version=kind.policy_version,
                max_context_tokens=kind.max_context_tokens,
            )
            if verdict.is_allowed:
                found.append(kind)
            else:
                self._note_reason([kind], verdict.reason)
        return found

    def _note_reason(self, kinds: Sequence[Kind], reason: str) -> None:
        for kind in kinds:
            self._deal.reasons.setdefault((kind.max_context_tokens, kind.policy_version), reason)

    # -- placing and leasing -------------------------------------------------------------------------------------------

    def _place(self, work: Work, kinds: Sequence[Kind]) -> list[Member]:
        """Place a group's samples as far as there is room; returns the generator of each."""
        placed: list[Member] = []
        while len(placed) < work.num_samples:
            member = self._table.first_done(work, kinds)
            if member is None:
                break
            if not member.is_here:
                self._lend(member)
            self._table.add(member, work)
            placed.append(member)
        self._num_placed += len(placed)
        return placed

    def _lend(self, member: Member) -> None:
        """Let samples be placed on a generator of another broker for this round only."""
        if member.name not in self._deal.left_to:
            self._deal.left_to[member.name] = member
            self._lent.append((member, member.load))
            member.load = member.load.copy()

    def _take_back(self) -> None:
        for member, load in self._lent:
            member.load = load
            self._table.index(member)

    def _lease(self, group: GroupRecord, members: Sequence[Member]) -> None:
        self._num_leased += len(members)
        with self._state.edit(group.group_id):
            queued = [
                index for index, sample in enumerate(group.samples) if sample.state == broker_pb2.SAMPLE_STATE_QUEUED
            ]
            for member, index in zip(members, queued, strict=False):
                grant = leasing.lease_sample(
                    self._state, self._seats[member.name].facts, group, index, self._now_s, self._make_suffix
                )
                self._deal.grants.setdefault(member.name, []).append(grant)
