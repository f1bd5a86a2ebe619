"""Holds a run inside one broker process: its replica, who listens to it, and what serves it.

Promise: listeners are woken by every change of any process that concerns them, except growth of samples under way;
`poll` detects changes of other processes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from penstock import tracing
from penstock.clock import Clock
from penstock.errors import UnknownRunError
from penstock.process.time_limits import Wake
from penstock.v1 import broker_pb2
from services.broker.fleet.dispatcher import Dispatcher
from services.broker.fleet.worker_registry import Peers
from services.broker.operations.lifecycle import create_run, reopen_run
from services.broker.records.run_clock import MAX_GAP_S, Reading, RunClock, max_gap_s
from services.broker.records.shard_ids import shard_id
from services.broker.records.store import Delta, SampleId, Store
from services.broker.replicas.document_replica import Replica, Request
from services.broker.rules.saturation import Saturation
from services.broker.runtime.compactor import Compactor
from services.broker.runtime.heartbeats import Heartbeats
from services.broker.runtime.lease_rounds import LeaseRounds
from services.broker.runtime.payload_cache import PayloadCache
from services.broker.runtime.stream_listeners import Listeners, Topic
from services.broker.shards.sealer import Sealer
from services.broker.state.run_state import RunState
from services.broker.traces.lives import Lives

_T = TypeVar("_T")
LOGPROB_BYTES = 4
Follower = Callable[[RunState], Callable[[RunState], Any] | None]
"""Returns an operation if it has something to do."""


class RunReplica(Replica[RunState]):
    """See the module."""

    def __init__(
        self, run_id: str, *, store: Store, clock: Clock, broker: str = "", saturation: Saturation | None = None
    ) -> None:
        super().__init__(run_id, name=f"run {run_id!r}", make=RunState, store=store, clock=RunClock(clock))
        self._broker = broker
        """Name of the process among the brokers that serve the run (`run_clock`)."""
        self._saturation = saturation or Saturation()
        """Of the process."""
        self._is_serving, self._may_be_known = False, True
        """Whether the store knows that it serves the run, and whether it may know: an answer may have been lost, or a
        process that had this one's name served the run when it was killed."""
        self._advancing: asyncio.Task[None] | None = None
        """The last advance of the run's clock."""
        self.books_read_s = -math.inf
        """When the caretaker last read the audit counters."""
        self.observed_s = -math.inf
        """When it last set the metrics of the run's queues and stalls."""
        self.kept_s = -math.inf
        """When it last kept the clock of the run without a copy of it."""
        self._has_ended = False
        """Whether the run was closed when that was looked at, of a run without a copy."""
        self.heartbeats = Heartbeats(self.transact, self.clock)
        self._followers: dict[Follower, Callable[[asyncio.Future[Any]], None]] = {}
        """In order of arrival: woken in that order, so that the first to ask is served first."""
        self.num_groups_coming = 0
        """Groups of puts that are being stored."""
        self.coming_bytes = 0
        """Payload of puts that are being stored."""
        self.receiving_bytes = 0
        """Payload of puts that arrive in parts, until they are stored; see `trajectory_parts`."""
        self.payloads = PayloadCache(run_id, store=store)
        self.compactor = Compactor(run_id, store)
        self.sealer = Sealer(run_id, self.transact, self.clock)
        self.peers = Peers(run_id, store=store, clock=self.clock)
        self.dispatcher = Dispatcher(self.peers)
        self.reviewing: asyncio.Task[None] | None = None
        """The last review of dispatch."""
        self.lease_rounds = LeaseRounds(self.transact, self.dispatcher, self.clock)
        self._lives = Lives(run_id)
        self.listeners = Listeners(self.lease_rounds.seats)
        self.num_keepers = 0
        """Blocks inside `kept`."""

    # -- listening -----------------------------------------------------------------------------------------------------

    def listening(self, event: Wake | None = None, *, topic: Topic = Topic.EVERYTHING) -> AbstractContextManager[Wake]:
        """An event (the given one, or a new one) that changes of the run set; the listener clears it."""
        return self.listeners.listening(event or Wake(), topic)

    def leasing(self, event: Wake, generator_id: str) -> AbstractContextManager[Wake]:
        """The same for a generator's lease stream."""
        return self.listeners.leasing(event, generator_id)

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

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside the block the caretaker keeps the run's clock here, though no stream listens."""
        self.num_keepers += 1
        try:
            yield
        finally:
            self.num_keepers -= 1

    @property
    def num_listeners(self) -> int:
        """Number of streams that listen."""
        return len(self.listeners)

    @property
    def has_holders(self) -> bool:
        """Whether a stream is of one who holds leases or takes groups: those who send tokens wait for the end only."""
        return self.listeners.has_holders

    @property
    def has_shards(self) -> bool:
        """Whether the run has token shards, and is open, according to the copy."""
        state = self.copy
        return state is not None and not state.run.is_closed and state.policy.token_shards > 1

    @property
    def row_bytes(self) -> int:
        """Bytes of routes and a reference's log-prob that come with a token, according to the copy; 0 without."""
        return 0 if self.copy is None else row_bytes(self.copy)

    def wake(self) -> None:
        """Set listeners' events, whatever they listen for."""
        self.listeners.wake_all(is_ended=self.copy is None or self.copy.run.is_closed)

    @property
    def is_closed(self) -> bool:
        """Whether the run is closed according to the copy, or to `note_end`; a hint too."""
        return self._has_ended if self.copy is None else self.copy.run.is_closed

    def note_end(self, *, is_closed: bool) -> None:
        """What the store says of the run; of one without a copy, streams that wait for the end hear it."""
        has_ended, self._has_ended = self._has_ended, is_closed
        if self.copy is None and is_closed and not has_ended:
            self.wake()

    def unload(self) -> bool:
        """Drop the copy, unless an operation is under way; returns whether there was one. The store has the run."""
        if self.copy is None or self._worker is not None:
            return False
        self._has_ended = self.is_closed
        self._forget()
        return True

    async def rest(self) -> None:
        """Nobody looks after the run here from now on: whoever uses the replica again begins with what is stored.

        Otherwise one that is still there by chance would go on with the time and the peers that it knew.
        """
        if self._worker is None:
            self.unload()
            await self.peers.forget_all()

    # -- transactions --------------------------------------------------------------------------------------------------

    async def open(self, request: broker_pb2.OpenRunRequest) -> broker_pb2.OpenRunResponse:
        """Create the run or re-attach to it; see `lifecycle`."""

        def operation(state: RunState) -> broker_pb2.OpenRunResponse:
            enter = create_run if self._mark is None else reopen_run
            return enter(state, request, self.clock.now_s())

        return await self.transact(operation, may_create=True)

    async def keep_time(self) -> None:
        """Advance the run's clock in the store, as a broker that serves the run while streams listen, and read it.

        Callers at the same time share one advance, and its failure.
        """
        # Where streams may wait in line, those that are open are not all.
        may_have_holders = self._is_serving and self._saturation.is_behind
        await self._advance(is_serving=self.has_holders or may_have_holders)

    async def learn_time(self) -> None:
        """Read the store's time before the first operation does: until then this process's own clock counts."""
        if self.clock.reading is None:
            self.clock.take(Reading(now_s=await self.store.now_s(self.run_id), unbroken_since_s=0.0))

    async def attend(self) -> None:
        """Serve the run from now on; a stream calls this, while it listens, before it hands out leases."""
        while self.has_holders and not self._is_serving:
            await self.keep_time()

    async def leave(self) -> None:
        """Serve the run no more: the process stops, or is done with the run."""
        if self._advancing is not None:
            await asyncio.wait([self._advancing])
        if self._may_be_known:
            await self._advance(is_serving=False)

    async def _advance(self, *, is_serving: bool) -> None:
        if self._advancing is None or self._advancing.done():
            self._advancing = asyncio.create_task(self._tick(is_serving=is_serving))
            self._advancing.add_done_callback(_retrieve)
        await asyncio.shield(self._advancing)

    async def _tick(self, *, is_serving: bool) -> None:
        gap_s = MAX_GAP_S if self.copy is None else max_gap_s(self.copy.limits)
        is_stored = self.heartbeats.next_turn()
        is_leaving = self._may_be_known and not is_serving
        # The first advance says only that others must wait for this process, whatever it has still to store.
        is_counted = is_serving and (is_stored or not self._is_serving)
        self._is_serving = self._is_serving and is_serving
        self._may_be_known = self._may_be_known or is_counted
        broker = self._broker if is_leaving or is_counted else ""
        is_behind = self._saturation.is_behind
        self.clock.take(
            await self.store.tick(self.run_id, gap_s, broker=broker, is_leaving=is_leaving, is_behind=is_behind)
        )
        self._is_serving = self._may_be_known = is_serving

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

    async def chunks(self, samples: Sequence[SampleId], token_shards: Sequence[int]) -> list[list[bytes]]:
        """What is stored of each sample: chunks from the token shard of its group, log-probs of a reference."""
        if not any(token_shards):
            return await self.store.chunks(self.run_id, samples)
        may_have_more = self.copy is None or self.copy.policy.needs_reference_logprobs
        with_run = await self.store.chunks(self.run_id, samples) if may_have_more else [[] for _ in samples]
        by_shard: dict[int, list[int]] = {}
        for position, shard in enumerate(token_shards):
            by_shard.setdefault(shard, []).append(position)
        parts: list[list[bytes]] = [[]] * len(samples)
        for shard, positions in by_shard.items():
            found = await self.store.chunks(shard_id(self.run_id, shard), [samples[at] for at in positions])
            for position, chunks in zip(positions, found, strict=True):
                # Log-probs without tokens would be no sample.
                parts[position] = chunks + with_run[position] if shard and chunks else chunks
        return parts

    def forget(self) -> None:
        """Drop the copy of a deleted run, and wake everything that waits for its end."""
        self._forget()
        self.payloads = PayloadCache(self.run_id, store=self.store)
        self.wake()

    # -- what a run adds to a replica ----------------------------------------------------------------------------------

    def _changed(self) -> None:
        if self.copy is None:
            self.wake()
        else:
            self._has_ended = False
            self.listeners.wake(self.copy)

    def _stored(self, state: RunState, delta: Delta) -> None:
        if delta.ended and tracing.is_on():
            self._lives.record(delta.ended, history=state.run.history, now_s=self.clock.now_s())

    def _follow_up(self, state: RunState) -> list[Request[RunState]]:
        requests: list[Request[RunState]] = []
        for follower, take in self._followers.items():
            operation = follower(state)
            if operation is not None:
                answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                requests.append(Request(operation, answer, take=take))
        return requests

    async def _begin(self) -> None:
        await self.keep_time()

    def _retired(self, state: RunState, group_ids: Collection[str]) -> None:
        state.known_retired.update(group_ids)

    def _tell_time(self, reading: Reading) -> None:
        self.clock.take(reading)


def row_bytes(state: RunState) -> int:
    """Bytes of routes and a reference's log-prob that come with a token of a run; 0 without."""
    return state.limits.row_bytes + (LOGPROB_BYTES if state.policy.needs_reference_logprobs else 0)


def _retrieve(task: asyncio.Task[None]) -> None:
    """Retrieve a task's error, which no caller may wait for any more."""
    if not task.cancelled():
        task.exception()
