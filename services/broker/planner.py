"""Answers generators that ask for work from one plan after the other; see `dispatch.plan`. No I/O.

A plan lasts REFRESH_S, longer where more was placed: what a lease costs stays the same however large the fleet is. It
is a hint: what it kept for a generator that may not have it, or that does not ask, is placed again by the next one.
What comes meanwhile is placed in turn; where it goes before all else (evaluations, what expired) it is noticed at the
next ask, and ends the plan after REFRESH_S. One ask places MAX_PLACED samples at most, so that no other work of the
broker waits for long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from services.broker import generation
from services.broker.dispatch.latency import Load
from services.broker.dispatch.plan import Plan
from services.broker.dispatch.types import NEW_RANK, DispatchPolicy, Rank, Situation, Work
from services.broker.fleet import REFRESH_S, Fleet, GeneratorStatus
from services.broker.generation import EVERYTHING, MAX_GROUPS_SCANNED, Choice
from services.broker.run_state import RunState

MAX_PLACED = 256
"""Samples that one ask places at most: about 6 ms."""
MANY = 128
"""In a larger fleet, where making a plan takes milliseconds too, an ask places half as many, and the one for which the
plan was made a sixteenth."""
PLACED_S, MEMBER_S = 0.0001, 0.0005
"""A plan lasts so long for each sample placed and each generator in it: ten and a hundred times what they cost."""
MAX_TRIED_AGAIN = 128
"""Groups for which there was no place that one ask tries to place again."""
NUM_NOTICED = 16
"""Groups at the front of the queue in which an ask looks for news."""
_PAGE = 64

Statuses = Callable[[], Mapping[str, GeneratorStatus]]


class Planner:
    """The plan of one run in one broker process."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.planned: Planned | None = None
        """The present one."""
        self._free_until_s = -math.inf
        """Until then no plan is needed."""

    def choose(
        self, state: RunState, policy: DispatchPolicy, asking: GeneratorStatus, statuses: Statuses, now_s: float
    ) -> Choice:
        """How to answer a generator that asks; `statuses` tells the others when a new plan is made."""
        if now_s < self._free_until_s:
            return EVERYTHING
        load = self._fleet.load(state, asking, now_s)
        planned = self.planned
        name = asking.generator_id
        if planned is None or planned.is_over(state, policy, now_s) or planned.should_help(state, name):
            everyone = {**statuses(), name: asking}
            situation = self._fleet.situation(state, everyone, name, now_s)
            plan = policy.plan(situation)
            if plan is None:
                self.planned, self._free_until_s = None, now_s + REFRESH_S
                return EVERYTHING
            planned = self.planned = Planned(state, policy.deciding, plan, situation, now_s)
            load = situation.loads[name]
        planned.plan.update(name, load)
        share = Share(planned, name, load, most_placed=planned.most_placed())
        return Choice(decision=share, mean_tokens=planned.mean_tokens, shown=share.shown)


class Planned:
    """A plan, and how far down the queue it got."""

    def __init__(self, state: RunState, policy: DispatchPolicy, plan: Plan, situation: Situation, now_s: float) -> None:
        self.plan = plan
        self._policy, self._made_s = policy, now_s
        self.order = policy.order
        self.mean_tokens = situation.mean_tokens
        self._num_members = len(situation.loads)
        self._version = (state.run.history, state.run.policy_version)
        self.cursor: Rank = ()
        self.known: set[int] = set()
        """Groups that were placed, as far as there was room."""
        self.unplaced: dict[int, int] = {}
        """Of these, samples for which there was none."""

    def most_placed(self) -> int:
        """How many samples the next ask may place."""
        if self._num_members <= MANY:
            return MAX_PLACED
        return MAX_PLACED // 2 if self.known else MAX_PLACED // 16

    def is_over(self, state: RunState, policy: DispatchPolicy, now_s: float) -> bool:
        """Whether it is time for another one."""
        age_s = now_s - self._made_s
        least_s = max(REFRESH_S, MEMBER_S * self._num_members)
        return (
            age_s >= max(least_s, PLACED_S * self.plan.num_placed)
            or (age_s >= least_s and any(self.news(state)))
            or policy.deciding is not self._policy
            or (state.run.history, state.run.policy_version) != self._version
        )

    def news(self, state: RunState) -> Iterator[Rank]:
        """What came to the front of the queue since that was placed."""
        for rank in state.queued_in(self.order).after((), NUM_NOTICED):
            if rank < self.cursor and rank[-1] not in self.known:
                yield rank

    def should_help(self, state: RunState, name: str) -> bool:
        """Whether the part of the queue that this generator takes from is done while the other is not."""
        plan = self.plan
        return plan.knows(name) and not plan.has_kept(name) and plan.is_outdated(name, state.queued_lengths)


