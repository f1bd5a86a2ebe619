"""Places samples over a whole fleet, each on the generator that finishes it first. Pure.

Those with free capacity are indexed (`alike`), so that a placement costs the same in a large fleet as in a small one.
A sample waits for a faster generator, full or not, if those that are faster could have finished the whole queue before
this one has decoded the sample. Only faster ones are compared, so some generator always takes queued work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from services.broker.dispatch.dealing.alike import Alike
from services.broker.dispatch.latency import LatencyModel, Load, level_s, token_s
from services.broker.dispatch.length_histogram import LengthCounts
from services.broker.dispatch.situation import Rule, Work

MIN_SPEED_UP = 0.1
"""Generators that differ by less count as equal."""
MIN_GAIN = 0.05
"""A sample is left to a busy generator only if that is sooner by this fraction: the model is no more accurate."""
MAX_FASTER = 64
"""Faster generators that may be waited for; of more, those that finish first."""


@dataclass(slots=True, eq=False)
class Kind:
    """Generators that are indexed together, and what they have in common."""

    max_context_tokens: float
    policy_version: int
    is_long_tail: bool
    """The part it decodes; False if nothing is separated."""
    open: Alike
    """Those with room."""


@dataclass(slots=True, eq=False)
class Member:
    """A generator of the table."""

    name: str
    number: int
    kind: Kind
    load: Load
    """Its load, with the samples placed on it."""
    model: LatencyModel
    """The load's when it was indexed."""
    is_here: bool
    """Whether it may be given leases; a sample placed on any other one is left to it."""
    seen: tuple[int, int, float]
    """Samples, leases and sum of tokens of its load when it was indexed."""

    def is_same(self, load: Load, policy_version: int, *, is_here: bool) -> bool:
        """Whether it is indexed by exactly this."""
        return (
            load is self.load
            and (load.num_samples, load.max_leases, load.sum_tokens) == self.seen
            and policy_version == self.kind.policy_version
            and is_here == self.is_here
            and load.model is self.model
        )


