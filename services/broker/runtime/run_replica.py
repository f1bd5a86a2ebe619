"""Holds a run inside one broker process: a copy of its records, changed by one transaction after another.

Promises:
- `transact` decides on the copy and commits against the mark of that copy; if another process was first, it applies
  the difference and decides again. Nothing is answered before it is stored.
- Operations that arrive during a commit are decided in order and committed together by the next one. A failed one
  leaves no trace and does not affect the others.
- After a commit of unknown outcome (the store failed, or took too long) the copy returns to its previous state,
  and the next call begins with the store's changes since: that commit, if it happened.
- Loading a copy proceeds in slices, between which other tasks run, however long it takes and even if its callers are
  gone; the deadlines of this process are paused meanwhile.
- Listeners are woken by every change of any process, except growth of samples under way; `poll` detects changes of
  other processes.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.clock import Clock
from penstock.errors import PenstockError, ServiceUnavailableError, UnknownRunError
from penstock.v1 import broker_pb2
from services.broker.fleet.dispatcher import Dispatcher
from services.broker.fleet.worker_registry import Peers
from services.broker.operations.lifecycle import create_run, reopen_run
from services.broker.records.run_clock import MAX_GAP_S, RunClock, max_gap_s
from services.broker.records.store import ConflictError, LostMarkError, Mark, RetiredError, Snapshot, Store
from services.broker.runtime.compactor import Compactor
from services.broker.runtime.deadlines import Deadlines
from services.broker.runtime.heartbeats import Heartbeats
from services.broker.runtime.lease_rounds import LeaseRounds
from services.broker.runtime.payload_cache import PayloadCache
from services.broker.state.run_state import RunState

TRANSACTION_TIMEOUT_S = 8.0
MAX_ATTEMPTS = 200
MAX_BATCH_OPERATIONS = 256

_T = TypeVar("_T")
Follower = Callable[[RunState], Callable[[RunState], Any] | None]
"""Returns an operation if it has something to do."""


@dataclass(slots=True, eq=False)
class _Request:
    """An operation that waits for its commit."""

    operation: Callable[[RunState], Any]
    answer: asyncio.Future[Any]
    must_verify: bool = False
    may_create: bool = False
    """Whether it also works on an empty copy, if the run does not exist."""
    needs_books: bool = False
    """Whether it reads the audit counters."""
    is_follower: bool = False
    result: Any = None
    error: PenstockError | None = None

    @property
    def is_alone(self) -> bool:
        """Whether it is a batch of its own."""
        return self.may_create or self.needs_books


class RunReplica:
    """See the module."""

    def __init__(self, run_id: str, *, store: Store, clock: Clock, broker: str = "") -> None:
        self.run_id = run_id
        self._broker = broker
        """Name of the process among the brokers that serve the run (`run_clock`)."""
        self._is_serving = False
        self.store = store
        self.clock = RunClock(clock)
        self.num_conflicts = 0
        self.last_used_s = clock.monotonic_s()
        """Times of this process's housekeeping are on its monotonic clock."""
        self.books_read_s = -math.inf
        """When the caretaker last read the audit counters."""
        self.observed_s = -math.inf
        """When it last set the metrics of the run's queues and stalls."""
        self.copy: RunState | None = None
        """The current copy, for hints only: it may be behind the store. None if not loaded."""
        self._mark: Mark | None = None
        self._is_doubtful = False
        """Whether the store may have a commit that the copy lacks."""
        self._books: Mapping[str, int] = {}
        """The audit counters, while an operation reads them."""
        self._deadlines = Deadlines(f"run {run_id!r}")
        self.heartbeats = Heartbeats(self.transact, self.clock)
        self._waiting: deque[_Request] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._listeners: dict[asyncio.Event, bool] = {}
        """Events to set, and whether only at the run's end."""
        self._followers: dict[Follower, Callable[[asyncio.Future[Any]], None]] = {}
        """In order of arrival: woken in that order, so that the first to ask is served first."""
        self.num_groups_coming = 0
        """Groups of puts that are being stored."""
        self.coming_bytes = 0
        """Payload of puts that are being stored."""
        self.receiving_bytes = 0
        """Payload of puts that arrive in parts, until they are stored; see `trajectory_parts`."""
        self.payloads = PayloadCache(run_id, store=store)
        self.compactor = Compactor(run_id)
        self.peers = Peers(run_id, store=store, clock=self.clock)
        self.dispatcher = Dispatcher(self.peers)
        self.lease_rounds = LeaseRounds(self.transact, self.dispatcher, self.clock)

    # -- listening -----------------------------------------------------------------------------------------------------

    @contextmanager
    def listening(self, event: asyncio.Event | None = None, *, only_end: bool = False) -> Iterator[asyncio.Event]:
        """An event (the given one, or a new one) that changes of the run set; the listener clears it.

        With `only_end` only the run's closing or removal sets it: otherwise every commit would wake the many streams
        that wait for nothing else.
        """
        event = event or asyncio.Event()
        self._listeners[event] = only_end
        try:
            yield event
        finally:
            self._listeners.pop(event, None)

    @contextmanager
    def following(self, follower: Follower, take: Callable[[asyncio.Future[Any]], None]) -> Iterator[None]:
        """Inside the block, `follower` is called after every batch that changes the run, and may return an operation.

        The operation is part of the same commit: work that one call makes ready and another waits for is delivered
        without a separate round trip. `take` gets the operation's answer. Before that, the follower must not return
        another operation.
        """
        self._followers[follower] = take
        try:
            yield
        finally:
            del self._followers[follower]

    @property
    def num_listeners(self) -> int:
        """Number of streams that listen."""
        return len(self._listeners)

    def wake(self) -> None:
        """Set listeners' events."""
        is_ended = self.copy is None or self.copy.run.is_closed
        for event, only_end in self._listeners.items():
            if is_ended or not only_end:
                event.set()

    @property
    def is_closed(self) -> bool:
        """Whether the run is closed according to the copy, a hint too; False if not loaded."""
        return self.copy is not None and self.copy.run.is_closed

    # -- transactions --------------------------------------------------------------------------------------------------

    async def open(self, request: broker_pb2.OpenRunRequest) -> broker_pb2.OpenRunResponse:
        """Create the run or re-attach to it; see `lifecycle`."""

        def operation(state: RunState) -> broker_pb2.OpenRunResponse:
            enter = create_run if self._mark is None else reopen_run
            return enter(state, request, self.clock.now_s())

        return await self.transact(operation, may_create=True)

    async def transact(
        self,
        operation: Callable[[RunState], _T],
        *,
        must_verify: bool = True,
        may_create: bool = False,
        needs_books: bool = False,
    ) -> _T:
        """Run an operation and commit what it changed; returns its result. A cancelled caller does not split a commit.

        Args:
            operation: may run several times; affects only the state.
            must_verify: ask the store even if nothing changed. False if "nothing to do" is not reported.
            may_create: run it on an empty state if the run does not exist.
            needs_books: have the audit counters of the state's commit in `_books`.

        Raises:
            UnknownRunError: no such run.
            ServiceUnavailableError: the store is unavailable, or other processes kept committing first.
            PenstockError: any error of the operation on an up-to-date copy.
        """
        self.last_used_s = self.clock.monotonic_s()
        answer: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(operation, answer, must_verify, may_create, needs_books))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        async with self._deadlines.within(TRANSACTION_TIMEOUT_S):
            return await answer

    async def keep_time(self) -> None:
        """Advance the run's clock in the store, as a broker that serves the run while streams listen, and read it."""
        gap_s = MAX_GAP_S if self.copy is None else max_gap_s(self.copy.limits)
        is_serving, is_stored = bool(self._listeners), self.heartbeats.next_turn()
        is_leaving = self._is_serving and not is_serving
        broker = self._broker if is_leaving or (is_serving and is_stored) else ""
        self.clock.take(await self.store.tick(self.run_id, gap_s, broker=broker, is_leaving=is_leaving))
        self._is_serving = is_serving

    async def attend(self) -> None:
        """Serve the run from now on; a stream calls this, while it listens, before it hands out leases."""
        if not self._is_serving:
            await self.keep_time()

    async def leave(self) -> None:
        """Serve the run no more: the process stops, or is done with the run."""
        if self._is_serving:
            self._is_serving = False
            await self.store.tick(self.run_id, MAX_GAP_S, broker=self._broker, is_leaving=True)

    async def poll(self) -> None:
        """Apply changes of other processes; drops the copy of a deleted run."""
        if self.copy is not None:
            try:
                await self.transact(lambda _state: None)
            except UnknownRunError:
                self.wake()

    async def read_books(self, reading: Callable[[RunState, Mapping[str, int]], _T]) -> _T:
        """The result of `reading` on the run and its audit counters, both as of the same commit.

        Raises:
            UnknownRunError: no such run.
            ServiceUnavailableError: the store is unavailable, or other processes kept committing in between.
        """
        return await self.transact(lambda state: reading(state, self._books), must_verify=False, needs_books=True)

    async def _work(self) -> None:
        """Commit batch after batch until nothing waits."""
        try:
            while self._waiting:
                batch = self._next_batch()
                try:
                    async with self._deadlines.within(TRANSACTION_TIMEOUT_S):
                        await self._settle(batch)
                except PenstockError as error:
                    self._go_back()
                    _fail(batch, error)
                except BaseException as error:
                    self._forget()
                    _fail(batch, error)
                    if not isinstance(error, Exception):
                        raise
        finally:
            self._worker = None

    def _next_batch(self) -> list[_Request]:
        """The next batch: all waiting requests in order, or an opening or audit alone."""
        batch: list[_Request] = []
        while self._waiting and len(batch) < MAX_BATCH_OPERATIONS:
            request = self._waiting[0]
            if request.is_alone and batch:
                break
            self._waiting.popleft()
            if request.answer.done():
                continue
            batch.append(request)
            if request.is_alone:
                break
        return batch

    async def _settle(self, batch: list[_Request]) -> None:
        """Decide, commit and answer a batch."""
        for _ in range(MAX_ATTEMPTS):
            if not batch:
                return
            state = await self._load(may_create=batch[0].may_create)
            if batch[0].needs_books and not await self._read_books(state):
                continue
            is_sound = all([self._decide(state, request) for request in batch])
            if is_sound and state.is_changed:
                followers = self._ask_followers(state)
                batch += followers
                is_sound = all([self._decide(state, request) for request in followers])
            if not is_sound:
                self._forget()
                batch = [request for request in batch if not request.answer.done()]
            elif state.is_changed:
                if await self._commit(state):
                    _answer(batch)
                    return
            elif not await self._is_behind(state, batch):
                _answer(batch)
                return
        raise ServiceUnavailableError(f"run {self.run_id!r}: other brokers changed it first, {MAX_ATTEMPTS} times")

    def _ask_followers(self, state: RunState) -> list[_Request]:
        """The followers' operations on the batch just decided; committed together with it."""
        requests: list[_Request] = []
        for follower, take in self._followers.items():
            operation = follower(state)
            if operation is not None:
                answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                answer.add_done_callback(take)
                requests.append(_Request(operation, answer, is_follower=True))
        return requests

    async def _read_books(self, state: RunState) -> bool:
        """Read the audit counters, and bring the copy to their commit; False if it is beyond that already."""
        found = await self.store.books(self.run_id)
        if found is None or found[0] != self._mark:
            await self._refresh(state)
        if found is None or found[0] != self._mark:
            return False
        self._books = found[1]
        return True

    def _decide(self, state: RunState, request: _Request) -> bool:
        """Run one operation and keep its changes; False if it crashed, which leaves the copy in doubt."""
        request.result, request.error = None, None
        try:
            request.result = request.operation(state)
            state.keep()
        except PenstockError as error:
            state.undo()
            request.error = error
        except Exception as error:
            _set_error(request.answer, error)
            return False
        return True

    async def _is_behind(self, state: RunState, batch: Sequence[_Request]) -> bool:
        """Whether a batch without changes was decided on an outdated copy, which is now brought up to date."""
        if self._mark is None or not any(request.must_verify or request.error is not None for request in batch):
            return False
        return await self._refresh(state)

    async def _load(self, *, may_create: bool) -> RunState:
        """The copy, brought up to date if it was in doubt; an empty one if the run does not exist."""
        if self.copy is not None and self._is_doubtful:
            await self._refresh(self.copy)
        if self.copy is not None and self._mark is not None:
            return self.copy
        state = RunState()
        with self._deadlines.paused():
            snapshot = await self.store.load(self.run_id, None)
            if snapshot is not None:
                self.clock.take(snapshot.clock)
                await _take_over(state, snapshot)
        if snapshot is None:
            if not may_create:
                raise UnknownRunError(f"run {self.run_id!r} is not open", run_id=self.run_id)
            self._forget()
            await self.keep_time()
            return state
        self.copy, self._mark = state, snapshot.mark
        self.wake()
        return state

    async def _commit(self, state: RunState) -> bool:
        delta, only_grew = state.delta(), state.only_grew
        try:
            self._mark = await self.store.commit(self.run_id, self._mark, delta)
        except RetiredError as error:
            state.rollback()
            state.known_retired.update(error.group_ids)
            return False
        except ConflictError:
            self.num_conflicts += 1
            if self._mark is None:
                return False
            state.rollback()
            await self._refresh(state)
            return False
        state.settle()
        state.known_retired.clear()
        self.copy = state
        if not only_grew:
            # Growth is by far the most frequent change, and nothing waits for it.
            self.wake()
        return True

    async def _refresh(self, state: RunState) -> bool:
        """Bring the copy up to date, or drop it if it is too far behind; returns whether it was out of date."""
        try:
            snapshot = await self.store.load(self.run_id, self._mark)
        except LostMarkError:
            self._forget()
            return True
        if snapshot is None:
            self._forget()
            raise UnknownRunError(f"run {self.run_id!r} is not open", run_id=self.run_id)
        self.clock.take(snapshot.clock)
        self._is_doubtful = False
        if snapshot.mark == self._mark:
            return False
        with self._deadlines.paused():
            await _take_over(state, snapshot)
        self._mark = snapshot.mark
        self.wake()
        return True

    def forget(self) -> None:
        """Drop the copy of a deleted run, and wake everything that waits for its end."""
        self._forget()
        self.payloads = PayloadCache(self.run_id, store=self.store)
        self.wake()

    def _go_back(self) -> None:
        """Return to the last known commit; the store will show whether there was another one."""
        if self.copy is not None:
            self.copy.rollback()
            self._is_doubtful = True

    def _forget(self) -> None:
        self.copy, self._mark, self._is_doubtful = None, None, False


async def _take_over(state: RunState, snapshot: Snapshot) -> None:
    """Bring the copy to a snapshot; other tasks run between slices."""
    for _ in state.take_over(snapshot):
        await asyncio.sleep(0)


def _answer(batch: Sequence[_Request]) -> None:
    """Followers first: a trainer waits for work, a producer only for its answer."""
    for request in sorted(batch, key=lambda request: not request.is_follower):
        if request.error is not None:
            _set_error(request.answer, request.error)
        elif not request.answer.done():
            request.answer.set_result(request.result)


def _fail(batch: Sequence[_Request], error: BaseException) -> None:
    for request in batch:
        _set_error(request.answer, error)


def _set_error(answer: asyncio.Future[Any], error: BaseException) -> None:
    """Does nothing if the caller is gone."""
    if isinstance(error, asyncio.CancelledError):
        answer.cancel()
    elif not answer.done():
        answer.set_exception(error)
