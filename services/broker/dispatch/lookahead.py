"""Looks ahead: when a policy would finish the current situation, by the latency model on a virtual clock. Pure.

Plays a draw of true lengths (`length_draws`). The policy under test sees forecasts only; its rule deals the queue by
the same table as in the broker (`dealing`), and idle generators steal work as real ones do (`stealing_rule`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from penstock.batching.batched_engine import SAME_TIME_S, BatchedEngine, Running
from services.broker.dispatch.dealing.table import Table
from services.broker.dispatch.latency import Load
from services.broker.dispatch.length_draws import Draw, Item, QueuedPrompt
from services.broker.dispatch.length_histogram import LengthCounts, remaining_tokens
from services.broker.dispatch.situation import DispatchPolicy, Order, Rule, Situation
from services.broker.dispatch.stealing_rule import MAX_MOVES, MIN_STAY_S, MOVE_COST_S, is_worth_moving, late_generators

MAX_TICKS = 64
"""Ticks of a look-ahead, at which the policy is reviewed and idle generators look for work to steal."""
MAX_LOAD_AGE = 0.25
"""Fraction of the tick interval: the largest age of a load's lengths, and the delay of a generator that got no work."""

SLICE_S = 0.002
"""Work between two pauses: a thread that computes without one keeps the interpreter for 5 ms at a time."""
PAUSE_S = 0.0002


class TooLateError(Exception):
    """A look-ahead exceeds its budget."""


