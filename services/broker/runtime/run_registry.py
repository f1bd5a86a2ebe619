"""Keeps the runs that a broker process works on; their caretaker polls, expires leases and watches the store.

Every broker process advances the runs' clocks and expires leases; the store's commits make sure that each expiry
happens once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

import structlog

from penstock.clock import Clock
from penstock.errors import PenstockError, ServiceUnavailableError
from services.broker.operations import leasing, scores
from services.broker.records.store import Store
from services.broker.runtime.forecasts import Forecaster
from services.broker.runtime.length_reports import LengthReporter
from services.broker.runtime.metrics import BrokerMetrics
from services.broker.runtime.run_replica import RunHub
from services.broker.stalls import stall_report
from services.broker.state.run_state import RunState

POLL_EVERY_S = 0.25
"""Also the delay until another broker process's change is noticed and until a lease expires."""
OBSERVE_EVERY_S = 1.0
"""Interval of the queue and stall metrics, which look at every sample being decoded."""
BOOKS_EVERY_S = 5.0
"""Interval of the audit metrics, which read the counters from the store."""
IDLE_RUN_S = 60.0
"""A run unused for this long is unloaded; its state is in the store."""

_log = structlog.get_logger()


class Hubs:
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
    ) -> None:
        self.store = store
        self.clock = clock
        self.metrics = metrics
        self.forecaster = forecaster
        self.length_reporter = length_reporter
        self._hubs: WeakValueDictionary[str, RunHub] = WeakValueDictionary()
        self._used_lately: dict[str, RunHub] = {}
        """Kept, with their copies, even if nothing refers to them now."""
        self._listeners: set[asyncio.Event] = set()
        self.is_stopping = False

    @contextmanager
    def listening(self, event: asyncio.Event) -> Iterator[None]:
        """Inside the block, `event` is set when the process drains."""
        self._listeners.add(event)
        try:
            yield
        finally:
            self._listeners.discard(event)

    def hub(self, run_id: str) -> RunHub:
        """The replica of a run that may or may not exist."""
        hub = self._hubs.get(run_id)
        if hub is None:
            hub = self._hubs[run_id] = RunHub(run_id, store=self.store, clock=self.clock)
        self._used_lately[run_id] = hub
        return hub

    async def stop(self) -> None:
        """End every stream: the process drains."""
        self.is_stopping = True
        for hub in list(self._hubs.values()):
            hub.wake()
        for event in self._listeners:
            event.set()

    def check_serving(self) -> None:
        """Raise ServiceUnavailableError once the process drains."""
        if self.is_stopping:
            raise ServiceUnavailableError("the broker drains: reconnect")

    async def care(self, set_serving: Callable[[bool], Awaitable[None]]) -> None:
        """Look after every run until cancelled; `set_serving` is called at every change of the store's health."""
        is_serving: bool | None = None
        while True:
            try:
                await self.store.ping()
                for hub in list(self._hubs.values()):
                    await self._care_for(hub)
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

    async def _care_for(self, hub: RunHub) -> None:
        is_idle = hub.copy is None or self.clock.monotonic_s() - hub.last_used_s > IDLE_RUN_S
        if is_idle and not hub.num_listeners:
            self._used_lately.pop(hub.run_id, None)
            return
        used_s = hub.last_used_s
        try:
            await hub.keep_time()
            await hub.poll()
            await expire(hub, self.metrics)
            await hub.peers.refresh()
            await self._observe_books(hub)
            if hub.copy is not None:
                await hub.dispatcher.review(hub.copy, hub.clock.now_s())
        except ServiceUnavailableError:
            raise
        except PenstockError as error:
            _log.warning("run not cared for", run_id=hub.run_id, error=str(error))
        hub.last_used_s = used_s
        self._observe(hub)

    def _observe(self, hub: RunHub) -> None:
        at_s, now_s = self.clock.monotonic_s(), hub.clock.now_s()
        if hub.copy is not None and at_s - hub.observed_s >= OBSERVE_EVERY_S:
            hub.observed_s = at_s
            self.metrics.observe(
                hub.copy,
                num_conflicts=hub.num_conflicts,
                waits=stall_report.waits(hub.copy, hub.peers.present(), now_s),
                now_s=now_s,
            )

    async def _observe_books(self, hub: RunHub) -> None:
        at_s = self.clock.monotonic_s()
        if hub.copy is not None and at_s - hub.books_read_s >= BOOKS_EVERY_S:
            hub.books_read_s = at_s
            self.metrics.observe_books(hub.run_id, await hub.read_books(lambda _state, counts: counts))


async def expire(hub: RunHub, metrics: BrokerMetrics) -> None:
    """Reclaim any expired leases, as of the last reading of the run's clock and not later."""
    if hub.copy is None:
        return

    def operation(state: RunState) -> tuple[int, int]:
        clock = hub.clock.reading
        if clock is None:
            return 0, 0
        now_s, since_s = clock.now_s, clock.unbroken_since_s
        return (
            leasing.expire(state, now_s, unbroken_since_s=since_s),
            scores.expire_scoring(state, now_s, unbroken_since_s=since_s),
        )

    num_generation, num_scoring = await hub.transact(operation, must_verify=False)
    metrics.count_expired("generation", num_generation)
    metrics.count_expired("scoring", num_scoring)
