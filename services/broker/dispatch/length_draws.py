"""What a look ahead plays: the queue at hand, scaled down, and draws of how long its samples may turn out. Pure.

Lengths are drawn from the forecasts as true ones followed from them so far (`calibration`), the same for every policy
that is compared, so that a policy is not preferred for trusting its forecasts too much. What the samples of a prompt
share is drawn once a prompt: they turn out long together.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import NamedTuple

from services.broker.dispatch.calibration import Outlook
from services.broker.dispatch.latency import Load
from services.broker.dispatch.situation import Prompt, Situation

MAX_ROUNDS = 8
"""A longer queue is shortened in proportion to this many fillings of the fleet: its end is too far to plan for."""
MAX_ITEMS = 256
"""Of a longer queue one sample stands for several."""
_NORMAL = NormalDist()
_LAST = 1 - 1e-9
"""Of the samples, those that end before one that is as long as any."""


class Item(NamedTuple):
    """A sample."""

    predicted: float
    """0 where there is no forecast."""
    expected: float
    tokens: float
    """As long as it turns out."""
    num_done: float = 0.0
    """Tokens that it has when a generator begins it."""
    moved_s: float = -math.inf
    """When it moved last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedPrompt:
    """The queued samples of a prompt."""

    waiting: Sequence[Item]
    step: int = 0
    is_begun: bool = False


def scaled_down(situation: Situation) -> Situation:
    """The situation with at most MAX_ITEMS samples queued, and a fleet that is as fast with them.

    Of a queue longer than MAX_ROUNDS fillings of the fleet, the first. Then one sample stands for several: each
    generator has so many times fewer slots, and a sample takes so many times longer beside others.
    """
    num_queued = sum(prompt.num_queued for prompt in situation.prompts)
    capacity = sum(load.max_samples for load in situation.loads.values())
    fewest_slots = max(1, min(load.max_samples for load in situation.loads.values()))
    num_shown = min(num_queued, MAX_ROUNDS * capacity)
    size = min(fewest_slots, max(1, math.ceil(num_shown / MAX_ITEMS)))
    num_items = min(MAX_ITEMS, math.ceil(num_shown / size))
    if num_items == num_queued:
        return situation
    return replace(
        situation,
        loads={name: _scaled_load(load, size) for name, load in situation.loads.items()},
        prompts=_one_for_several(situation.prompts, size, num_items),
    )


@dataclass(frozen=True, slots=True)
class Draw:
    """One way in which things may turn out."""

    queued: Sequence[QueuedPrompt]
    """In order of arrival."""
    under_way: Sequence[tuple[str, Item]] = ()
    """With the generator that holds it."""


class Draws:
    """Draws of how long the samples of a situation turn out.

    What is under way is drawn given how long it is already and how long its siblings are.
    """

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._outlooks = [_outlook(situation, prompt) for prompt in situation.prompts]
        self._num_queued = sum(prompt.num_queued for prompt in situation.prompts)

    def draw(self, seed: int) -> Draw:
        """The same for the same seed."""
        rng = random.Random(seed)
        shared = _even_shares(rng, len(self._outlooks))
        own = iter(_even_shares(rng, self._num_queued))
        queued: list[QueuedPrompt] = []
        under_way: list[tuple[str, Item]] = []
        for prompt, outlook, share in zip(self._situation.prompts, self._outlooks, shared, strict=True):
            median = outlook.median(share)
            for generator, num_done in prompt.running:
                under_way.append((generator, self._item(prompt, median, rng.random(), num_done)))
            if prompt.num_queued:
                waiting = [self._item(prompt, median, next(own)) for _ in range(prompt.num_queued)]
                queued.append(QueuedPrompt(waiting=waiting, step=prompt.step, is_begun=prompt.is_begun))
        return Draw(queued, under_way)

    def _item(self, prompt: Prompt, median: float, share: float, num_done: int = 0) -> Item:
        """A sample that turns out longer than `share` of those that have so many tokens."""
        situation, error = self._situation, self._situation.calibration.own_error
        if num_done and error:
            passed = _NORMAL.cdf((math.log(num_done) - median) / error)
            share = min(passed + share * (1 - passed), _LAST)
        tokens = math.exp(median + error * _NORMAL.inv_cdf(share))
        return Item(
            predicted=prompt.predicted_tokens,
            expected=prompt.predicted_tokens or situation.mean_tokens,
            tokens=max(num_done + 1.0, min(tokens, situation.max_tokens)),
            num_done=num_done,
        )


def _outlook(situation: Situation, prompt: Prompt) -> Outlook:
    return situation.calibration.outlook(
        prompt.predicted_tokens or situation.mean_tokens,
        ended=prompt.ended,
        running=[num_tokens for _, num_tokens in prompt.running if num_tokens],
    )


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
    return replace(load, model=model, max_samples=load.max_samples // size)


def _one_for_several(prompts: Sequence[Prompt], size: int, max_queued: int) -> list[Prompt]:
    """Every so many-th sample of the queue, as far as so many, and of what each generator holds."""
    num_seen: Counter[str] = Counter()
    num_queued, found = 0, list[Prompt]()
    for prompt in prompts:
        running: list[tuple[str, int]] = []
        for generator, num_tokens in prompt.running:
            if num_seen[generator] % size == 0:
                running.append((generator, num_tokens))
            num_seen[generator] += 1
        num_before, num_queued = num_queued, num_queued + prompt.num_queued
        count = min(math.ceil(num_queued / size), max_queued) - min(math.ceil(num_before / size), max_queued)
        if count or running:
            found.append(replace(prompt, num_queued=count, running=tuple(running)))
    return found
