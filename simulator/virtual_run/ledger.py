"""Keeps the records of a simulated run: which samples may start, and which groups go to the trainer.

The rules are the broker's own: `admission` and the staleness policy decide what starts, `batching` what is trained on,
`staleness` until when, and a queued group's rank in which order. Only the bookkeeping around them is lean, so that a
million samples take seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.v1 import broker_pb2
from services.broker.dispatch.situation import QueuedGroup, Rank
from services.broker.rules.admission import AdmissionRule
from services.broker.rules.batching import ReadyGroup, StepView, choose
from services.broker.rules.limits import Limits
from services.broker.rules.sample_policy import Policy
from services.broker.rules.staleness import deadline, staleness

DrawGroup = Callable[[int], Sequence[float]]
"""True completion lengths of a new group's samples in tokens, at a policy version."""
Forecast = Callable[[Sequence[float]], float]


@dataclass(slots=True)
class Group:
    """The samples of a prompt."""

    sequence: int
    lengths: Sequence[float]
    forecast: float = 0.0
    min_version: int = 0
    num_open: int = 0
    """Unfinished samples."""

    @property
    def num_tokens(self) -> float:
        """Completion tokens of all samples."""
        return sum(self.lengths)


@dataclass(slots=True)
class Sample:
    """A sample leased to a generator."""

    group: Group
    remaining_tokens: float
    num_done: float = 0.0
    """Tokens decoded before it arrived."""
    moved_s: float = -math.inf
    """When it last moved between generators."""

    def after(self, num_tokens: float, *, moved_s: float = -math.inf) -> Sample:
        """The rest after this many more accepted tokens."""
        left = max(1.0, self.remaining_tokens - num_tokens)
        return Sample(self.group, left, self.num_done + num_tokens, moved_s)


Choice = Callable[[Group, int, float, int], int]
"""A dispatch decision for one generator, shown the queue in order: how many of a group's samples it gets, from their
number, the tokens that each has already and the most that it may get."""


