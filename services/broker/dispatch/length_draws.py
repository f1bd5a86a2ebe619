"""Prepares look-aheads: the current queue, scaled down, and draws of its samples' possible lengths. Pure.

Lengths are drawn from the forecasts as true ones followed from them so far (`calibration`), the same for every policy
compared, so that a policy is not preferred for trusting its forecasts too much. The part that the samples of a prompt
share is drawn once per prompt: they turn out long together.
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
from services.broker.dispatch.situation import Prompt, Situation, Work

MAX_ROUNDS = 8
"""A longer queue is cut to this many fillings of the fleet: its end is too far away to plan for."""
MAX_ITEMS = 256
"""In a longer queue one sample stands for several."""
_NORMAL = NormalDist()
_LAST = 1 - 1e-9
"""Share of samples that end before one that counts as the longest."""


class Item(NamedTuple):
    """A sample."""

    predicted: float
    """0 without a forecast."""
    expected: float
    tokens: float
    """Its drawn length."""
    num_done: float = 0.0
    """Tokens that it has when a generator starts it."""
    moved_s: float = -math.inf
    """When it was last moved."""


@dataclass(slots=True, kw_only=True)
class QueuedPrompt:
    """The queued samples of a prompt."""

    waiting: list[Item]
    """Taken from the end; all have the same forecast."""
    step: int = 0
    is_begun: bool = False

    @property
    def predicted(self) -> float:
        """Forecast of each sample; 0 if unknown."""
        return self.waiting[-1].predicted

    @property
    def work(self) -> Work:
        """The prompt's work as a policy sees it."""
        return Work(
            num_samples=len(self.waiting),
            context_tokens=0.0,
            length_tokens=self.predicted,
            remaining_tokens=self.waiting[-1].expected,
        )

    def copy(self) -> QueuedPrompt:
        """A copy, to take samples from."""
        return QueuedPrompt(waiting=self.waiting.copy(), step=self.step, is_begun=self.is_begun)


def scaled_down(situation: Situation) -> Situation:
    """The situation with at most MAX_ITEMS samples queued, and a fleet of equivalent speed.

    A queue longer than MAX_ROUNDS fillings of the fleet is cut to the first ones. Then one sample stands for several:
    slots shrink, and the time of a sample beside others grows, by the same factor.
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
    """One possible outcome."""

    queued: Sequence[QueuedPrompt]
    """In order of arrival."""
    under_way: Sequence[tuple[str, Item]] = ()
    """Each with the generator that holds it."""


class Draws:
    """Draws lengths for the samples of a situation.

    Samples under way are drawn given their tokens so far and their siblings' lengths.
    """

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._outlooks = [_outlook(situation, prompt) for prompt in situation.prompts]
        self._num_queued = sum(prompt.num_queued for prompt in situation.prompts)

    def draw(self, seed: int) -> Draw:
        """Draw; the same for the same seed."""
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
                waiting = [self._item(prompt, median, next(own)) for _ in range(prompt.num_queued)][::-1]
                queued.append(QueuedPrompt(waiting=waiting, step=prompt.step, is_begun=prompt.is_begun))
        return Draw(queued, under_way)

    def _item(self, prompt: Prompt, median: float, share: float, num_done: int = 0) -> Item:
        """A sample longer than `share` of those with this many tokens."""
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
    """Numbers between 0 and 1, shuffled, spread so evenly that results vary little between draws."""
    found = [(index + rng.random()) / count for index in range(count)]
    rng.shuffle(found)
    return found


def _scaled_load(load: Load, size: int) -> Load:
    """The load if one sample stands for `size`."""
    model = replace(
        load.model,
        per_sample_s=load.model.per_sample_s * size,
        per_kv_token_s=load.model.per_kv_token_s * size,
        max_samples=load.model.max_samples // size,
    )
    return replace(load, model=model, max_samples=load.max_samples // size)


def _one_for_several(prompts: Sequence[Prompt], size: int, max_queued: int) -> list[Prompt]:
    """Every n-th sample of the queue, up to a limit, and of each generator's load."""
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
