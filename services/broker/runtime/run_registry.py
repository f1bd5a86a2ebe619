"""Keeps the runs that a broker process works on; their caretaker polls, expires leases and watches the store.

Every broker process advances the runs' clocks and expires leases; the store's commits make sure that each expiry
happens once.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from weakref import WeakValueDictionary

import structlog

from penstock.clock import Clock
from penstock.errors import PenstockError, ServiceUnavailableError, UnknownRunError
from services.broker.operations import agent_sessions, leasing, scores, token_ends
from services.broker.records.store import Store
from services.broker.records.token_tails import TailReport
from services.broker.rules.flush_pacing import FlushInterval
from services.broker.rules.heartbeat_pacing import HeartbeatInterval
from services.broker.rules.saturation import Saturation
from services.broker.runtime.forecasts import Forecaster
from services.broker.runtime.heartbeats import Renewed
from services.broker.runtime.length_reports import LengthReporter
from services.broker.runtime.metrics import BrokerMetrics
from services.broker.runtime.run_replica import RunReplica
from services.broker.shards.run_facts import FactsOfRuns
from services.broker.shards.shard_interfaces import TokenShards
from services.broker.shards.shard_metrics import ShardMetrics
from services.broker.shards.shard_registry import ShardRegistry
from services.broker.stalls import stall_report
from services.broker.state.run_state import RunState

POLL_EVERY_S = 0.25
"""Also the delay until another broker process's change is noticed and until a lease expires."""
TURNS_TO_READ = 8
"""Turns of the event loop within which a frame that has reached the process is read, with as many to spare: gRPC ends
its call in one, and the task that waits for the frame goes on in a later one."""
OBSERVE_EVERY_S = 1.0
"""Interval of the queue and stall metrics, which look at every sample being decoded."""
BOOKS_EVERY_S = 5.0
"""Interval of the audit metrics, which read the counters from the store."""
IDLE_RUN_S = 60.0
"""A run unused for this long is unloaded; its state is in the store."""
FOLLOWED_S = 10.0
"""The same where another broker owns the run and no client is attached here: following a run for this long costs about
as much as loading it."""
KEEP_EVERY_S = 1.0
"""Interval at which only the clock of such a run is kept, for the token shards here."""

_log = structlog.get_logger()


