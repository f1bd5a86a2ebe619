"""Separates the predicted longest fifth from the rest, each part on its own generators. Pure.

The generators are ordered by how fast they decode one sample alone; the first of them become long-tail instances, as
many as make the later of the two parts end earliest. They hold few samples, so each of their steps is short. Inside a
part samples go longest first to the generator that finishes first. A generator whose part has nothing queued helps
the other one, as far as it finishes sooner than that part's own generators.

Source: StreamRL (Zhong et al. 2025), section 5.3, Algorithm 2, and 5.4. Differences: the split minimises the maximum of
the two times (they pass side by side), not their sum; the times come from the forecasts at hand rather than from P90
and P50 of past lengths; generators may differ; no generator stays idle beside a queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.broker.dispatch.latency import Load
from services.broker.dispatch.length_histogram import LengthCounts
from services.broker.dispatch.placing import EarliestFinish
from services.broker.dispatch.situation import Decision, Order, Situation, Work

LONG_TAIL_SHARE = 0.2
"""StreamRL's alpha."""
_NUM_HALVINGS = 40


class StreamRl:
    """See the module."""

    name = "streamrl"
    order = Order.LENGTH
    needs_situation = True

    def __init__(self) -> None:
        self.threshold = 0.0
        """A longer forecast belongs to the long tail."""
        self.long_tail_ids: frozenset[str] = frozenset()
        """The generators that currently decode the long tail; empty if nothing is separated."""
        self._split_for: frozenset[str] | None = None

    def review(self, situation: Situation) -> None:
        """Set the threshold, and split the generators again."""
        lengths = situation.queue.merged(situation.under_way)
        self.threshold = lengths.threshold(LONG_TAIL_SHARE)
        long, regular = situation.queue.parted(self.threshold)
        self.long_tail_ids = long_tail_instances(situation.loads, long, regular, situation.mean_tokens)
        self._split_for = frozenset(situation.loads)

    def decide(self, situation: Situation) -> Decision:
        """Place the asking generator's part of the queue; everything once that part is done."""
        if self._split_for != frozenset(situation.loads):
            self.review(situation)
        is_long_tail = situation.asking in self.long_tail_ids
        long, regular = situation.queue.parted(self.threshold)
        own = long if is_long_tail else regular
        if not self.long_tail_ids or not own.num_samples:
            return EarliestFinish.over_fleet(situation)
        asking = situation.loads[situation.asking]
        beside = [
            load
            for generator_id, load in situation.loads.items()
            if load is not asking and (generator_id in self.long_tail_ids) == is_long_tail
        ]
        placing = EarliestFinish(
            asking, beside, queued_tokens=own.sum_tokens(situation.mean_tokens), length_error=situation.length_error
        )
        return _OnePart(placing, threshold=self.threshold, is_long_tail=is_long_tail)


class _OnePart:
    """A `Decision` that skips the samples of the other part."""

    def __init__(self, placing: EarliestFinish, *, threshold: float, is_long_tail: bool) -> None:
        self._placing = placing
        self._threshold = threshold
        self._is_long_tail = is_long_tail

    @property
    def is_done(self) -> bool:
        """See `Decision`."""
        return self._placing.is_done

    def take(self, work: Work, most: int) -> int:
        """See `Decision`."""
        if (work.length_tokens > self._threshold) != self._is_long_tail:
            return 0
        return self._placing.take(work, most)


def long_tail_instances(
    loads: Mapping[str, Load], long: LengthCounts, regular: LengthCounts, mean_tokens: float
) -> frozenset[str]:
    """The generators to separate: those fastest alone, as many as make the later part end earliest.

    One part's time falls and the other's rises with their number, so bisection finds the best number.
    """
    by_speed = sorted(loads, key=lambda generator_id: (loads[generator_id].model.step_s(1), generator_id))
    if len(by_speed) < 2 or not long.num_samples or not regular.num_samples:
        return frozenset()
    ordered = [loads[generator_id] for generator_id in by_speed]

    def times_s(count: int) -> tuple[float, float]:
        return part_s(ordered[:count], long, mean_tokens), part_s(ordered[count:], regular, mean_tokens)

    least, most = 1, len(ordered) - 1
    while least < most:
        middle = (least + most) // 2
        long_s, regular_s = times_s(middle)
        least, most = (least, middle) if long_s <= regular_s else (middle + 1, most)
    best = min((count for count in (least - 1, least) if count), key=lambda count: max(times_s(count)))
    return frozenset(by_speed[:best])


def part_s(loads: Sequence[Load], lengths: LengthCounts, mean_tokens: float) -> float:
    """When these generators finish their load and samples of these lengths, all ending together.

    By bisection: what a generator can do by a given time follows from `Load.finish_s`.
    """
    longest = max((length or mean_tokens for length, _ in lengths.items()), default=0.0)
    num_tokens = lengths.sum_tokens(mean_tokens)
    low_s, high_s = 0.0, 1.0
    while sum(_tokens_by(load, high_s, longest) for load in loads) < num_tokens:
        low_s, high_s = high_s, 2 * high_s
    for _ in range(_NUM_HALVINGS):
        middle_s = (low_s + high_s) / 2
        if sum(_tokens_by(load, middle_s, longest) for load in loads) < num_tokens:
            low_s = middle_s
        else:
            high_s = middle_s
    return high_s


def _tokens_by(load: Load, by_s: float, longest: float) -> float:
    """Additional tokens that a generator can decode by then if one of its samples is the longest."""
    model = load.model
    left_s = by_s - model.base_s * max(load.longest_tokens, longest) - model.per_kv_token_s * load.sum_kv_tokens
    if left_s < 0:
        return 0.0
    per_token_s = model.per_sample_s + model.per_kv_token_s * longest / 2
    at_once = left_s / per_token_s if per_token_s else float("inf")
    in_turns = (by_s - model.per_kv_token_s * load.sum_kv_tokens) / (model.base_s / load.max_samples + per_token_s)
    return max(0.0, min(at_once, in_turns) - load.sum_tokens)
