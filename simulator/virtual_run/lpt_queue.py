"""Dispatches queued samples to unlike generators as the broker's `lpt` does (`services.broker.dispatch`).

A sample goes to the generator that would finish it first, which keeps the longest from slow ones. The loads of others
are as old as the last look, as in a broker; only the asking generator's is current.
"""

from __future__ import annotations

from services.broker.dispatch.dealing.table import Member, Table
from services.broker.dispatch.latency import Load
from services.broker.dispatch.length_histogram import remaining_tokens
from services.broker.dispatch.situation import Order, Rule, Work
from services.broker.fleet.snapshot import REFRESH_S
from simulator.virtual_run.ledger import Choice, Group
from simulator.virtual_run.stealing import Mover
from simulator.virtual_run.virtual_generator import Engine

ASK_AGAIN_S = 0.25
"""Time before an idle generator asks again, as in the broker's lease stream."""


class Placer:
    """Replies to generators that ask for work; `mover` knows lengths, and the loads of generators."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._loads: dict[int, Load] = {}
        self._refreshed_s = -REFRESH_S

    def choose(self, engine: Engine, *, queued_tokens: float, now_s: float) -> Choice:
        """The share of this generator in a queue of this many forecast tokens. Its clock is now."""
        if now_s - self._refreshed_s >= REFRESH_S:
            self._refreshed_s, self._loads = now_s, {}
            self._mover.learn()
        alive = [other for other in self._mover.engines if other is not engine and other.is_alive]
        seen = self._mover.seen
        table = Table(Rule(order=Order.LENGTH), length_error=seen.error)
        for other in alive:
            _put(table, other, self._load(other, now_s).copy())
        self._loads.pop(id(engine), None)
        asking = _put(table, engine, self._load(engine, now_s))
        table.see_tokens(queued_tokens)
        table.measure_faster({0})

        def num_taken(group: Group, num_samples: int, num_done: float, most: int) -> int:
            work = Work(
                num_samples=num_samples,
                context_tokens=self._mover.prompt_tokens + num_done,
                length_tokens=group.forecast,
                remaining_tokens=remaining_tokens(group.forecast or seen.mean_tokens, num_done),
            )
            taken = 0
            for _ in range(num_samples):
                member = table.first_done(work, table.kinds) if taken < most and asking.load.room else None
                if member is None:
                    break
                table.add(member, work)
                taken += member is asking
            return taken

        return num_taken

    def _load(self, engine: Engine, now_s: float) -> Load:
        """Its load at the last look, with the current number of samples."""
        load = self._loads.get(id(engine))
        if load is None or load.num_samples != engine.num_running:
            engine.advance(now_s)
            load = self._loads[id(engine)] = self._mover.load(engine)
        load.max_leases = engine.num_free
        return load


def _put(table: Table, engine: Engine, load: Load) -> Member:
    return table.put(str(id(engine)), load, policy_version=0, is_here=True)
