"""A plan: every queued sample, in the policy's order, to the generator that is done with it first. Pure.

One plan serves all generators that ask for a while: what it placed on one is kept for that one until it asks, and each
ask places on from where the last one stopped. A sample is placed once, so that what a lease costs does not depend on
the number of generators. What a generator gets is what `placing.EarliestFinish` would give it, which places the whole
queue anew for every ask: where the one that asks is as soon as others it is preferred, and it leaves a sample to faster
generators that would be done with it, or with the whole queue, sooner.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from services.broker.dispatch.alike import Alike
from services.broker.dispatch.latency import LatencyModel, Load, level_s, token_s
from services.broker.dispatch.lengths import LengthCounts
from services.broker.dispatch.placing import MIN_GAIN, MIN_SPEED_UP, USUAL_RISK
from services.broker.dispatch.types import Situation, Work

MAX_FASTER = 64
"""Faster generators that are asked whether a sample is done sooner there; of more, those that are done first."""


@dataclass(frozen=True, slots=True)
class Split:
    """Two parts of the generators, each for samples of its own; see `streamrl`."""

    threshold: float
    """A longer forecast is of the long tail."""
    long_tail_ids: frozenset[str]


_Kind = tuple[LatencyModel, float, bool, bool | None]
"""What generators have in common that are indexed together: model, longest context, whether it may start groups, and
the part it is of, None where it takes of both."""


@dataclass(slots=True)
class _Member:
    """A generator."""

    number: int
    load: Load
    """What it holds and what is kept for it."""
    part: bool | None
    """The part of the fleet it is in; None where it takes of both."""
    alike: Alike
    """Those it is indexed with."""
    kept: dict[int, tuple[int, Work]]
    """By sequence of the group: samples placed here, and as what."""


@dataclass(frozen=True, slots=True)
class _Faster:
    """The generators that are faster than one."""

    level_s: float
    """When they could have done the whole queue."""
    members: list[_Member]


class Plan:
    """See the module.

    Args:
        situation: The fleet and the queue now.
        risk: See `placing`.
        split: Where the long tail is decoded apart.
    """

    def __init__(self, situation: Situation, *, risk: float = USUAL_RISK, split: Split | None = None) -> None:
        self._risk = math.exp(risk * situation.length_error)
        self._split = split
        self._mean_tokens = situation.mean_tokens
        self._idle_parts, self._queued_tokens = self._parts(situation.queue)
        self._members: dict[str, _Member] = {}
        self._names: list[str] = []
        self._kinds: dict[_Kind, Alike] = {}
        self._faster: dict[tuple[float, bool | None], _Faster] = {}
        self._ends: list[tuple[float, float, float, str]] = []
        """Time of a token, end and rate of each generator before anything was placed, and which it is; empty where all
        are alike."""
        self.num_placed = 0
        for name, load in situation.loads.items():
            self.update(name, load)
        if len({kind[0] for kind in self._kinds}) > 1:
            self._ends = [_end(name, load) for name, load in situation.loads.items()]

    @property
    def num_tried(self) -> int:
        """Generators looked at so far."""
        return sum(alike.num_tried for alike in self._kinds.values())

    @property
    def is_open(self) -> bool:
        """Whether any generator has room for more."""
        return any(self._kinds.values())

    def knows(self, name: str) -> bool:
        """Whether the generator is in it."""
        return name in self._members

    def has_room(self, name: str) -> bool:
        """Whether the generator could take more than is kept for it."""
        return self._members[name].load.room > 0

    def has_kept(self, name: str) -> bool:
        """Whether anything is kept for the generator."""
        return bool(self._members[name].kept)

    def update(self, name: str, load: Load) -> None:
        """What a generator holds now; what is kept for it stays."""
        member = self._members.get(name)
        part = self._part(name)
        alike = self._alike((load.model, load.max_context_tokens, load.may_start, part))
        load = load.copy()
        if member is None:
            member = self._members[name] = _Member(len(self._names), load, part, alike, {})
            self._names.append(name)
        else:
            member.alike.discard(member.number)
        for count, work in member.kept.values():
            load.add(work.remaining_tokens, work.context_tokens, count)
        member.load, member.alike = load, alike
        if load.room:
            alike.put(member.number, load)

    def place(self, sequence: int, work: Work, *, is_new: bool, asking: str) -> int:
        """Place a group's samples, but those that wait for a generator that is full; how many. See `kept`."""
        part = None if self._split is None else work.length_tokens > self._split.threshold
        kinds = [
            alike
            for kind, alike in self._kinds.items()
            if len(alike)
            and work.context_tokens < kind[1]
            and (kind[2] or not is_new)
            and (part is None or kind[3] is None or kind[3] == part)
        ]
        own, number = self._members[asking].alike, self._members[asking].number
        kinds.sort(key=lambda alike: alike is not own)
        for index in range(work.num_samples):
            best_s, best = math.inf, None
            for alike in kinds:
                preferred = number if alike is own else None
                end_s, found = alike.first_done(
                    work.remaining_tokens, work.context_tokens, risk=self._risk, before_s=best_s, asking=preferred
                )
                if found is not None:
                    best_s, best = end_s, found
            if best is None:
                return index
            name = self._names[best]
            if self.is_sooner_elsewhere(name, self._members[name].load, work):
                # It waits for one that is full now.
                return index
            self._keep(self._members[name], sequence, work)
            self.num_placed += 1
        return work.num_samples

    def _keep(self, member: _Member, sequence: int, work: Work) -> None:
        count, _ = member.kept.get(sequence, (0, work))
        member.kept[sequence] = (count + 1, work)
        member.load.add(work.remaining_tokens, work.context_tokens)
        if member.load.room:
            member.alike.put(member.number, member.load)
        else:
            member.alike.discard(member.number)

    def kept(self, name: str) -> list[int]:
        """Sequences of the groups of which samples are kept for a generator, in the order in which they were placed."""
        return list(self._members[name].kept)

    def num_kept(self, name: str, sequence: int) -> int:
        """How many samples of a group are kept for a generator."""
        return self._members[name].kept.get(sequence, (0, None))[0]

    def release(self, name: str, sequence: int) -> int:
        """What is kept of the group for the generator no longer is, as it has it or may not have it; how many."""
        count, _ = self._members[name].kept.pop(sequence, (0, None))
        return count

    # -- what is left to faster generators -----------------------------------------------------------------------------

    def is_sooner_elsewhere(self, name: str, load: Load, work: Work) -> bool:
        """Whether a generator with this load should leave a sample to faster ones, whether they have room or not."""
        faster = self._faster_than(self._members[name]) if self._ends else None
        if faster is None or not faster.members:
            return False
        remaining, context = self._risk * work.remaining_tokens, work.context_tokens
        here_s = (1 - MIN_GAIN) * load.sample_s(remaining, context)
        if faster.level_s >= here_s:
            return False
        return any(
            other.load.later_s(remaining, context) < here_s
            for other in faster.members
            if context < other.load.max_context_tokens
        )

    def _faster_than(self, member: _Member) -> _Faster:
        speed, part = token_s(member.load), member.part
        found = self._faster.get((speed, part))
        if found is None:
            ends = [end for end in self._ends if end[0] < (1 - MIN_SPEED_UP) * speed and self._is_beside(part, end[3])]
            ends.sort(key=lambda end: end[1])
            found = self._faster[speed, part] = _Faster(
                _level_s(ends, self._queued_tokens[part]), [self._members[name] for *_, name in ends[:MAX_FASTER]]
            )
        return found

    def _is_beside(self, part: bool | None, name: str) -> bool:
        return part is None or self._members[name].part == part

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _parts(self, queue: LengthCounts) -> tuple[frozenset[bool], dict[bool | None, float]]:
        """The parts of which nothing is queued, and the tokens that are, by part and in all."""
        tokens: dict[bool | None, float] = {None: queue.sum_tokens(self._mean_tokens)}
        if self._split is None:
            return frozenset(), tokens
        long, regular = queue.parted(self._split.threshold)
        for part, lengths in ((True, long), (False, regular)):
            tokens[part] = lengths.sum_tokens(self._mean_tokens)
        return frozenset(part for part, lengths in ((True, long), (False, regular)) if not lengths.num_samples), tokens

    def _part(self, name: str) -> bool | None:
        """The part of a generator; None where it takes of both, as nothing is queued of its own."""
        if self._split is None or not self._split.long_tail_ids:
            return None
        part = name in self._split.long_tail_ids
        return None if part in self._idle_parts else part

    def is_outdated(self, name: str, queue: LengthCounts) -> bool:
        """Whether the generator's part of the queue is done, so that it should help with the other one."""
        part = self._members[name].part
        if part is None or self._split is None:
            return False
        return not queue.parted(self._split.threshold)[0 if part else 1].num_samples

    def _alike(self, kind: _Kind) -> Alike:
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = Alike(kind[0])
        return found


def _end(name: str, load: Load) -> tuple[float, float, float, str]:
    return token_s(load), load.finish_s(), load.tokens_per_second, name


def _level_s(ends: Iterable[tuple[float, float, float, str]], num_tokens: float) -> float:
    return level_s(((end_s, rate) for _, end_s, rate, _ in ends), num_tokens)
