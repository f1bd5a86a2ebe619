"""A broker without its process: the real service over the real run registry, on a virtual clock.

Messages are copied at each hand-over, as the wire does. A killed broker reaches the store no more, whatever it was
about to do; a store can fail before or after a commit, and can lose its last commits.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, Protocol, TypeVar

import redis
from google.protobuf.message import Message
from prometheus_client import CollectorRegistry

from penstock.errors import InternalError, PenstockError, ServiceUnavailableError
from penstock.v1 import broker_pb2, sessions_pb2
from services.broker.records.run_clock import MAX_GAP_S, Reading, StoredClock
from services.broker.records.store import Delta, Mark, Snapshot, Store
from services.broker.server import make_run_registry
from services.broker.service import BrokerService
from services.broker.session_service import SessionService
from services.broker.storage.memory_store import MemoryStore
from services.broker.storage.redis.keys import RunKeys
from services.broker.storage.redis.redis_store import RedisStore
from tests.helpers.virtual_time import VirtualLoop

Fault = Literal["before", "after"]
_Message = TypeVar("_Message", bound=Message)


Payload = tuple[set[str], set[tuple[str, int]]]


class Backing(Protocol):
    """The store of all brokers, whose present state can be saved and brought back."""

    store: Store

    def save(self) -> None:
        """Remember the present state."""

    def lose(self) -> None:
        """Back to the remembered state: what was committed since is gone."""

    def payload(self, run_id: str) -> Payload:
        """Groups whose prompts, and samples whose chunks, the store holds in a document: a run or a token shard."""


class MemoryBacking:
    """The store in memory."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self._saved = copy.deepcopy(self.store._runs)

    def save(self) -> None:
        """See `Backing`."""
        self._saved = copy.deepcopy(self.store._runs)

    def lose(self) -> None:
        """See `Backing`."""
        self.store._runs = copy.deepcopy(self._saved)

    def payload(self, run_id: str) -> Payload:
        """See `Backing`."""
        run = self.store._runs.get(run_id)
        if run is None:
            return set(), set()
        return set(run.prompts), {sample for sample, chunks in run.chunks.items() if chunks}


class RedisBacking:
    """The store in a Redis of this test's own."""

    def __init__(self, url: str) -> None:
        self.store = RedisStore.from_url(url)
        self._redis = redis.Redis.from_url(url)
        self._saved: dict[bytes, bytes] = {}

    def save(self) -> None:
        """See `Backing`."""
        self._saved = {key: self._redis.dump(key) for key in self._redis.keys("penstock:*")}

    def lose(self) -> None:
        """See `Backing`."""
        self._redis.flushall()
        for key, value in self._saved.items():
            self._redis.restore(key, 0, value)

    def payload(self, run_id: str) -> Payload:
        """See `Backing`."""
        keys = RunKeys(run_id)
        prefix = keys.chunks(("", 0)).removesuffix(":0")
        names = [key.decode().removeprefix(prefix) for key in self._redis.keys(f"{prefix}*")]
        prompts = {name.decode() for name in self._redis.hkeys(keys.prompts)}
        return prompts, {(group_id, int(index)) for group_id, _, index in (name.rpartition(":") for name in names)}


class StoreTime:
    """The store's own clock and that of the run, on virtual time, whatever the store."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.offset_s = 0.0
        """Of the store's machine, against virtual time."""
        self.clock = StoredClock()
        self._advanced: Reading | None = None
        """At the last advance."""
        self.before_gap: Reading | None = None
        """The last advance before the last gap: until then brokers let things expire."""

    @property
    def machine_s(self) -> float:
        """What the clock of the store's machine shows."""
        return self._loop.now_s() + self.offset_s

    def read(self) -> Reading:
        """The run's clock."""
        return self._noted(self.clock.read(self.machine_s, MAX_GAP_S))

    def advance(self, max_gap_s: float, *, broker: str, is_leaving: bool, is_behind: bool) -> Reading:
        """Advance the run's clock."""
        reading = self.clock.advance(
            self.machine_s, max_gap_s, broker=broker, is_leaving=is_leaving, is_behind=is_behind
        )
        self._advanced = self._noted(reading)
        return reading

    def _noted(self, reading: Reading) -> Reading:
        if self._advanced is not None and reading.unbroken_since_s != self._advanced.unbroken_since_s:
            self.before_gap = self._advanced
        return reading


class SkewedClock:
    """The clock of a broker's machine, on virtual time: its wall clock shows what it likes."""

    def __init__(self, loop: VirtualLoop, offset_s: float) -> None:
        self._loop = loop
        self.offset_s = offset_s

    def now_s(self) -> float:
        """See `Clock`."""
        return self._loop.now_s() + self.offset_s

    def monotonic_s(self) -> float:
        """See `Clock`."""
        return self._loop.monotonic_s()