class Share:
    """A `Decision`: what one generator gets when it asks."""

    def __init__(self, planned: Planned, name: str, load: Load, *, most_placed: int) -> None:
        self._most_placed = most_placed
        self._planned, self._plan, self._name, self._load = planned, planned.plan, name, load
        self._at = 0
        """The group that is shown now."""
        self._was_offered = False
        self._is_cut = False

    @property
    def is_done(self) -> bool:
        """See `Decision`."""
        return self._load.room == 0

    @property
    def is_cut(self) -> bool:
        """Whether there was more to place than one ask may."""
        return self._is_cut

    def take(self, work: Work, most: int) -> int:
        """See `Decision`."""
        self._was_offered = True
        most = min(most, self._plan.num_kept(self._name, self._at), work.num_samples, self._load.room)
        num_taken = 0
        while num_taken < most and not self._plan.is_sooner_elsewhere(self._name, self._load, work):
            self._load.add(work.remaining_tokens, work.context_tokens)
            num_taken += 1
        if num_taken or not most:
            self._plan.release(self._name, self._at)
        return num_taken

    def shown(self, state: RunState) -> Iterator[int]:
        """The groups of which it gets something, by sequence: what was kept for it, then what is placed on it now."""
        for rank in list(self._planned.news(state)):
            # There may be more of it further down.
            self._planned.cursor = ()
            if self._place(state, rank):
                yield from self._show(rank[-1])
        for sequence in self._plan.kept(self._name):
            yield from self._show(sequence)
        for sequence in self._placed(state):
            yield from self._show(sequence)

    def _show(self, sequence: int) -> Iterator[int]:
        self._at, self._was_offered = sequence, False
        yield sequence
        if not self._was_offered and (count := self._plan.release(self._name, sequence)):
            # It may not have them: others may.
            self._planned.unplaced[sequence] = self._planned.unplaced.get(sequence, 0) + count

    def _placed(self, state: RunState) -> Iterator[int]:
        """Place on, until this generator is full or there is nothing to place."""
        planned, plan = self._planned, self._plan
        first = plan.num_placed
        for sequence in list(planned.unplaced)[:MAX_TRIED_AGAIN]:
            if plan.num_placed - first >= self._most_placed:
                self._is_cut = True
                return
            if self._place_again(state, sequence):
                yield sequence
        num_scanned = 0
        while page := state.queued_in(planned.order).after(planned.cursor, _PAGE):
            for rank in page:
                if not plan.is_open or not plan.has_room(self._name) or not self._may_follow(rank):
                    return
                if num_scanned >= MAX_GROUPS_SCANNED or plan.num_placed - first >= self._most_placed:
                    self._is_cut = True
                    return
                planned.cursor = rank
                if rank[-1] not in planned.known:
                    num_scanned += 1
                    if self._place(state, rank):
                        yield rank[-1]

    def _may_follow(self, rank: Rank) -> bool:
        """Whether the generator may take anything from here on; new groups come last."""
        return self._load.may_start or rank[0] < NEW_RANK

    def _place(self, state: RunState, rank: Rank) -> int:
        """Place a group's samples; how many are kept for this generator."""
        planned, sequence = self._planned, rank[-1]
        planned.known.add(sequence)
        work = self._work(state, sequence)
        if work is None:
            return 0
        num_placed = self._plan.place(sequence, work, is_new=rank[0] >= NEW_RANK, asking=self._name)
        if num_placed < work.num_samples:
            planned.unplaced[sequence] = work.num_samples - num_placed
        return self._plan.num_kept(self._name, sequence)

    def _place_again(self, state: RunState, sequence: int) -> int:
        """Place what there was no room for; how many are kept for this generator now."""
        planned = self._planned
        num_left = planned.unplaced[sequence]
        work = self._work(state, sequence, most=num_left)
        num_placed = 0
        if work is not None:
            group = state.groups.at(sequence)
            is_new = group is not None and generation.is_new(state, group)
            num_placed = self._plan.place(sequence, work, is_new=is_new, asking=self._name)
        if work is None or num_placed >= work.num_samples:
            del planned.unplaced[sequence]
        else:
            planned.unplaced[sequence] = work.num_samples - num_placed
        return self._plan.num_kept(self._name, sequence)

    def _work(self, state: RunState, sequence: int, most: int | None = None) -> Work | None:
        group = state.groups.at(sequence)
        return None if group is None else generation.work_of(group, self._planned.mean_tokens, most)
