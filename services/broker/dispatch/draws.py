"""What a look ahead plays: the queue at hand, scaled down, and draws of how long its samples may turn out. Pure.

Lengths are drawn from the forecasts as true ones followed from them so far (`calibration`), the same for every policy
that is compared, so that a policy is not preferred for trusting its forecasts too much. What the samples of a prompt
share is drawn once a prompt: they turn out long together.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Prompts in no order, each with its samples as long as they turn out."""

    groups: Sequence[Sequence[Item]]
    """Queued now."""
    late: Sequence[Sequence[Item]] = ()
    """Not submitted yet."""
    late_after: float = 0.0
    """Part of what is queued and under way now that has ended when they are."""


def scaled_down(situation: Situation) -> Situation:
    """The situation with at most MAX_ITEMS samples queued or to come, and a fleet that is as fast with them.

    Of what is more than MAX_ROUNDS fillings of the fleet, a part. Then one sample stands for several: each generator
    has so many times fewer slots, and a sample takes so many times longer beside others.
    """
    num_to_come = situation.num_to_come * situation.group_size
    num_samples = max(1, situation.queue.num_samples + num_to_come)
    capacity = sum(load.max_samples for load in situation.loads.values())
    fewest_slots = max(1, min(load.max_samples for load in situation.loads.values()))
    num_shown = min(num_samples, MAX_ROUNDS * capacity)
    size = min(fewest_slots, math.ceil(num_shown / MAX_ITEMS))
    num_items = min(MAX_ITEMS, math.ceil(num_shown / size))
    if num_items == num_samples:
        return situation
    share = num_items / num_samples
    group_size = max(1, round(situation.group_size / size))
    return replace(
        situation,
        loads={name: _scaled_load(load, size) for name, load in situation.loads.items()},
        queue=_share_of(situation.queue, share),
        group_size=group_size,
        num_to_come=round(share * num_to_come / group_size),
    )


def drawn(situation: Situation, seed: int) -> Draw:
    """One draw of how long what is queued turns out, and of what is still to come: when, and how long."""
    rng = random.Random(seed)
    queued = list(_groups(situation.queue, situation.group_size))
    to_come = _to_come(situation, rng)
    shared = _even_shares(rng, len(queued) + len(to_come))
    own = iter(_even_shares(rng, sum(count for _, count in (*queued, *to_come))))
    found: list[list[Item]] = []
    for (predicted, count), share in zip((*queued, *to_come), shared, strict=True):
        found.append(_group(situation, predicted, share, list(islice(own, count))))
    groups, late = found[: len(queued)], found[len(queued) :]
    rng.shuffle(groups)
    rng.shuffle(late)
    return Draw(groups=groups, late=late, late_after=_share_in_turn(seed))


def _group(situation: Situation, predicted: float, share: float, own: Sequence[float]) -> list[Item]:
    """A prompt of which so many turn out shorter; `own` says it of each of its samples among its siblings."""
    seen = situation.calibration
    expected = predicted or situation.mean_tokens
    usual = seen.usual_tokens(expected, share)
    lengths = (usual * math.exp(seen.own_error * _NORMAL.inv_cdf(place)) for place in own)
    return [
        Item(predicted=predicted, expected=expected, tokens=max(1.0, min(tokens, situation.max_tokens)))
        for tokens in lengths
    ]


def _to_come(situation: Situation, rng: random.Random) -> list[tuple[float, int]]:
    """Forecast and number of samples of each prompt to come: like prompts seen, or else like what is here."""
    usual = situation.calibration.forecasts
    if not usual:
        here = situation.queue.merged(situation.under_way)
        usual = [length for length, count in here.items() for _ in range(math.ceil(count / situation.group_size))]
    places = _even_shares(rng, situation.num_to_come)
    return [(usual[int(place * len(usual))], situation.group_size) for place in places]


def _share_in_turn(index: int) -> float:
    """Numbers between 0 and 1, the first few of them spread evenly already (van der Corput's sequence in base 2)."""
    return int(f"{index + 1:b}"[::-1], 2) / float(1 << (index + 1).bit_length())


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