class StoreHandle:
    """One broker's way to the store: fails when told to, and for good once `cut`."""

    def __init__(self, backing: Backing, loop: VirtualLoop, time: StoreTime) -> None:
        self._backing, self._loop, self._time = backing, loop, time
        self.faults: deque[Fault] = deque()
        self.is_cut = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._backing.store, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            self._check()
            with self._loop.waiting_outside():
                return await method(*args, **kwargs)

        return call

    async def ping(self) -> None:
        """Whether it can be reached. A real one is not asked: brokers do so at every turn, half of all round trips."""
        self._check()

    async def now_s(self, _run_id: str) -> float:
        """See `Store.now_s`."""
        self._check()
        return self._time.machine_s

    async def load(self, run_id: str, since: Mark | None) -> Snapshot | None:
        """See `Store.load`."""
        self._check()
        with self._loop.waiting_outside():
            snapshot = await self._backing.store.load(run_id, since)
        return None if snapshot is None else replace(snapshot, clock=self._time.read())

    async def tick(
        self, _run_id: str, max_gap_s: float, *, broker: str = "", is_leaving: bool = False, is_behind: bool = False
    ) -> Reading:
        """See `Store.tick`."""
        self._check()
        return self._time.advance(max_gap_s, broker=broker, is_leaving=is_leaving, is_behind=is_behind)

    async def commit(self, run_id: str, expected: Mark | None, delta: Delta) -> Mark:
        """A commit, its failure if one is due: before it is stored, or after, when only the answer is lost."""
        self._check()
        fault = self.faults.popleft() if self.faults else None
        if fault == "before":
            raise ServiceUnavailableError("Redis is away: told so by the test")
        with self._loop.waiting_outside():
            mark = await self._backing.store.commit(run_id, expected, delta)
        if fault == "after":
            raise ServiceUnavailableError("Redis' answer was lost: told so by the test")
        return mark

    def _check(self) -> None:
        if self.is_cut:
            raise ServiceUnavailableError("this broker was killed")


def copied(message: _Message) -> _Message:
    """The message as it comes off the wire."""
    return type(message).FromString(message.SerializeToString())


def parsed(response: bytes) -> broker_pb2.StreamMicrobatchesResponse:
    """A response of the only method that serializes its own."""
    return broker_pb2.StreamMicrobatchesResponse.FromString(response)


class InProcessBroker:
    """One broker; kill it and make another over the same backing."""

    def __init__(
        self, backing: Backing, loop: VirtualLoop, crashes: list[BaseException], time: StoreTime, *, skew_s: float = 0.0
    ) -> None:
        self.crashes = crashes
        self.clock = SkewedClock(loop, skew_s)
        self.store = StoreHandle(backing, loop, time)
        self.registry = CollectorRegistry()
        self.run_registry = make_run_registry(self.store, registry=self.registry, clock=self.clock)
        self.service = BrokerService(self.run_registry)
        self.sessions = SessionService(self.run_registry)
        self.streams: set[Stream] = set()
        self._caretaker = loop.create_task(self._care())

    async def _care(self) -> None:
        try:
            await self.run_registry.care(_ignore)
        except Exception as error:
            # A process whose caretaker fails ends.
            self.crashes.append(error)

    async def call(self, method: str, request: Message) -> Any:
        """A unary call."""
        service = self.service if hasattr(self.service, method) else self.sessions
        return copied(await getattr(service, method)(copied(request), None))

    async def take_sessions(self, request: sessions_pb2.TakeSessionsRequest) -> list[sessions_pb2.TakeSessionsResponse]:
        """All frames of an answer."""
        return [copied(frame) async for frame in self.sessions.TakeSessions(copied(request), None)]

    def collect(self) -> None:
        """Let go of replicas that nothing uses, as garbage collection does at some time."""
        known, used = self.run_registry._run_registry, self.run_registry._used_lately
        for run_id, replica in list(known.items()):
            if run_id not in used and not replica.num_listeners and replica._worker is None:
                del known[run_id]

    async def kill(self) -> None:
        """As kill -9 does: nothing more reaches the store, every client sees a lost connection."""
        self.store.is_cut = True
        self._caretaker.cancel()
        for stream in list(self.streams):
            await stream.cut(ServiceUnavailableError("connection lost"))
        with suppress(asyncio.CancelledError, ServiceUnavailableError):
            await self._caretaker


async def _ignore(is_serving: bool) -> None:
    pass


class Stream:
    """One bidirectional call; `on_response` is called with each response as it comes."""

    def __init__(
        self, broker: InProcessBroker, method: str, on_response: Callable[[Any], None], first: Message | bytes
    ) -> None:
        self.error: PenstockError | None = None
        self._outbox: asyncio.Queue[Message | bytes | None] = asyncio.Queue()
        self._broker, self._on_response = broker, on_response
        self.send(first)
        responses = getattr(broker.service, method)(self._requests(), None)
        self._task = asyncio.get_running_loop().create_task(self._read(responses))
        broker.streams.add(self)

    @property
    def is_ended(self) -> bool:
        """Whether the broker, or `cut`, ended it."""
        return self._task.done()

    def send(self, request: Message | bytes) -> None:
        """Queue a request."""
        self._outbox.put_nowait(request if isinstance(request, bytes) else copied(request))

    async def cut(self, error: PenstockError | None = None) -> None:
        """End it at once, as a lost connection does."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self.error = self.error or error

    async def _requests(self) -> AsyncIterator[Message | bytes]:
        while (request := await self._outbox.get()) is not None:
            yield request

    async def _read(self, responses: AsyncIterator[Message]) -> None:
        try:
            async for response in responses:
                self._on_response(parsed(response) if isinstance(response, bytes) else copied(response))
        except Exception as error:
            if isinstance(error, PenstockError):
                self.error = error
            if not isinstance(error, PenstockError) or isinstance(error, InternalError):
                # A fault of the broker, or a failed check in `on_response`.
                self._broker.crashes.append(error)
        finally:
            self._broker.streams.discard(self)