class Budget:
    """The time for one look-ahead, which runs in a thread and gives way to the event loop.

    Args:
        limit_s: None for as long as it takes, without pauses.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self._limit_s = limit_s
        self._begin_s = self._paused_s = time.monotonic()

    def check(self) -> None:
        """Pause if it is time to. Raises TooLateError once the budget is spent."""
        if self._limit_s is None:
            return
        now_s = time.monotonic()
        if now_s - self._begin_s >= self._limit_s:
            raise TooLateError
        if now_s - self._paused_s >= SLICE_S:
            time.sleep(PAUSE_S)
            self._paused_s = time.monotonic()


UNLIMITED = Budget()


class _Generator(BatchedEngine[Item]):
    """One generator on the virtual clock. Its state is advanced only when it is read."""

    def __init__(self, load: Load) -> None:
        super().__init__(load.model.step_s)
        self.load = load
        """Model and capacity; the batch is its load."""
        self.ask_again_s = 0.0
        """When it may ask again after it was left without work."""
        self._seen, self._seen_s = self._measured(), -math.inf
        self._longest: tuple[tuple[float, int, int], Running[Item] | None] | None = None
        """When it was computed, and for which batch: every generator that may steal asks for it."""

    def take(self, item: Item, now_s: float, *, delay_s: float = 0.0) -> None:
        """Start an item, which holds on average half of its KV tokens."""
        if self.clock_s != now_s:
            self.advance(now_s)
        self.begin(item, length=item.tokens, position=item.num_done, kv_tokens=item.tokens / 2, delay_s=delay_s)

    @property
    def has_room(self) -> bool:
        """Whether it can hold another sample."""
        return self.num_running < self.load.max_samples

    def to_go(self, running: Running[Item]) -> float:
        """Expected remaining tokens of an item."""
        return remaining_tokens(running.item.expected, self.position(running))

    def longest(self, now_s: float, *, moved_before_s: float) -> Running[Item] | None:
        """The item with the most remaining tokens among those not moved since then."""
        key = (now_s, self.num_begun, self.num_running)
        if self._longest is None or self._longest[0] != key:
            self.advance(now_s)
            may_move = [running for running in self.running if running.item.moved_s <= moved_before_s]
            found = max(may_move, key=lambda running: (self.to_go(running), -running.number), default=None)
            self._longest = key, found
        return self._longest[1]

    def seen(self, now_s: float, max_age_s: float = 0.0) -> Load:
        """Its load by the forecasts, kept until it is measured again; lengths may be outdated, counts not.

        Samples that are placed on it are remembered, as in the broker's `Fleet`.
        """
        if self._seen.num_samples != self.num_running or now_s - self._seen_s > max_age_s:
            self.advance(now_s)
            self._seen, self._seen_s = self._measured(), now_s
        return self._seen

    def _measured(self) -> Load:
        load = Load(model=self.load.model, max_samples=self.load.max_samples, max_leases=0)
        load.max_context_tokens = self.load.max_context_tokens
        num_steps = self.num_steps
        # Not by `to_go` and `position`: most of the time of a look-ahead is spent here.
        for _, _, begin_step, _, item in self._heap:
            num_done = num_steps - begin_step if num_steps > begin_step else 0.0
            load.add(remaining_tokens(item.expected, num_done), num_done)
        load.max_leases = self.load.max_samples - self.num_running
        return load


def finish_s(policy: DispatchPolicy, situation: Situation, draw: Draw) -> float:
    """When a policy would finish everything queued and under way: seconds from now.

    Args:
        policy: A fresh one; it is reviewed.
        situation: The current one, scaled down.
        draw: The lengths of its samples.
    """
    return _Run(policy, situation, draw).finish_s()


def cost_s(policy: DispatchPolicy, situation: Situation, draw: Draw, budget: Budget = UNLIMITED) -> float:
    """The cost by which policies are compared, in seconds; arguments as for `finish_s`. Raises TooLateError.

    The finish time of everything; if steps overlap, plus a sample's average finish time. The next step then begins
    while this one ends: a policy that ends 2 % later but finishes most samples in half the time finishes three
    steps sooner.
    """
    run = _Run(policy, situation, draw, budget)
    last_s = run.finish_s()
    return last_s + run.mean_end_s if situation.steps_overlap else last_s


class _Run:
    """One look-ahead."""

    def __init__(self, policy: DispatchPolicy, situation: Situation, draw: Draw, budget: Budget = UNLIMITED) -> None:
        self._budget = budget
        self._policy = policy
        self._situation = situation
        self._num_ended, self._sum_ends_s = 0, 0.0
        self._now_s = 0.0
        self._queue = [prompt.copy() for prompt in draw.queued]
        self._rule: Rule | None = None
        """The policy's, since the last tick."""
        self._table: Table | None = None
        self._lengths, self._under_way = LengthCounts(), LengthCounts()
        for group in self._queue:
            self._lengths.add(group.predicted, len(group.waiting))
        self._generators = {name: _Generator(load) for name, load in situation.loads.items()}
        for name, item in draw.under_way:
            if name in self._generators:
                self._begin(self._generators[name], item)
        self._tick_s = max(situation.look_s, self._least_s() / MAX_TICKS)

    def finish_s(self) -> float:
        generators = list(self._generators.values())
        next_tick_s = 0.0
        while True:
            # A generator that takes for ever, by what it states, is full for as many ticks.
            self._budget.check()
            if self._now_s >= next_tick_s:
                self._tick()
                next_tick_s = self._now_s + self._tick_s
            self._lease()
            end_s = min(generator.next_end_s for generator in generators)
            if end_s == math.inf and self._queue:
                for generator in generators:
                    generator.ask_again_s = self._now_s
                self._lease()
                end_s = min(generator.next_end_s for generator in generators)
            if end_s == math.inf:
                # Nothing is under way. No generator takes any remaining work.
                return math.inf if self._queue else self._now_s
            self._now_s = min(end_s, next_tick_s)
            for generator in generators:
                if generator.next_end_s <= self._now_s + SAME_TIME_S:
                    self._end(generator)

    def _end(self, generator: _Generator) -> None:
        generator.advance(self._now_s)
        for item in generator.pop_ended():
            self._under_way.add(item.predicted, -1)
            self._num_ended += 1
            self._sum_ends_s += self._now_s

    @property
    def mean_end_s(self) -> float:
        """Of the ended samples."""
        return self._sum_ends_s / max(1, self._num_ended)

    def _least_s(self) -> float:
        """Lower bound on the time of everything queued."""
        loads = [generator.load for generator in self._generators.values()]
        items = [item for group in self._queue for item in group.waiting]
        longest = max((item.tokens for item in items), default=1.0)
        fastest_s = min(load.model.step_s(1) for load in loads)
        rate = sum(load.tokens_per_second for load in loads)
        return max(longest * fastest_s, sum(item.tokens for item in items) / rate)

    def _tick(self) -> None:
        if self._queue:
            situation = self._seen(next(iter(self._generators)))
            self._policy.review(situation)
            self._rule = self._policy.rule(situation)
            self._put_in_order()
        elif self._now_s:
            loads = {name: generator.seen(self._now_s) for name, generator in self._generators.items()}
            for name in self._generators:
                self._budget.check()
                num_moves = 0
                while num_moves < MAX_MOVES and self._take_over(name, loads):
                    num_moves += 1

    def _lease(self) -> None:
        """Deal the queue if a generator asks: to all with room at once, as in the broker."""
        asking = [generator for generator in self._generators.values() if generator.has_room]
        if not self._queue or not any(generator.ask_again_s <= self._now_s for generator in asking):
            return
        taking = self._take_all(asking) if self._rule is None else self._deal(self._rule)
        for generator in asking:
            if generator not in taking:
                generator.ask_again_s = self._now_s + MAX_LOAD_AGE * self._tick_s
        if taking:
            self._queue = [group for group in self._queue if group.waiting]
            self._put_in_order()

    def _take_all(self, asking: Sequence[_Generator]) -> set[_Generator]:
        """Give each that asks, in turn, all that it can hold; returns those that got something."""
        taking: set[_Generator] = set()
        for group in self._queue:
            while group.waiting:
                generator = next((generator for generator in asking if generator.has_room), None)
                if generator is None:
                    return taking
                self._start(group, generator)
                taking.add(generator)
        return taking

    def _deal(self, rule: Rule) -> set[_Generator]:
        """Deal by a rule; returns the generators that got something."""
        taking: set[_Generator] = set()
        table = self._table_for(rule)
        for group in self._queue:
            self._budget.check()
            if not table.is_open:
                break
            work = group.work
            while group.waiting:
                member = table.first_done(work, table.kinds)
                if member is None:
                    break
                table.add(member, work)
                generator = self._generators[member.name]
                self._start(group, generator)
                taking.add(generator)
        return taking

    def _table_for(self, rule: Rule) -> Table:
        """The table of the generators as they are seen now."""
        table = self._table
        if table is None or table.rule != rule:
            table = self._table = Table(rule, length_error=self._situation.length_error)
        for name, generator in self._generators.items():
            load = generator.seen(self._now_s, MAX_LOAD_AGE * self._tick_s)
            member = table.get(name)
            if member is None or not member.is_same(load, 0, is_here=True):
                table.put(name, load, policy_version=0, is_here=True)
        table.see_queue(self._lengths, self._situation.mean_tokens)
        table.measure_faster({0})
        return table

    def _start(self, group: QueuedPrompt, generator: _Generator) -> None:
        self._lengths.add(group.predicted, -1)
        self._begin(generator, group.waiting.pop())
        group.is_begun = True

    def _put_in_order(self) -> None:
        """Started prompts first, as in the broker; then in the policy's order. Stable."""
        if self._rule is not None and self._rule.order is Order.LENGTH:
            self._queue.sort(key=lambda group: (not group.is_begun, group.step, -group.predicted))
        else:
            self._queue.sort(key=lambda group: not group.is_begun)

    def _begin(self, generator: _Generator, item: Item) -> None:
        self._under_way.add(item.predicted)
        generator.take(item, self._now_s)

    def _seen(self, asking: str) -> Situation:
        loads = {
            name: generator.seen(self._now_s, MAX_LOAD_AGE * self._tick_s)
            for name, generator in self._generators.items()
        }
        return replace(self._situation, asking=asking, loads=loads, queue=self._lengths, under_way=self._under_way)

    def _take_over(self, name: str, loads: dict[str, Load]) -> bool:
        """Move one item that may end last to a generator with free capacity, if that is sooner; see `stealing_rule`."""
        here = loads[name]
        if not here.room:
            return False
        donors = {other: load for other, load in loads.items() if other != name and load.num_samples}
        for donor in late_generators(here, donors, length_error=self._situation.length_error):
            there = self._generators[donor]
            running = there.longest(self._now_s, moved_before_s=self._now_s - MIN_STAY_S)
            if running is None:
                continue
            num_done = there.position(running)
            if is_worth_moving(here, there.to_go(running), num_done, there_s=loads[donor].finish_s()):
                taker = self._generators[name]
                self._move(there, running, taker, num_done)
                loads[donor], loads[name] = there.seen(self._now_s), taker.seen(self._now_s)
                return True
        return False

    def _move(self, donor: _Generator, running: Running[Item], taker: _Generator, num_done: float) -> None:
        item = donor.remove(running)._replace(moved_s=self._now_s, num_done=num_done)
        delay_s = MOVE_COST_S + taker.load.model.prefill_s(num_done)
        taker.take(item, self._now_s, delay_s=delay_s)
