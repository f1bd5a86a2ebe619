"""Places each sample on the generator that finishes it first, for `least_loaded`, `lpt` and `streamrl`. Pure.

The generator that asks gets a sample if no other one with free capacity would finish it earlier, and if the faster
generators, full or not, could not finish the whole queue before this one has decoded the sample. Only faster
ones are compared, so some generator always takes queued work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from services.broker.dispatch.latency import Load, level_s, token_s
from services.broker.dispatch.situation import Situation, Work

USUAL_RISK = 2.0
"""Standard deviations: with a hundred samples a few are that much longer than forecast."""
MIN_SPEED_UP = 0.1
"""Generators that differ by less count as equal."""
MIN_GAIN = 0.05
"""A sample is left to a busy generator only if that is sooner by this fraction: the model is no more accurate."""


class EarliestFinish:
    """A `Decision` that places the samples it is shown, in order, on the generators with free capacity.

    Args:
        asking: The load of the generator that asks.
        others: The loads of the rest. Both are modified.
        queued_tokens: Tokens of everything that is queued.
        length_error: Standard deviation of the logarithm of true length over forecast.
        risk: Samples are placed as if they were this many standard deviations longer than forecast, so that none turns
            out long on a slow generator.
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
        """A decision over every generator and the whole queue; modifies the situation's loads."""
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
        """The generator for the next sample; None if it waits for one that is full now."""
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
