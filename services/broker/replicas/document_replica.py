"""Holds a document inside one broker process: a copy of its records, changed by one transaction after another.

Promises:
- `transact` decides on the copy and commits against the mark of that copy; if another process was first, it applies
  the difference and decides again. Nothing is answered before it is stored.
- Operations that arrive during a commit are decided in order and committed together by the next one. A failed one
  leaves no trace and does not affect the others.
- After a commit of unknown outcome (the store failed, or took too long) the copy returns to its previous state,
  and the next call begins with the store's changes since: that commit, if it happened.
- Loading a copy proceeds in slices, between which other tasks run, however long it takes and even if its callers are
  gone; the deadlines of this process are paused meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from penstock.errors import PenstockError, ServiceUnavailableError, UnknownRunError
from services.broker.records.run_clock import Reading, RunClock
from services.broker.records.store import ConflictError, Delta, LostMarkError, Mark, RetiredError, Snapshot, Store
from services.broker.replicas.deadlines import Deadlines

TRANSACTION_TIMEOUT_S = 8.0
MAX_ATTEMPTS = 200
MAX_BATCH_OPERATIONS = 256
MAX_DECIDING_S = 0.02
"""After this CPU time no further operation joins a batch: other tasks run while it is committed."""


class Document(Protocol):
    """A copy of a document, and its changes since the last commit; see `RunState` for what each call does."""

    @property
    def is_changed(self) -> bool:
        """Whether there is anything to commit."""
        ...

    @property
    def only_grew(self) -> bool:
        """Whether the changes are nothing that anyone waits for."""
        ...

    def keep(self) -> None:
        """Keep the current operation."""
        ...

    def undo(self) -> None:
        """Undo the current operation."""
        ...

    def delta(self) -> Delta:
        """All changes since the last commit."""
        ...

    def settle(self) -> None:
        """The delta is stored."""
        ...

    def rollback(self) -> None:
        """Return to the last commit."""
        ...

    def take_over(self, snapshot: Snapshot) -> Iterator[None]:
        """Apply the store's contents slice by slice."""
        ...


S = TypeVar("S", bound=Document)
_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class Request(Generic[S]):
    """An operation that waits for its commit."""

    operation: Callable[[S], Any]
    answer: asyncio.Future[Any]
    must_verify: bool = False
    may_create: bool = False
    """Whether it also works on an empty copy, if the document does not exist."""
    needs_books: bool = False
    """Whether it reads the audit counters."""
    take: Callable[[asyncio.Future[Any]], None] | None = None
    """Called with the answer at once, of an operation that followed others."""
    result: Any = None
    error: PenstockError | None = None

    @property
    def is_alone(self) -> bool:
        """Whether it is a batch of its own."""
        return self.may_create or self.needs_books

    def finish(self, error: BaseException | None) -> None:
        """Answer with the result, or with the error; does nothing if the caller is gone."""
        if self.answer.done():
            return
        if isinstance(error, asyncio.CancelledError):
            self.answer.cancel()
        elif error is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(self.result)
        if self.take is not None:
            self.take(self.answer)