class Ledger:
    """The records of a run; see the module.

    Args:
        limits: Groups of a step, samples of a group and staleness bound.
        draw: Makes groups; the supply of prompts is unlimited.
        forecast: Forecast of a group's lengths; None serves prompts in order.
    """

    def __init__(self, limits: Limits, draw: DrawGroup, forecast: Forecast | None) -> None:
        self.limits = limits
        self._policy = Policy.from_proto(broker_pb2.RunPolicy(), limits)
        self._draw, self._forecast = draw, forecast
        self.version = 0
        self.num_started = 0
        """Groups started and not yet trained."""
        self.num_begun = 0
        self.num_trained = 0
        self.staleness: Counter[int] = Counter()
        """Trained groups by their age in versions."""
        self.num_returned = 0
        """Samples returned from lost generators."""
        self.last_trained: list[Group] = []
        """Trained groups of the newest step."""
        self._sequence = 0
        self._queue: list[Group] = []
        """Waiting groups, the next one last."""
        self._queued_tokens = 0.0
        self._siblings: list[Sample] = []
        self._due: Counter[int] = Counter()
        self._ready: dict[str, tuple[ReadyGroup, Group]] = {}
        self._delivered: list[Group] = []

    def take(self, generator_version: int, most: int) -> list[Sample]:
        """Up to `most` samples for a generator: the oldest first, then new groups as admission allows."""
        taken: list[Sample] = []
        while len(taken) < most:
            if not self._siblings and not self._start(generator_version):
                break
            if not self._may_join(self._siblings[-1].group, generator_version):
                # Weights older than those it started with would make the group older, so it is left to others.
                break
            count = min(most - len(taken), len(self._siblings))
            taken += reversed(self._siblings[-count:])
            del self._siblings[-count:]
        return taken

    @property
    def queued_tokens(self) -> float:
        """Forecast completion tokens of everything a generator may take."""
        return self._queued_tokens + sum(sample.group.forecast for sample in self._siblings)

    def choose(self, generator_version: int, most: int, choice: Choice) -> list[Sample]:
        """As `take`, but only what dispatch gives this generator; the rest stays for others."""
        taken: list[Sample] = []
        for index in reversed(range(len(self._siblings))):
            sample = self._siblings[index]
            if len(taken) == most or not self._may_join(sample.group, generator_version):
                continue
            if choice(sample.group, 1, sample.num_done, 1):
                taken.append(self._siblings.pop(index))
        index = len(self._queue) - 1
        while index >= 0 and len(taken) < most and self._may_start(generator_version):
            group = self._queue[index]
            count = choice(group, len(group.lengths), 0.0, most - len(taken))
            if count:
                samples = self._begin(self._queue.pop(index), generator_version)
                taken += samples[:count]
                self._siblings += reversed(samples[count:])
            index -= 1
        return taken

    def has_work(self, generator_version: int) -> bool:
        """Whether there is anything that a generator may take; queues what it may start."""
        num_more = self._rule().max_started(self.version) - self.num_started
        if len(self._queue) < min(num_more, self.limits.groups_per_step):
            self._draw_step()
        return bool(self._siblings) or self._may_start(generator_version)

    def give_back(self, samples: Sequence[Sample]) -> None:
        """Requeue the samples of a lost generator; their tokens are kept."""
        self.num_returned += len(samples)
        self._siblings += samples

    def finish(self, sample: Sample) -> None:
        """Record the end of a sample."""
        group = sample.group
        group.num_open -= 1
        if group.num_open == 0:
            name = str(group.sequence)
            ready = ReadyGroup(
                group_id=name,
                deadline=deadline(version=group.min_version, max_staleness=self.limits.max_staleness),
                sequence=group.sequence,
                num_groups=1,
                num_tokens=round(group.num_tokens),
            )
            self._ready[name] = (ready, group)

    @property
    def num_ready(self) -> int:
        """Groups that wait for the trainer."""
        return len(self._ready)

    @property
    def num_delivered(self) -> int:
        """Groups that the trainer works on."""
        return len(self._delivered)

    @property
    def num_missing(self) -> int:
        """Groups that the step still needs."""
        return self.limits.groups_per_step - self.num_delivered

    def deliver(self, *, at_least: int) -> list[Group]:
        """The groups that batching delivers now; none if they are fewer than `at_least`."""
        if len(self._ready) < at_least:
            return []
        view = StepView(
            limits=self.limits,
            policy_version=self.version,
            num_delivered=self.num_delivered,
            num_due=self._due[self.version] if self._policy.stale.keeps_places else 0,
        )
        ready = [ready for ready, _ in self._ready.values()]
        chosen = choose(ready, view, max_groups=self.num_missing, target_tokens=0)
        if len(chosen) < at_least:
            return []
        groups = [self._ready.pop(name)[1] for name, _ in chosen]
        for group in groups:
            self._due[deadline(version=group.min_version, max_staleness=self.limits.max_staleness)] -= 1
        self._delivered += groups
        return groups

    def acknowledge(self) -> None:
        """Finish the step: its groups are trained, and the policy version rises."""
        self.num_started -= self.num_delivered
        self.num_trained += self.num_delivered
        for group in self._delivered:
            self.staleness[staleness(policy_version=self.version, version=group.min_version)] += 1
        self.last_trained, self._delivered = self._delivered, []
        self.version += 1

    def audit(self) -> dict[str, int | bool]:
        """Groups started, trained and in flight, counted independently; balanced if none is lost or duplicated."""
        in_flight = sum(self._due.values()) + self.num_delivered
        return {
            "num_begun": self.num_begun,
            "num_trained": self.num_trained,
            "num_in_flight": in_flight,
            "is_balanced": self.num_begun == self.num_trained + in_flight and in_flight == self.num_started,
        }

    def _start(self, generator_version: int) -> bool:
        """Start the next group, if admission allows."""
        if not self._may_start(generator_version):
            return False
        self._siblings = self._begin(self._next(), generator_version)[::-1]
        return True

    def _rule(self) -> AdmissionRule:
        return AdmissionRule(
            limits=self.limits, policy=self._policy, policy_version=self.version, num_started=self.num_started
        )

    def _may_join(self, group: Group, generator_version: int) -> bool:
        return self._policy.stale.may_join(group=group.min_version, generator=generator_version)

    def _may_start(self, generator_version: int) -> bool:
        verdict = self._rule().judge(generator_version=generator_version, min_version=None, prompt_min_version=None)
        return verdict.is_allowed

    def _begin(self, group: Group, generator_version: int) -> list[Sample]:
        self._queued_tokens -= group.forecast * len(group.lengths)
        group.min_version, group.num_open = generator_version, len(group.lengths)
        self.num_started += 1
        self.num_begun += 1
        self._due[deadline(version=generator_version, max_staleness=self.limits.max_staleness)] += 1
        return [Sample(group, length) for length in group.lengths]

    def _next(self) -> Group:
        if self._forecast is None:
            return self._drawn()
        if not self._queue:
            self._draw_step()
        return self._queue.pop()

    def _draw_step(self) -> None:
        """Prompts of a step, after those already queued."""
        assert self._forecast is not None, "without forecasts prompts begin as they come"
        ranked: list[tuple[Rank, Group]] = []
        for _ in range(self.limits.groups_per_step):
            group = self._drawn()
            group.forecast = self._forecast(group.lengths)
            place = QueuedGroup(
                sequence=group.sequence, is_evaluation=False, is_started=False, predicted_tokens=group.forecast
            )
            ranked.append((place.rank_by_length(self.limits.groups_per_step), group))
            self._queued_tokens += group.forecast * len(group.lengths)
        ranked.sort(key=lambda each: each[0], reverse=True)
        self._queue = [group for _, group in ranked] + self._queue

    def _drawn(self) -> Group:
        self._sequence += 1
        return Group(self._sequence, self._draw(self.version))
