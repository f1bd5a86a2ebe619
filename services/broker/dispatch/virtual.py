"""A look ahead: when a policy would be done with the situation at hand, by the latency model, on a virtual clock. Pure.

Samples of like length are bundled, and each bundle is spread over the quantiles of the error that forecasts showed so
far, so that a policy is not preferred for trusting its forecasts too much. The policy under test sees forecasts only,
and answers through `decide` as it does for real generators.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from services.broker.dispatch.latency import Load
from services.broker.dispatch.lengths import LengthCounts
from services.broker.dispatch.types import DispatchPolicy, Order, Situation, Work

MAX_ROUNDS = 8
"""A longer queue is shortened in proportion to this many fillings of the fleet: its end is too far to plan for."""
MIN_ERROR = 0.02
_QUANTILES = (-1.383, -0.674, -0.21, 0.21, 0.674, 1.383)
"""Of the normal distribution, in the middle of each sixth."""
_BUNDLES_PER_DOUBLING = 3
LEFT_FOR_EVENTS = 16
"""A generator that was left without work is asked again after so many samples or bundles ended."""


@dataclass(slots=True)
class _Bundle:
    """Samples of one forecast and one true length."""

    predicted: float
    """0 where there is none."""
    tokens: float
    count: int


@dataclass(slots=True)
class _Generator:
    """One generator on the virtual clock. Steps count from its start: a sample begun at step s ends at s + length."""

    load: Load
    """Model and room; what it holds is below."""
    context_tokens: float
    """KV tokens of a sample, on average."""
    step: float = 0.0
    clock_s: float = 0.0
    num_samples: int = 0
    events_left: int = 0
    """Ends until it is asked again."""
    ends: list[tuple[float, int, int, float]] = field(default_factory=list)
    """Heap of true end step, a number that breaks ties, count, forecast end step."""

    def begin(self, tokens: float, expected: float, count: int, number: int) -> None:
        """Take samples."""
        heapq.heappush(self.ends, (self.step + tokens, number, count, self.step + expected))
        self.num_samples += count

    @property
    def step_s(self) -> float:
        """Time of a decode step with what it holds."""
        return self.load.model.step_s(self.num_samples, self.num_samples * self.context_tokens)

    @property
    def next_end_s(self) -> float:
        """When its next sample ends; infinite when it holds none."""
        return self.clock_s + (self.ends[0][0] - self.step) * self.step_s if self.ends else math.inf

    def advance(self, now_s: float) -> None:
        """Decode until then, and let go of what is done."""
        if self.ends:
            self.step += (now_s - self.clock_s) / self.step_s
        self.clock_s = now_s
        while self.ends and self.ends[0][0] <= self.step + 1e-6:
            self.num_samples -= heapq.heappop(self.ends)[2]

    def seen(self) -> Load:
        """Its load by the forecasts."""
        to_go = [(max(end - self.step, 1.0), count) for _, _, count, end in self.ends]
        sum_tokens = sum(tokens * count for tokens, count in to_go)
        return replace(
            self.load,
            num_samples=self.num_samples,
            max_leases=self.load.max_samples - self.num_samples,
            longest_tokens=max((tokens for tokens, _ in to_go), default=0.0),
            shortest_tokens=min((tokens for tokens, _ in to_go), default=0.0),
            sum_tokens=sum_tokens,
            sum_kv_tokens=sum_tokens * self.context_tokens,
        )


def finish_s(policy: DispatchPolicy, situation: Situation) -> float:
    """When everything queued and under way would be done under a policy: seconds from now."""
    return _Run(policy, situation).finish_s()


class _Run:
    """One look ahead."""

    def __init__(self, policy: DispatchPolicy, situation: Situation) -> None:
        self._policy = policy
        self._situation = situation
        self._number = 0
        context_tokens = situation.mean_tokens / 2
        self._generators: dict[str, _Generator] = {}
        for name, load in situation.loads.items():
            generator = self._generators[name] = _Generator(load, context_tokens)
            for tokens, count in _held(load):
                self._begin(generator, _Bundle(tokens, tokens, count), count)
        self._queue = _bundles(situation)
        if policy.order is Order.LENGTH:
            self._queue.sort(key=lambda bundle: -bundle.predicted)
        else:
            random.Random(0).shuffle(self._queue)

    def finish_s(self) -> float:
        now_s = 0.0
        generators = list(self._generators.values())
        while True:
            self._lease()
            end_s = min(generator.next_end_s for generator in generators)
            if end_s == math.inf:
                if not self._queue:
                    return now_s
                if all(generator.events_left == LEFT_FOR_EVENTS for generator in generators):
                    # Nothing under way, and nobody takes what is left.
                    return math.inf
                for generator in generators:
                    generator.events_left = 0
                continue
            now_s = end_s
            for generator in generators:
                generator.advance(now_s)

    def _lease(self) -> None:
        for name, generator in self._generators.items():
            if not self._queue:
                return
            generator.events_left -= 1
            if generator.num_samples < generator.load.max_samples and generator.events_left <= 0:
                self._lease_to(name, generator)

    def _lease_to(self, name: str, generator: _Generator) -> None:
        room = room_before = generator.load.max_samples - generator.num_samples
        decision = self._policy.decide(self._seen(name))
        for bundle in list(self._queue):
            if decision.is_done or room == 0:
                break
            expected = bundle.predicted or self._situation.mean_tokens
            work = Work(
                num_samples=bundle.count,
                context_tokens=0.0,
                length_tokens=bundle.predicted,
                remaining_tokens=expected,
            )
            num_taken = decision.take(work, room)
            if num_taken:
                room -= num_taken
                self._begin(generator, bundle, num_taken)
                bundle.count -= num_taken
        if room == room_before:
            generator.events_left = LEFT_FOR_EVENTS
        self._queue = [bundle for bundle in self._queue if bundle.count]

    def _begin(self, generator: _Generator, bundle: _Bundle, count: int) -> None:
        self._number += 1
        generator.begin(bundle.tokens, bundle.predicted or self._situation.mean_tokens, count, self._number)

    def _seen(self, asking: str) -> Situation:
        queue = LengthCounts()
        for bundle in self._queue:
            queue.add(bundle.predicted, bundle.count)
        loads = {name: generator.seen() for name, generator in self._generators.items()}
        return replace(self._situation, asking=asking, loads=loads, queue=queue)


def _bundles(situation: Situation) -> list[_Bundle]:
    """The queue, shortened to MAX_ROUNDS, its forecasts spread over their error."""
    capacity = sum(load.max_samples for load in situation.loads.values())
    share = min(1.0, MAX_ROUNDS * capacity / max(1, situation.queue.num_samples))
    bundles: list[_Bundle] = []
    for predicted, count in _coarse(situation.queue):
        parts = _spread(max(1, round(share * count)))
        for quantile, part in parts:
            expected = predicted or situation.mean_tokens
            tokens = expected * math.exp(quantile * situation.length_error)
            bundles.append(_Bundle(predicted, max(1.0, min(tokens, situation.max_tokens)), part))
    return bundles


def _coarse(counts: LengthCounts) -> Iterator[tuple[float, int]]:
    """The lengths in fewer steps, each at the mean of its samples."""
    sums: dict[int, tuple[float, int]] = {}
    for length, count in counts.items():
        key = round(_BUNDLES_PER_DOUBLING * math.log2(length)) if length else -1
        total, number = sums.get(key, (0.0, 0))
        sums[key] = (total + length * count, number + count)
    for total, number in sums.values():
        yield total / number, number


def _spread(count: int) -> Sequence[tuple[float, int]]:
    """Quantiles, and how many of `count` samples stand for each."""
    if count >= len(_QUANTILES):
        sizes = [count // len(_QUANTILES) + (index < count % len(_QUANTILES)) for index in range(len(_QUANTILES))]
        return list(zip(_QUANTILES, sizes, strict=True))
    # Evenly over the quantiles, so that few samples are neither all short nor all long.
    stride = len(_QUANTILES) / count
    return [(_QUANTILES[int((index + 0.5) * stride)], 1) for index in range(count)]


def _held(load: Load) -> Iterator[tuple[float, int]]:
    """Tokens to go of what a generator holds: its longest sample, the rest even around their mean."""
    if not load.num_samples:
        return
    yield load.longest_tokens, 1
    rest = load.num_samples - 1
    if rest:
        mean = max(1.0, (load.sum_tokens - load.longest_tokens) / rest)
        low = rest // 2
        if low:
            yield mean / 2, low
        yield mean if not low else mean * (rest - low / 2) / (rest - low), rest - low