class Replica(Generic[S]):
    """See the module. A subclass adds to it by the first group of methods."""

    def __init__(self, run_id: str, *, name: str, make: Callable[[], S], store: Store, clock: RunClock) -> None:
        """`run_id` is the document's id in the store, `name` what errors call it, `make` returns an empty copy."""
        self.run_id = run_id
        self.store = store
        self.clock = clock
        self.num_commits = self.num_conflicts = 0
        """Commits tried, and those of them that another process was before."""
        self.last_used_s = clock.monotonic_s()
        """Times of this process's housekeeping are on its monotonic clock."""
        self.copy: S | None = None
        """The current copy, for hints only: it may be behind the store. None if not loaded."""
        self._name = name
        self._make = make
        self._mark: Mark | None = None
        self._is_doubtful = False
        """Whether the store may have a commit that the copy lacks."""
        self._books: Mapping[str, int] = {}
        """The audit counters, while an operation reads them."""
        self._deadlines = Deadlines(name)
        self._waiting: deque[Request[S]] = deque()
        self._worker: asyncio.Task[None] | None = None

    # -- what a subclass adds ------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """The copy was loaded, or changed beyond growth."""

    def _stored(self, state: S, delta: Delta) -> None:
        """The store has the changes."""

    def _follow_up(self, state: S) -> list[Request[S]]:
        """Further operations on a batch just decided, which are committed together with it."""
        return []

    async def _begin(self) -> None:
        """An operation is about to create the document."""

    def _retired(self, state: S, group_ids: Collection[str]) -> None:
        """Ids that the rolled-back changes treated as new belong to retired groups."""

    def _tell_time(self, reading: Reading) -> None:
        """The document's clock was read with it."""

    # -- transactions --------------------------------------------------------------------------------------------------

    async def transact(
        self,
        operation: Callable[[S], _T],
        *,
        must_verify: bool = True,
        may_create: bool = False,
        needs_books: bool = False,
    ) -> _T:
        """Run an operation and commit what it changed; returns its result. A cancelled caller does not split a commit.

        Args:
            operation: may run several times; affects only the state.
            must_verify: ask the store even if nothing changed. False if "nothing to do" is not reported.
            may_create: run it on an empty state if the document does not exist.
            needs_books: have the audit counters of the state's commit in `_books`.

        Raises:
            UnknownRunError: no such document.
            ServiceUnavailableError: the store is unavailable, or other processes kept committing first.
            PenstockError: any error of the operation on an up-to-date copy.
        """
        return await self.answered(
            self.enqueue(operation, must_verify=must_verify, may_create=may_create, needs_books=needs_books)
        )

    def enqueue(
        self,
        operation: Callable[[S], _T],
        *,
        must_verify: bool = True,
        may_create: bool = False,
        needs_books: bool = False,
    ) -> asyncio.Future[_T]:
        """The first half of `transact`: the operation is decided before any task runs that is started after it."""
        self.last_used_s = self.clock.monotonic_s()
        answer: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._waiting.append(Request(operation, answer, must_verify, may_create, needs_books))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        return answer

    async def answered(self, answer: asyncio.Future[_T]) -> _T:
        """The second half: the result of an operation that was enqueued just now."""
        with self._deadlines.within(TRANSACTION_TIMEOUT_S):
            return await answer

    async def _work(self) -> None:
        """Commit batch after batch until nothing waits."""
        try:
            while self._waiting:
                batch = self._next_batch()
                try:
                    with self._deadlines.within(TRANSACTION_TIMEOUT_S):
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

    def _next_batch(self) -> list[Request[S]]:
        """The next batch: all waiting requests in order, or an opening or audit alone."""
        batch: list[Request[S]] = []
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

    async def _settle(self, batch: list[Request[S]]) -> None:
        """Decide, commit and answer a batch."""
        for _ in range(MAX_ATTEMPTS):
            if not batch:
                return
            state = await self._load(may_create=batch[0].may_create)
            if batch[0].needs_books and not await self._read_books(state):
                continue
            is_sound = self._decide_for_a_while(state, batch)
            if is_sound and state.is_changed:
                followers = self._follow_up(state)
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
        raise ServiceUnavailableError(f"{self._name}: other brokers changed it first, {MAX_ATTEMPTS} times")

    async def _read_books(self, state: S) -> bool:
        """Read the audit counters, and bring the copy to their commit; False if it is beyond that already."""
        found = await self.store.books(self.run_id)
        if found is None or found[0] != self._mark:
            await self._refresh(state)
        if found is None or found[0] != self._mark:
            return False
        self._books = found[1]
        return True

    def _decide_for_a_while(self, state: S, batch: list[Request[S]]) -> bool:
        """Decide operations in order until MAX_DECIDING_S; the rest leaves the batch and waits for the next one."""
        is_sound, started_s = True, time.thread_time()
        for place, request in enumerate(batch):
            if place and time.thread_time() - started_s > MAX_DECIDING_S:
                self._waiting.extendleft(reversed(batch[place:]))
                del batch[place:]
                break
            is_sound = self._decide(state, request) and is_sound
        return is_sound

    def _decide(self, state: S, request: Request[S]) -> bool:
        """Run one operation and keep its changes; False if it crashed, which leaves the copy in doubt."""
        request.result, request.error = None, None
        try:
            request.result = request.operation(state)
            state.keep()
        except PenstockError as error:
            state.undo()
            request.error = error
        except Exception as error:
            request.finish(error)
            return False
        return True

    async def _is_behind(self, state: S, batch: Sequence[Request[S]]) -> bool:
        """Whether a batch without changes was decided on an outdated copy, which is now brought up to date."""
        if self._mark is None or not any(request.must_verify or request.error is not None for request in batch):
            return False
        return await self._refresh(state)

    async def _load(self, *, may_create: bool) -> S:
        """The copy, brought up to date if it was in doubt; an empty one if there is no document."""
        if self.copy is not None and self._is_doubtful:
            await self._refresh(self.copy)
        if self.copy is not None and self._mark is not None:
            return self.copy
        state = self._make()
        with self._deadlines.paused():
            snapshot = await self.store.load(self.run_id, None)
            if snapshot is not None:
                self._tell_time(snapshot.clock)
                await _take_over(state, snapshot)
        if snapshot is None:
            if not may_create:
                raise UnknownRunError(f"{self._name} is not open", run_id=self.run_id)
            self._forget()
            await self._begin()
            return state
        self.copy, self._mark = state, snapshot.mark
        self._changed()
        return state

    async def _commit(self, state: S) -> bool:
        delta, only_grew = state.delta(), state.only_grew
        self.num_commits += 1
        try:
            self._mark = await self.store.commit(self.run_id, self._mark, delta)
        except RetiredError as error:
            state.rollback()
            self._retired(state, error.group_ids)
            return False
        except ConflictError:
            self.num_conflicts += 1
            if self._mark is None:
                return False
            state.rollback()
            await self._refresh(state)
            return False
        self._stored(state, delta)
        state.settle()
        self.copy = state
        if not only_grew:
            # Growth is by far the most frequent change, and nothing waits for it.
            self._changed()
        return True

    async def _refresh(self, state: S) -> bool:
        """Bring the copy up to date, or drop it if it is too far behind; returns whether it was out of date."""
        try:
            snapshot = await self.store.load(self.run_id, self._mark)
        except LostMarkError:
            self._forget()
            return True
        if snapshot is None:
            self._forget()
            raise UnknownRunError(f"{self._name} is not open", run_id=self.run_id)
        self._tell_time(snapshot.clock)
        self._is_doubtful = False
        if snapshot.mark == self._mark:
            return False
        with self._deadlines.paused():
            await _take_over(state, snapshot)
        self._mark = snapshot.mark
        self._changed()
        return True

    def _go_back(self) -> None:
        """Return to the last known commit; the store will show whether there was another one."""
        if self.copy is not None:
            self.copy.rollback()
            self._is_doubtful = True

    def _forget(self) -> None:
        self.copy, self._mark, self._is_doubtful = None, None, False


async def _take_over(state: Document, snapshot: Snapshot) -> None:
    """Bring the copy to a snapshot; other tasks run between slices."""
    for _ in state.take_over(snapshot):
        await asyncio.sleep(0)


def _answer(batch: Sequence[Request[Any]]) -> None:
    """Followers first: a trainer waits for work, a producer only for its answer."""
    for request in sorted(batch, key=lambda request: request.take is None):
        request.finish(request.error)


def _fail(batch: Sequence[Request[Any]], error: BaseException) -> None:
    for request in batch:
        request.finish(error)
