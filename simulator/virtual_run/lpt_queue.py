"""Dispatches queued samples to unlike generators as the broker's `lpt` does (`services.broker.dispatch`).

A sample goes to the generator that would finish it first, which keeps the longest from slow ones. The loads of others
are as old as the last look, as in a broker; only the asking generator's is current.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.broker.dispatch.latency import Load
from services.broker.dispatch.length_histogram import remaining_tokens
from services.broker.dispatch.placing import EarliestFinish
from services.broker.dispatch.situation import Work
from services.broker.fleet.snapshot import REFRESH_S
from simulator.virtual_run.ledger import Group
from simulator.virtual_run.stealing import Mover
from simulator.virtual_run.virtual_generator import Engine

ASK_AGAIN_S = 0.25
"""Time before an idle generator asks again, as in the broker's lease stream."""


class Choice:
    """One reply to one generator, shown the queue group by group."""

    def __init__(self, decision: EarliestFinish, *, mean_tokens: float, prompt_tokens: float) -> None:
        self._decision, self._mean_tokens, self._prompt_tokens = decision, mean_tokens, prompt_tokens

    def num_taken(self, group: Group, num_samples: int, *, num_done: float, most: int) -> int:
        """How many of the group's samples, each with this many tokens already, it gets."""
        work = Work(
            num_samples=num_samples,
            context_tokens=self._prompt_tokens + num_done,
            length_tokens=group.forecast,
            remaining_tokens=remaining_tokens(group.forecast or self._mean_tokens, num_done),
        )
        return self._decision.take(work, most)


class Placer:
    """Replies to generators that ask for work.

    Args:
        engines: All generators.
        mover: Knows lengths, and the loads of generators.
        prompt_tokens: Length of each prompt.
    """

    def __init__(self, engines: Sequence[Engine], mover: Mover, prompt_tokens: float) -> None:
        self._engines, self._mover, self._prompt_tokens = engines, mover, prompt_tokens
        self._loads: dict[int, Load] = {}
        self._refreshed_s = -REFRESH_S

    def choose(self, engine: Engine, *, queued_tokens: float, now_s: float) -> Choice:
        """The share of this generator in a queue of this many forecast tokens. Its clock is now."""
        if now_s - self._refreshed_s >= REFRESH_S:
            self._refreshed_s, self._loads = now_s, {}
            self._mover.learn()
        others = [self._load(other, now_s).copy() for other in self._engines if other is not engine and other.is_alive]
        self._loads.pop(id(engine), None)
        seen = self._mover.seen
        decision = EarliestFinish(
            self._load(engine, now_s), others, queued_tokens=queued_tokens, length_error=seen.error
        )
        return Choice(decision, mean_tokens=seen.mean_tokens, prompt_tokens=self._prompt_tokens)

    def _load(self, engine: Engine, now_s: float) -> Load:
        """Its load at the last look, with the current number of samples."""
        load = self._loads.get(id(engine))
        if load is None or load.num_samples != engine.num_running:
            engine.advance(now_s)
            load = self._loads[id(engine)] = self._mover.load(engine)
        load.max_leases = engine.num_free
        return load
