"""What a look ahead plays: the queue at hand, scaled down, and draws of how long its samples may turn out. Pure.

Lengths are drawn from the forecasts as true ones followed from them so far (`calibration`), the same for every policy
that is compared, so that a policy is not preferred for trusting its forecasts too much. What the samples of a prompt
share is drawn once a prompt: they turn out long together.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist

from services.broker.dispatch.latency import Load
from services.broker.dispatch.lengths import LengthCounts
from services.broker.dispatch.types import Situation

MAX_ROUNDS = 8
"""A longer queue is shortened in proportion to this many fillings of the fleet: its end is too far to plan for."""
MAX_ITEMS = 256
"""Of a longer queue one sample stands for several."""
_NORMAL = NormalDist()


@dataclass(slots=True, kw_only=True)
class Item:
    """A sample, or of what is under way some that are taken for equal."""

    predicted: float
    """0 where there is no forecast."""
    expected: float
    tokens: float
    """As long as it turns out."""
    count: int = 1
    begin_step: float = 0.0
    moved_s: float = -math.inf
    """When it moved last."""


def scaled_down(situation: Situation) -> Situation:
    """The situation with at most MAX_ITEMS samples queued, and a fleet that is as fast with them.

    Of a queue longer than MAX_ROUNDS fillings of the fleet, a part. Then one sample stands for several: each generator
    has so many times fewer slots, and a sample takes so many times longer beside others.
    """
    num_queued = max(1, situation.queue.num_samples)
    capacity = sum(load.max_samples for load in situation.loads.values())
    fewest_slots = max(1, min(load.max_samples for load in situation.loads.values()))
    num_shown = min(num_queued, MAX_ROUNDS * capacity)
    size = min(fewest_slots, math.ceil(num_shown / MAX_ITEMS))
    num_items = min(MAX_ITEMS, math.ceil(num_shown / size))
    if num_items == num_queued:
        return situation
    return replace(
        situation,
        loads={name: _scaled_load(load, size) for name, load in situation.loads.items()},
        queue=_share_of(situation.queue, num_items / num_queued),
        group_size=max(1, round(situation.group_size / size)),
    )


def drawn(situation: Situation, seed: int) -> list[list[Item]]:
    """The queue by prompts, with one draw of how long its samples turn out, in no order."""
    rng = random.Random(seed)
    groups = list(_groups(situation.queue, situation.group_size))
    shared = _even_shares(rng, len(groups))
    own = iter(_even_shares(rng, situation.queue.num_samples))
    seen = situation.calibration
    found: list[list[Item]] = []
    for (predicted, count), share in zip(groups, shared, strict=True):
        expected = predicted or situation.mean_tokens
        usual = seen.usual_tokens(expected, share)
        deviations = [seen.own_error * _NORMAL.inv_cdf(next(own)) for _ in range(count)]
        lengths = [max(1.0, min(usual * math.exp(deviation), situation.max_tokens)) for deviation in deviations]
        found.append([Item(predicted=predicted, expected=expected, tokens=tokens) for tokens in lengths])
    rng.shuffle(found)
    return found


def _groups(queue: LengthCounts, group_size: int) -> Iterator[tuple[float, int]]:
    """Forecast and number of samples of each prompt, as if what has the same forecast came in whole groups."""
    for length, count in queue.items():
        for first in range(0, count, group_size):
            yield length, min(group_size, count - first)


def _even_shares(rng: random.Random, count: int) -> list[float]:
    """Numbers between 0 and 1, in no order, spread so evenly that what is made of them varies little between draws."""
    found = [(index + rng.random()) / count for index in range(count)]
    rng.shuffle(found)
    return found


def _scaled_load(load: Load, size: int) -> Load:
    """The load where one sample stands for `size`."""
    model = replace(
        load.model,
        per_sample_s=load.model.per_sample_s * size,
        per_kv_token_s=load.model.per_kv_token_s * size,
        max_samples=load.model.max_samples // size,
    )
    return replace(
        load,
        model=model,
        max_samples=load.max_samples // size,
        num_samples=math.ceil(load.num_samples / size),
        sum_tokens=load.sum_tokens / size,
        sum_kv_tokens=load.sum_kv_tokens / size,
    )


def _share_of(counts: LengthCounts, share: float) -> LengthCounts:
    """Whole samples, the same share of every length as nearly as that goes, and a share of all to within one."""
    found = LengthCounts()
    owed = 0.5
    for length, count in counts.items():
        owed += share * count
        found.add(length, int(owed))
        owed -= int(owed)
    return found