class RunRegistry:
    """Run replicas by run id, created on demand.

    Promise: a run has one replica as long as anything refers to it, including a stream that is still attaching;
    otherwise that stream would use a replica that is neither polled nor cleared of expired leases.
    """

    def __init__(
        self,
        *,
        store: Store,
        clock: Clock,
        metrics: BrokerMetrics,
        forecaster: Forecaster,
        length_reporter: LengthReporter,
        broker: str = "",
        flush_interval: FlushInterval | None = None,
    ) -> None:
        """`broker` names the process among the brokers of the store (`run_clock`); by default at random."""
        self.store = store
        self.clock = clock
        self.metrics = metrics
        self.forecaster = forecaster
        self.length_reporter = length_reporter
        self.flush_interval = flush_interval or FlushInterval()
        self.heartbeat_interval = HeartbeatInterval()
        """What generators are asked for."""
        self.saturation = Saturation()
        self._broker = broker or secrets.token_hex(8)
        self._run_registry: WeakValueDictionary[str, RunReplica] = WeakValueDictionary()
        self._used_lately: dict[str, RunReplica] = {}
        """Kept, with their copies, even if nothing refers to them now."""
        self._listeners: set[asyncio.Event] = set()
        self._faulty: set[str] = set()
        """Runs whose care failed the last time, and was logged."""
        self.is_stopping = False
        self.owns_core: Callable[[str], bool] = lambda _run_id: True
        """Whether this process is responsible for a run, with or without clients attached."""
        self._facts = FactsOfRuns(store, clock.monotonic_s)
        self.own_shards = ShardRegistry(
            store=store,
            core=self,
            facts=self._facts,
            clock_of=lambda run_id: self.replica(run_id).clock,
            metrics=ShardMetrics(metrics.registry),
        )
        """The token shards that this process works on itself."""
        self.shards: TokenShards = self.own_shards

    @contextmanager
    def listening(self, event: asyncio.Event) -> Iterator[None]:
        """Inside the block, `event` is set when the process drains."""
        self._listeners.add(event)
        try:
            yield
        finally:
            self._listeners.discard(event)

    def replica(self, run_id: str) -> RunReplica:
        """The replica of a run that may or may not exist."""
        replica = self._run_registry.get(run_id)
        if replica is None:
            replica = RunReplica(
                run_id, store=self.store, clock=self.clock, broker=self._broker, saturation=self.saturation
            )
            self._run_registry[run_id] = replica
        self._used_lately[run_id] = replica
        return replica

    async def report(self, run_id: str, shard: int, reports: Sequence[TailReport]) -> None:
        """See `shards.ports.Core`."""
        replica = self.replica(run_id)
        # The time is read with the run, which this process may not have used yet.
        await replica.transact(lambda state: token_ends.take_reports(state, shard, reports, replica.clock.now_s()))

    async def stop(self) -> None:
        """End every stream: the process drains."""
        self.is_stopping = True
        for replica in list(self._run_registry.values()):
            replica.wake()
        for event in self._listeners:
            event.set()

    async def leave(self) -> None:
        """Tell other brokers not to wait for this process: its streams have ended. If that fails, the entry lapses."""
        await self.own_shards.settled()
        for replica in list(self._run_registry.values()):
            with suppress(PenstockError):
                await replica.leave()

    def served_runs(self) -> tuple[frozenset[str], frozenset[str]]:
        """Open runs with shards whose trainers or reward workers have streams here; those whose generators have."""
        sharded = [replica for replica in self._run_registry.values() if replica.has_shards]
        return (
            frozenset(replica.run_id for replica in sharded if replica.listeners.has_others),
            frozenset(replica.run_id for replica in sharded if replica.listeners.has_lease_streams),
        )

    def check_serving(self) -> None:
        """Raise ServiceUnavailableError once the process drains."""
        if self.is_stopping:
            raise ServiceUnavailableError("the broker drains: reconnect")

    async def care(self, set_serving: Callable[[bool], Awaitable[None]]) -> None:
        """Look after every run until cancelled; `set_serving` is called at every change of the store's health."""
        # Beside the runs, whose clocks do not wait for shards.
        caring = asyncio.create_task(self.own_shards.care())
        try:
            await self._care_for_runs(set_serving)
        finally:
            caring.cancel()

    async def _care_for_runs(self, set_serving: Callable[[bool], Awaitable[None]]) -> None:
        is_serving: bool | None = None
        has_succeeded = False
        while True:
            try:
                await self.store.ping()
                if not has_succeeded:
                    await self._succeed()
                    has_succeeded = True
                # Between two advances of a run's clock all is read that had arrived by the first (`run_clock`).
                for _ in range(TURNS_TO_READ):
                    await asyncio.sleep(0)
                await self._care_for_each()
                is_healthy = True
            except ServiceUnavailableError as error:
                is_healthy = False
                if is_serving is not False:
                    _log.warning("store away", error=str(error))
            if is_healthy != is_serving:
                is_serving = is_healthy
                await set_serving(is_serving)
                _log.info("health changed", is_serving=is_serving)
            await asyncio.sleep(POLL_EVERY_S)

    async def _succeed(self) -> None:
        """Look at every run once, so that none waits for a predecessor by this process's name that was killed."""
        for run_id in await self.store.run_ids():
            self.replica(run_id)

    async def _care_for_each(self) -> None:
        """Look after each run once, whatever happens to another one. Raises ServiceUnavailableError."""
        unavailable: ServiceUnavailableError | None = None
        for replica in list(self._run_registry.values()):
            try:
                await self._care_for(replica)
            except ServiceUnavailableError as error:
                unavailable = error
            except Exception:
                if replica.run_id not in self._faulty:
                    self._faulty.add(replica.run_id)
                    _log.exception("run not cared for: a fault of the broker", run_id=replica.run_id)
            else:
                self._faulty.discard(replica.run_id)
        if unavailable is not None:
            raise unavailable

    async def _care_for(self, replica: RunReplica) -> None:
        is_idle = replica.copy is None or self.clock.monotonic_s() - replica.last_used_s > IDLE_RUN_S
        if is_idle and not replica.num_listeners and not replica.num_keepers:
            await replica.leave()
            await replica.rest()
            if self._used_lately.pop(replica.run_id, None) is not None:
                self.metrics.forget(replica.run_id)
            return
        if self._is_looked_after_elsewhere(replica):
            await self._keep(replica)
            return
        used_s = replica.last_used_s
        try:
            await replica.keep_time()
            await replica.poll()
            await expire(replica, self.metrics)
            if replica.copy is not None:
                replica.sealer.start(replica.copy, self.shards)
            await replica.peers.refresh()
            await self._observe_books(replica)
            _review(replica)
        except ServiceUnavailableError:
            raise
        except PenstockError as error:
            _log.warning("run not cared for", run_id=replica.run_id, error=str(error))
        replica.last_used_s = used_s
        self._observe(replica)

    def _is_looked_after_elsewhere(self, replica: RunReplica) -> bool:
        """Whether only token shards here need the run, and the streams that send to them."""
        may_need_it = replica.has_holders or replica.heartbeats.has_waiting
        if may_need_it or not (replica.copy is None or replica.has_shards):
            return False
        return self.clock.monotonic_s() - replica.last_used_s > FOLLOWED_S and not self.owns_core(replica.run_id)

    async def _keep(self, replica: RunReplica) -> None:
        """Keep the clock of a run, and tell the streams of its end; its copy is dropped."""
        if replica.unload():
            self.metrics.forget(replica.run_id)
            self.metrics.observe_conflicts(replica.run_id, replica.num_conflicts)
        now_s = self.clock.monotonic_s()
        if now_s - replica.kept_s < KEEP_EVERY_S:
            return
        replica.kept_s = now_s
        await replica.keep_time()
        with suppress(UnknownRunError):
            replica.note_end(is_closed=(await self._facts.of(replica.run_id)).is_closed)

    def _observe(self, replica: RunReplica) -> None:
        at_s, now_s = self.clock.monotonic_s(), replica.clock.now_s()
        if replica.copy is not None and at_s - replica.observed_s >= OBSERVE_EVERY_S:
            replica.observed_s = at_s
            self.metrics.observe(
                replica.copy,
                num_conflicts=replica.num_conflicts,
                waits=stall_report.waits(replica.copy, replica.peers.present(), now_s),
                now_s=now_s,
            )

    async def _observe_books(self, replica: RunReplica) -> None:
        at_s = self.clock.monotonic_s()
        if replica.copy is not None and at_s - replica.books_read_s >= BOOKS_EVERY_S:
            replica.books_read_s = at_s
            self.metrics.observe_books(replica.run_id, await replica.read_books(lambda _state, counts: counts))


