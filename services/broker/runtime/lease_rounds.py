"""Runs the rounds in which a run's queue is dealt to the generators attached to this process, one at a time.

Whichever lease stream asks first begins a round, and the round serves all of them: each finds its leases in its seat.
A round that dealt all it could is not repeated until the run or a seat has changed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Protocol

from services.broker.fleet.deal_round import Deal, Seat
from services.broker.fleet.dispatcher import Dispatcher
from services.broker.records.run_clock import RunClock
from services.broker.rules.limits import LEASE_SECRET_BYTES
from services.broker.state.run_state import RunState

SETTLED_S = 0.25
"""After this time loads differ enough to look again at what was left in the queue."""


class _Transact(Protocol):
    """`RunReplica.transact`."""

    def __call__(self, operation: Callable[[RunState], Deal], *, must_verify: bool) -> Awaitable[Deal]: ...


class LeaseRounds:
    """See the module.

    Args:
        transact: The replica's.
        dispatcher: The run's.
        clock: The run's.
    """

    def __init__(self, transact: _Transact, dispatcher: Dispatcher, clock: RunClock) -> None:
        self._transact, self._dispatcher, self._clock = transact, dispatcher, clock
        self.seats: dict[str, Seat] = {}
        """The attached generators, by id."""
        self._is_free = asyncio.Lock()
        self._num_reports = 0
        self._settled: tuple[int, ...] = ()
        """The run and the seats when everything was dealt that could be."""
        self._settled_until_s = 0.0
        self._last = Deal()

    def join(self, seat: Seat, *, is_news: bool = True) -> None:
        """Add a generator, or note what its seat says now, if that `is_news`.

        A later stream of the same generator replaces the former.
        """
        if is_news or self.seats.get(seat.facts.generator_id) is not seat:
            self.seats[seat.facts.generator_id] = seat
            self._num_reports += 1

    def leave(self, seat: Seat) -> None:
        """Remove a generator, if this seat is still its own."""
        if self.seats.get(seat.facts.generator_id) is seat:
            del self.seats[seat.facts.generator_id]
            self._dispatcher.forget(seat.facts.generator_id)
            self._num_reports += 1

    async def ask(self, seat: Seat, copy: RunState | None) -> str:
        """Have the queue dealt; returns a readable reason if the seat got nothing.

        A cancelled caller does not stop a round: others may get leases from it.
        """
        if copy is None or not self._is_settled(copy, seat):
            task = asyncio.create_task(self._round(seat))
            task.add_done_callback(_retrieve)
            await asyncio.shield(task)
        return "" if copy is None or seat.grants else self._dispatcher.why_none(copy, seat.facts, self._last)

    async def _round(self, seat: Seat) -> None:
        name = seat.facts.generator_id
        async with self._is_free:
            if seat.grants or self.seats.get(name) is not seat:
                return
            seen: list[tuple[int, ...]] = []

            def operation(state: RunState) -> Deal:
                if self.seats.get(name) is not seat or self._is_settled(state, seat):
                    seen[:] = [()]
                    return self._last
                deal = self._dispatcher.deal(state, name, self.seats, self._clock.now_s(), make_suffix=_suffix)
                seen[:] = [self._seen(state)]
                return deal

            deal = await self._transact(operation, must_verify=False)
            if not seen[0]:
                return
            self._last = deal
            if not (deal.is_cut or deal.is_partial):
                self._settled = seen[0]
                self._settled_until_s = asyncio.get_running_loop().time() + SETTLED_S
            for other, grants in deal.grants.items():
                taker = self.seats.get(other)
                if taker is not None:
                    taker.num_free -= len(grants)
                    taker.grants += grants
                    taker.wake()

    def _is_settled(self, state: RunState, seat: Seat) -> bool:
        is_recent = asyncio.get_running_loop().time() < self._settled_until_s
        is_overdue = self._dispatcher.is_overdue(seat.facts.generator_id, self._clock.now_s())
        return is_recent and not is_overdue and self._settled == self._seen(state)

    def _seen(self, state: RunState) -> tuple[int, ...]:
        return (self._num_reports, state.num_changes, state.run.policy_version, state.run.history, state.run.is_closed)


def _retrieve(task: asyncio.Task[None]) -> None:
    """Retrieve a task's error, which its caller may no longer wait for."""
    if not task.cancelled():
        task.exception()


def _suffix() -> str:
    return secrets.token_hex(LEASE_SECRET_BYTES)
