"""Each sample to the generator that is done with it first: what `least_loaded`, `lpt` and `streamrl` share. Pure.

The generator that asks gets a sample when no other one with room would end up earlier with it, and when the faster
generators, full now or not, could not have done the whole queue before this one had decoded the sample. Only faster
ones, so somebody always takes what is queued.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from services.broker.dispatch.latency import Load, level_s, token_s
from services.broker.dispatch.situation import Situation, Work

USUAL_RISK = 2.0
"""Standard deviations: with a hundred samples a few are that much longer than forecast."""
MIN_SPEED_UP = 0.1
"""Generators that differ by less are taken for alike."""
MIN_GAIN = 0.05
"""A sample is left to a busy generator only if that is sooner by this part: the model is not better than that."""


class EarliestFinish:
    """A `Decision`: places the samples it is shown, in their order, on the generators that have room.

    Args:
        asking: The load of the generator that asks.
        others: The loads of the rest. Both are filled up.
        queued_tokens: Tokens of everything that is queued.
        length_error: Standard deviation of the logarithm of true length over forecast.
        risk: Samples are placed as if they were that many standard deviations longer than forecast: one that turns out
            long must not do so on a slow generator.
    """

    def __init__(
        self,
        asking: Load,
        others: Iterable[Load],
        *,
        queued_tokens: float,
        length_error: float,
        risk: float = USUAL_RISK,
    ) -> None:
        self._risk = math.exp(risk * length_error)
        self._asking = asking
        self._others = [load for load in others if load.max_samples > 0]
        self._open = [load for load in self._others if load.room]
        speed = token_s(asking)
        self._faster = [load for load in self._others if token_s(load) < (1 - MIN_SPEED_UP) * speed]
        self._faster_level_s = level_s(self._faster, queued_tokens)

    @classmethod
    def over_fleet(cls, situation: Situation, *, risk: float = USUAL_RISK) -> EarliestFinish:
        """Over every generator and the whole queue; uses the situation's loads up."""
        asking = situation.loads[situation.asking]
        others = [load for load in situation.loads.values() if load is not asking]
        return cls(
            asking,
            others,
            queued_tokens=situation.queue.sum_tokens(situation.mean_tokens),
            length_error=situation.length_error,
            risk=risk,
        )

    @property
    def is_done(self) -> bool:
        """Whether the asking generator is full."""
        return self._asking.room == 0

    def take(self, work: Work, most: int) -> int:
        """See `Decision`."""
        num_taken = 0
        for _ in range(work.num_samples):
            if num_taken == most or self.is_done:
                break
            best = self._best(work)
            if best is None:
                return num_taken
            best.add(work.remaining_tokens, work.context_tokens)
            if best is self._asking:
                num_taken += 1
            elif not best.room:
                self._open.remove(best)
        return num_taken

    def _best(self, work: Work) -> Load | None:
        """Where the next sample goes; None where it waits for a generator that is full now."""
        remaining, context = work.remaining_tokens, work.context_tokens
        best, best_s = self._asking, self._asking.finish_s(remaining, context, risk=self._risk)
        for load in self._open:
            if context >= load.max_context_tokens:
                continue
            finish_s = load.finish_s(remaining, context, risk=self._risk)
            if finish_s < best_s:
                best, best_s = load, finish_s
        if best is self._asking and self._is_sooner_elsewhere(work):
            return None
        return best

    def _is_sooner_elsewhere(self, work: Work) -> bool:
        remaining, context = self._risk * work.remaining_tokens, work.context_tokens
        here_s = (1 - MIN_GAIN) * self._asking.sample_s(remaining, context)
        if self._faster_level_s >= here_s:
            return False
        return any(
            load.later_s(remaining, context) < here_s for load in self._faster if context < load.max_context_tokens
        )