def _review(replica: RunReplica) -> None:
    """Have dispatch reviewed in the background: that takes up to seconds, in which the runs' clocks must go on."""
    if replica.copy is not None and (replica.reviewing is None or replica.reviewing.done()):
        replica.reviewing = asyncio.create_task(replica.dispatcher.review(replica.copy, replica.clock.now_s()))
        replica.reviewing.add_done_callback(partial(_note_fault, replica.run_id))


def _note_fault(run_id: str, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("dispatch not reviewed: a fault of the broker", run_id=run_id, exc_info=error)


async def expire(replica: RunReplica, metrics: BrokerMetrics) -> None:
    """Renew what was heard, then reclaim expired leases, as of when every broker had heard its holders."""
    if replica.copy is None:
        return

    def operation(state: RunState) -> tuple[Renewed, int, int]:
        renewed, clock = replica.heartbeats.renew(state), replica.clock.reading
        if clock is None:
            return renewed, 0, 0
        heard_s, since_s = clock.heard_s, clock.unbroken_since_s
        agent_sessions.expire(state, heard_s, unbroken_since_s=since_s)
        return (
            renewed,
            leasing.expire(state, heard_s, unbroken_since_s=since_s),
            scores.expire_scoring(state, heard_s, unbroken_since_s=since_s),
        )

    renewed, num_generation, num_scoring = await replica.transact(operation, must_verify=False)
    replica.heartbeats.settle(renewed)
    metrics.expired.labels("generation").inc(num_generation)
    metrics.expired.labels("scoring").inc(num_scoring)
