"""A run inside one broker process: a copy of its records, changed by one transaction after another.

Promises:
- `transact` decides on the copy and commits against the mark of that copy; if another process was first, it takes over
  the difference and decides again. Nothing is answered before the store has it.
- A commit of unknown outcome (the store went away, the caller gave up) throws the copy away; the next call loads it
  anew.
- Listeners are woken by every change, whoever made it; changes of other processes are noticed by `poll`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from penstock.clock import Clock
from penstock.errors import PenstockError, ServiceUnavailableError, UnknownRunError
from penstock.v1 import broker_pb2, types_pb2
from services.broker.dispatch import DispatchPolicy
from services.broker.opening import create_run, reopen_run
from services.broker.peers import Peers
from services.broker.run_state import RunState
from services.broker.store import ConflictError, Mark, Store

TRANSACTION_TIMEOUT_S = 8.0
MAX_ATTEMPTS = 200
MAX_CACHED_PROMPTS = 1024

_T = TypeVar("_T")


class RunHub:
    """See the module."""

    def __init__(self, run_id: str, *, store: Store, dispatch: DispatchPolicy, clock: Clock) -> None:
        self.run_id = run_id
        self.store = store
        self.clock = clock
        self.num_conflicts = 0
        self.last_used_s = clock.now_s()
        self._dispatch = dispatch
        self._state: RunState | None = None
        self._mark: Mark | None = None
        self._lock = asyncio.Lock()
        self._listeners: set[asyncio.Event] = set()
        self._prompts: OrderedDict[str, types_pb2.Prompt] = OrderedDict()
        self.peers = Peers(run_id, store=store, clock=clock)

    # -- listening -----------------------------------------------------------------------------------------------------

    @contextmanager
    def listening(self, event: asyncio.Event | None = None) -> Iterator[asyncio.Event]:
        """An event (the given one, or a new one) that every change of the run sets; the listener clears it."""
        event = event or asyncio.Event()
        self._listeners.add(event)
        try:
            yield event
        finally:
            self._listeners.discard(event)

    @property
    def num_listeners(self) -> int:
        """Streams that listen."""
        return len(self._listeners)

    def wake(self) -> None:
        """Set every listener's event."""
        for event in self._listeners:
            event.set()

    @property
    def copy(self) -> RunState | None:
        """The copy as it stands, for hints only: it may be behind the store. None when nothing is loaded."""
        return self._state

    # -- transactions --------------------------------------------------------------------------------------------------

    async def open(self, request: broker_pb2.OpenRunRequest) -> broker_pb2.OpenRunResponse:
        """Create the run or re-attach to it; see `opening`."""

        def reopen(state: RunState) -> broker_pb2.OpenRunResponse:
            return reopen_run(state, request, self.clock.now_s())

        def create(state: RunState) -> broker_pb2.OpenRunResponse:
            return create_run(state, request, self.clock.now_s())

        return await self._run(self._attempts(reopen, must_verify=True, create=create))

    async def transact(self, operation: Callable[[RunState], _T], *, must_verify: bool = True) -> _T:
        """Run an operation and commit what it changed; returns its result.

        Args:
            operation: may run several times; has no effect but on the state.
            must_verify: ask the store even when nothing changed. False where "nothing to do" is told to nobody.

        Raises:
            UnknownRunError: no such run.
            ServiceUnavailableError: the store is away, or other processes kept being first.
            PenstockError: what the operation raised on an up-to-date copy.
        """
        return await self._run(self._attempts(operation, must_verify=must_verify, create=None))

    async def poll(self) -> None:
        """Take over what other processes changed; drops the copy of a run that is gone."""
        if self._state is not None:
            try:
                await self._run(self._poll())
            except UnknownRunError:
                self.wake()

    async def _poll(self) -> None:
        if self._state is not None:
            await self._refresh(self._state)

    async def _run(self, work: Coroutine[None, None, _T]) -> _T:
        """Run under the lock. A caller that goes away does not tear a commit in two: the work ends by itself."""
        self.last_used_s = self.clock.now_s()
        task = asyncio.ensure_future(self._locked(work))
        task.add_done_callback(_retrieve)
        return await asyncio.shield(task)

    async def _locked(self, work: Coroutine[None, None, _T]) -> _T:
        try:
            async with asyncio.timeout(TRANSACTION_TIMEOUT_S), self._lock:
                return await work
        except TimeoutError as error:
            raise ServiceUnavailableError(f"run {self.run_id!r}: no answer in {TRANSACTION_TIMEOUT_S} s") from error
        finally:
            work.close()

    async def _attempts(
        self,
        operation: Callable[[RunState], _T],
        *,
        must_verify: bool,
        create: Callable[[RunState], _T] | None,
    ) -> _T:
        for _ in range(MAX_ATTEMPTS):
            state = await self._load(may_create=create is not None)
            act = create if create is not None and self._mark is None else operation
            try:
                result = act(state)
            except PenstockError:
                state.rollback()
                # The error may come from a copy that is behind.
                if self._mark is None or not await self._refresh(state):
                    raise
                continue
            except BaseException:
                self._forget()
                raise
            if not state.is_changed:
                if must_verify and await self._refresh(state):
                    continue
                return result
            if await self._commit(state):
                return result
        raise ServiceUnavailableError(f"run {self.run_id!r}: {MAX_ATTEMPTS} commits lost against other brokers")

    async def _load(self, *, may_create: bool) -> RunState:
        if self._state is not None and self._mark is not None:
            return self._state
        snapshot = await self.store.load(self.run_id, None)
        state = RunState(self._dispatch)
        if snapshot is None:
            if not may_create:
                raise UnknownRunError(f"run {self.run_id!r} is not open", run_id=self.run_id)
            self._mark = None
            return state
        state.apply(snapshot)
        self._state, self._mark = state, snapshot.mark
        return state

    async def _commit(self, state: RunState) -> bool:
        delta = state.delta()
        try:
            self._mark = await self.store.commit(self.run_id, self._mark, delta)
        except ConflictError:
            self.num_conflicts += 1
            if self._mark is None:
                return False
            state.rollback()
            await self._refresh(state)
            return False
        except BaseException:
            self._forget()
            raise
        state.settle()
        self._state = state
        self.wake()
        return True

    async def _refresh(self, state: RunState) -> bool:
        """Bring the copy up to date; returns whether there was anything to take over."""
        try:
            snapshot = await self.store.load(self.run_id, self._mark)
        except BaseException:
            self._forget()
            raise
        if snapshot is None:
            self._forget()
            raise UnknownRunError(f"run {self.run_id!r} is not open", run_id=self.run_id)
        if snapshot.mark == self._mark:
            return False
        state.apply(snapshot)
        self._mark = snapshot.mark
        self.wake()
        return True

    def _forget(self) -> None:
        self._state, self._mark = None, None

    # -- prompts -------------------------------------------------------------------------------------------------------

    async def prompts(self, group_ids: Sequence[str]) -> dict[str, types_pb2.Prompt]:
        """Prompts by group id; groups given up meanwhile are missing."""
        missing = [group_id for group_id in dict.fromkeys(group_ids) if group_id not in self._prompts]
        if missing:
            for group_id, prompt in zip(missing, await self.store.prompts(self.run_id, missing), strict=True):
                if prompt is not None:
                    self._prompts[group_id] = types_pb2.Prompt.FromString(prompt)
        found = {group_id: self._prompts[group_id] for group_id in group_ids if group_id in self._prompts}
        for group_id in found:
            self._prompts.move_to_end(group_id)
        while len(self._prompts) > MAX_CACHED_PROMPTS:
            self._prompts.popitem(last=False)
        return found


def _retrieve(task: asyncio.Future[_T]) -> None:
    """A caller that went away no longer wants the error; one that stayed gets it through the shield."""
    if not task.cancelled():
        task.exception()
