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

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from services.broker.dispatch.latency import Load
from services.broker.dispatch.length_histogram import LengthCounts
from services.broker.dispatch.situation import Order, Rule, Situation

LONG_TAIL_SHARE = 0.2
"""StreamRL's alpha."""
MAX_SPLIT_AT_ONCE = 32
"""Different loads for which a split takes a few milliseconds; a fleet with more is split by its next review."""
_NUM_HALVINGS = 40


class StreamRl:
    """See the module."""

    name = "streamrl"
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

    def rule(self, situation: Situation) -> Rule:
        """Deal each part to its own generators, with a new split if the fleet is another one."""
        is_other_fleet = self._split_for != frozenset(situation.loads)
        if is_other_fleet and len(set(map(id, _merged(situation.loads.values())))) <= MAX_SPLIT_AT_ONCE:
            self.review(situation)
        return Rule(order=Order.LENGTH, threshold=self.threshold, long_tail_ids=self.long_tail_ids)


def long_tail_instances(
    loads: Mapping[str, Load], long: LengthCounts, regular: LengthCounts, mean_tokens: float
) -> frozenset[str]:
    """The generators to separate: those fastest alone, as many as make the later part end earliest.

    One part's time falls and the other's rises with their number, so bisection finds the best number.
    """
    by_speed = sorted(loads, key=lambda generator_id: (loads[generator_id].model.step_s(1), generator_id))
    if len(by_speed) < 2 or not long.num_samples or not regular.num_samples:
        return frozenset()
    ordered = _merged(loads[generator_id] for generator_id in by_speed)

    def times_s(count: int) -> tuple[float, float]:
        return part_s(ordered[:count], long, mean_tokens), part_s(ordered[count:], regular, mean_tokens)

    least, most = 1, len(ordered) - 1
    while least < most:
        middle = (least + most) // 2
        long_s, regular_s = times_s(middle)
        least, most = (least, middle) if long_s <= regular_s else (middle + 1, most)
    best = min((count for count in (least - 1, least) if count), key=lambda count: max(times_s(count)))
    return frozenset(by_speed[:best])


def _merged(loads: Iterable[Load]) -> list[Load]:
    """The loads, with the same object for those that finish alike."""
    kinds: dict[tuple[object, ...], Load] = {}
    return [
        kinds.setdefault((load.model, load.max_samples, load.longest_tokens, load.sum_tokens, load.sum_kv_tokens), load)
        for load in loads
    ]


def part_s(loads: Sequence[Load], lengths: LengthCounts, mean_tokens: float) -> float:
    """When these generators finish their load and samples of these lengths, all ending together.

    By bisection: what a generator can do by a given time follows from `Load.finish_s`.
    """
    longest = max((length or mean_tokens for length, _ in lengths.items()), default=0.0)
    num_tokens = lengths.sum_tokens(mean_tokens)
    by_id = {id(load): load for load in loads}
    # At the start of a step most loads are the same: each different one is computed once.
    counted = [(by_id[key], count) for key, count in Counter(map(id, loads)).items()]

    def tokens_by(by_s: float) -> float:
        return sum(count * _tokens_by(load, by_s, longest) for load, count in counted)

    low_s, high_s = 0.0, 1.0
    while tokens_by(high_s) < num_tokens:
        low_s, high_s = high_s, 2 * high_s
    for _ in range(_NUM_HALVINGS):
        middle_s = (low_s + high_s) / 2
        if tokens_by(middle_s) < num_tokens:
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
