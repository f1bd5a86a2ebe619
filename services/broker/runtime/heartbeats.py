"""Takes the heartbeats of a run's holders. One counts from the moment it is read, whatever commits take.

Promises:
- Noting a heartbeat waits for nothing. Renewals are committed in the background, those of many holders together.
- This process ends no lease named by a heartbeat that it has read: the operation that expires leases renews first.
- While renewals cannot be stored, `next_turn` says so, and other processes wait for this one (`run_clock`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from penstock.errors import PenstockError, ServiceUnavailableError
from penstock.stall_limits import SilenceLimit
from services.broker.operations import renewal, scores
from services.broker.operations.renewal import Heard
from services.broker.records.run_clock import RunClock
from services.broker.state.run_state import RunState

PACE_S = 0.02
"""Least time between two commits of renewals."""

_OnStored = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Note(ABC):
    """What a heartbeat said of its holder's leases."""

    @property
    @abstractmethod
    def holder_id(self) -> str:
        """Who sent it."""

    @abstractmethod
    def renew(self, state: RunState, clock: RunClock) -> _OnStored:
        """Renew the leases, inside an operation; returns what to do once that is stored."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GeneratorNote(Note):
    """A generator's."""

    heard: Heard
    on_silent: Callable[[Sequence[str], SilenceLimit], None]
    """Called with its leases that are left to expire, as no token came, and the limit."""

    @property
    def holder_id(self) -> str:
        """See `Note`."""
        return self.heard.holder_id

    def renew(self, state: RunState, clock: RunClock) -> _OnStored:
        """See `Note`."""
        silent = renewal.renew(state, self.heard, clock.now_s(), unbroken_since_s=clock.unbroken_since_s)
        return partial(self.on_silent, silent, self.heard.silence(state.limits)) if silent else _nothing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerNote(Note):
    """A reward worker's."""

    worker_id: str
    lease_ids: Sequence[str]

    @property
    def holder_id(self) -> str:
        """See `Note`."""
        return self.worker_id

    def renew(self, state: RunState, clock: RunClock) -> _OnStored:
        """See `Note`."""
        scores.renew_scoring(state, self.worker_id, self.lease_ids, clock.now_s())
        return _nothing


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiting:
    """The latest note of a holder whose renewals are not stored yet."""

    note: Note
    turn: int
    """When it was noted."""
    oldest_turn: int
    """When its oldest predecessor was that is not stored either."""


Renewed = Sequence[tuple[Note, _OnStored]]
"""What one operation renewed by."""


class _Transact(Protocol):
    """`RunReplica.transact`, as it is called here."""

    def __call__(self, operation: Callable[[RunState], Renewed], *, must_verify: bool) -> Awaitable[Renewed]:
        """See `RunReplica`."""


class Heartbeats:
    """The heartbeats of one run that were read and whose renewals are not stored yet: the latest of each holder."""

    def __init__(self, transact: _Transact, clock: RunClock) -> None:
        self._transact, self._clock = transact, clock
        self._waiting: dict[tuple[type[Note], str], _Waiting] = {}
        self._writer: asyncio.Task[None] | None = None
        self._turn = 0

    def note(self, note: Note) -> None:
        """Take a heartbeat that names leases."""
        key = type(note), note.holder_id
        known = self._waiting.get(key)
        oldest_turn = self._turn if known is None else known.oldest_turn
        self._waiting[key] = _Waiting(note=note, turn=self._turn, oldest_turn=oldest_turn)
        if self._writer is None:
            self._writer = asyncio.create_task(self._write())

    @property
    def has_waiting(self) -> bool:
        """Whether anything that was noted is not stored."""
        return bool(self._waiting)

    def next_turn(self) -> bool:
        """Begin another turn: whether everything that was noted before the present one began is stored."""
        is_stored = all(waiting.oldest_turn == self._turn for waiting in self._waiting.values())
        self._turn += 1
        return is_stored

    def renew(self, state: RunState) -> Renewed:
        """Renew, inside an operation, by all that waits; call `settle` once it is stored."""
        notes = [waiting.note for waiting in self._waiting.values()]
        return [(note, note.renew(state, self._clock)) for note in notes]

    def settle(self, renewed: Renewed) -> None:
        """Forget what is stored now."""
        for note, on_stored in renewed:
            on_stored()
            key = type(note), note.holder_id
            waiting = self._waiting.get(key)
            if waiting is not None and waiting.note is note:
                del self._waiting[key]
            elif waiting is not None:
                waiting.oldest_turn = waiting.turn

    async def _write(self) -> None:
        """Store renewals until none wait. What fails is tried again with the next heartbeat, and by the caretaker."""
        try:
            while self._waiting:
                self.settle(await self._transact(self.renew, must_verify=False))
                await asyncio.sleep(PACE_S)
        except ServiceUnavailableError:
            pass
        except PenstockError:
            # The run is gone, and its leases with it.
            self._waiting.clear()
        finally:
            self._writer = None


def _nothing() -> None:
    """Nothing is to be done once it is stored."""