class Table:
    """See the module.

    Args:
        rule: How the policy deals.
        length_error: Standard deviation of the logarithm of true length over forecast.
    """

    def __init__(self, rule: Rule, *, length_error: float) -> None:
        self.rule, self.length_error = rule, length_error
        self._risk = math.exp(rule.risk * length_error)
        self._members: dict[str, Member] = {}
        self._by_number: list[Member] = []
        self._kinds: dict[tuple[LatencyModel, float, int, bool], Kind] = {}
        self._open_here: set[int] = set()
        self._queued_tokens: dict[bool, float] = {}
        """Of the long tail (True) and of the rest; all is of the rest if nothing is separated."""
        self._do_all_help = False
        self._faster: dict[tuple[float, bool], tuple[float, list[Member]]] = {}
        """By time per token and part: the faster generators, and when they could have finished the queue."""

    @property
    def kinds(self) -> Iterable[Kind]:
        """The kinds of all generators that were in it."""
        return self._kinds.values()

    @property
    def is_open(self) -> bool:
        """Whether a generator that may be given leases has room."""
        return bool(self._open_here)

    @property
    def is_sparse(self) -> bool:
        """Whether most of the generators that ever were in it are gone."""
        return len(self._by_number) > 2 * len(self._members) + 64

    @property
    def num_tried(self) -> int:
        """Generators looked at so far."""
        return sum(kind.open.num_tried for kind in self._kinds.values())

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def get(self, name: str) -> Member | None:
        """The generator of this name."""
        return self._members.get(name)

    def put(self, name: str, load: Load, *, policy_version: int, is_here: bool) -> Member:
        """Add a generator, or replace all that is known of it; the table keeps the load and adds to it."""
        kind = self._kind(load, policy_version, is_long_tail=name in self.rule.long_tail_ids)
        member = self._members.get(name)
        if member is None:
            number = len(self._by_number)
            member = self._members[name] = Member(name, number, kind, load, load.model, is_here, (0, 0, 0.0))
            self._by_number.append(member)
        else:
            member.kind.open.discard(member.number)
            member.kind, member.load, member.model, member.is_here = kind, load, load.model, is_here
        self.index(member)
        return member

    def _kind(self, load: Load, policy_version: int, *, is_long_tail: bool) -> Kind:
        key = (load.model, load.max_context_tokens, policy_version, is_long_tail)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = Kind(key[1], policy_version, is_long_tail, Alike(load.model))
        return kind

    def remove(self, name: str) -> None:
        """Remove a generator, if present."""
        member = self._members.pop(name, None)
        if member is not None:
            member.kind.open.discard(member.number)
            self._open_here.discard(member.number)

    def forget_unused_kinds(self) -> None:
        """Drop the kinds of which there is no generator any more."""
        used = {id(member.kind) for member in self}
        self._kinds = {key: kind for key, kind in self._kinds.items() if id(kind) in used}

    def index(self, member: Member) -> None:
        """Index a generator again after its load changed."""
        load = member.load
        member.seen = (load.num_samples, load.max_leases, load.sum_tokens)
        if member.load.room:
            member.kind.open.put(member.number, member.load)
        else:
            member.kind.open.discard(member.number)
        if member.load.room and member.is_here:
            self._open_here.add(member.number)
        else:
            self._open_here.discard(member.number)

    def see_queue(self, lengths: LengthCounts, mean_tokens: float) -> None:
        """Note what is queued: generators of a part of which nothing is queued help the other one.

        `mean_tokens` is the assumed length of a completion without a forecast.
        """
        if self.rule.long_tail_ids:
            long, regular = lengths.parted(self.rule.threshold)
            self.see_tokens(regular.sum_tokens(mean_tokens), long_tail=long.sum_tokens(mean_tokens))
        else:
            self.see_tokens(lengths.sum_tokens(mean_tokens))

    def see_tokens(self, num_tokens: float, *, long_tail: float = 0.0) -> None:
        """The same by tokens: of the long tail, if it is separated, and of the rest."""
        self._queued_tokens = {False: num_tokens}
        if self.rule.long_tail_ids:
            self._queued_tokens[True] = long_tail

    def let_all_help(self) -> None:
        """Until faster generators are measured again, let each part take the other one's work."""
        self._do_all_help = True

    def first_done(self, work: Work, kinds: Iterable[Kind]) -> Member | None:
        """The generator of these kinds with room that finishes one of these samples first.

        None without one, and where the sample should wait for a faster generator that is busy.
        """
        best = (math.inf, -1)
        for kind in self._of_part(work, kinds) if self.rule.long_tail_ids else kinds:
            best = kind.open.first_done(work.remaining_tokens, work.context_tokens, risk=self._risk, before=best)
        if best[1] < 0:
            return None
        member = self._by_number[best[1]]
        return None if self._is_sooner_elsewhere(member, work) else member

    def _of_part(self, work: Work, kinds: Iterable[Kind]) -> list[Kind]:
        """The kinds with room that decode samples of this length; if there is none, those that help.

        Helping at once would spoil what the parts are for: at the start of a step the long tail is dealt before the
        rest is, and its generators, idle from then on, would fill up with what the others have room for.
        """
        is_long_tail = work.length_tokens > self.rule.threshold
        open_kinds = [kind for kind in kinds if len(kind.open)]
        own = [kind for kind in open_kinds if kind.is_long_tail == is_long_tail]
        return own or [kind for kind in open_kinds if self._does_help(kind)]

    def _does_help(self, kind: Kind) -> bool:
        return self._do_all_help or not self._queued_tokens.get(kind.is_long_tail)

    def has_room_for(self, length_tokens: float) -> bool:
        """Whether a generator has room for samples of this forecast, by the part that they belong to."""
        if not self.rule.long_tail_ids:
            return True
        is_long_tail = length_tokens > self.rule.threshold
        return any(
            len(kind.open) and (kind.is_long_tail == is_long_tail or self._does_help(kind)) for kind in self.kinds
        )

    def add(self, member: Member, work: Work) -> None:
        """Place one of these samples on a generator."""
        member.load.add(work.remaining_tokens, work.context_tokens)
        self.index(member)

    # -- what is left to faster generators -----------------------------------------------------------------------------

    def measure_faster(self, versions: Set[int]) -> None:
        """Note which generators are much faster than others, and when they could have finished what is queued.

        Those that help another part are compared with the whole fleet.

        Args:
            versions: Those that may start groups: no work is left to others.
        """
        self._faster, self._do_all_help = {}, False
        for part, num_tokens in self._queued_tokens.items():
            is_helping = not num_tokens
            by_speed: dict[float, list[Member]] = {}
            for member in self:
                if is_helping or member.kind.is_long_tail == part:
                    by_speed.setdefault(token_s(member.load), []).append(member)
            fastest_s = min(by_speed, default=0.0)
            num_to_do = sum(self._queued_tokens.values()) if is_helping else num_tokens
            for speed in by_speed:
                if fastest_s < (1 - MIN_SPEED_UP) * speed:
                    self._faster[speed, part] = _faster_than(speed, by_speed, num_to_do, versions)

    def _is_sooner_elsewhere(self, member: Member, work: Work) -> bool:
        faster = self._faster.get((token_s(member.load), member.kind.is_long_tail)) if self._faster else None
        if faster is None:
            return False
        remaining, context = self._risk * work.remaining_tokens, work.context_tokens
        here_s = (1 - MIN_GAIN) * member.load.sample_s(remaining, context)
        return faster[0] < here_s and any(
            other.load.later_s(remaining, context) < here_s
            for other in faster[1]
            if context < other.load.max_context_tokens
        )


def _faster_than(
    speed: float, by_speed: Mapping[float, list[Member]], num_tokens: float, versions: Set[int]
) -> tuple[float, list[Member]]:
    found = [
        member
        for other, members in by_speed.items()
        if other < (1 - MIN_SPEED_UP) * speed
        for member in members
        if member.kind.policy_version in versions
    ]
    found.sort(key=lambda member: member.load.finish_s())
    return level_s((member.load for member in found), num_tokens), found[:MAX_FASTER]
