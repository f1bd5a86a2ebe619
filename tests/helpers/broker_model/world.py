"""The brokers of a test over one store, and how clients reach them."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from penstock.errors import PenstockError, ServiceUnavailableError
from penstock.v1 import broker_pb2
from services.broker.rules.limits import Limits
from services.broker.state.run_state import RunState
from tests.helpers.broker_model.process import Backing, InProcessBroker, StoreTime, Stream
from tests.helpers.broker_model.truth import Serials, Truth
from tests.helpers.virtual_time import VirtualLoop

RUN = "run-1"
MAX_TRIES = 12
RETRY_S = 0.3
"""Longer than a broker takes to notice what another one changed."""

KNOWN_AGAIN_S = 8.0
"""Seconds until what a store has lost of generators that live is written again, and read by other brokers."""

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a run is opened with."""

    limits: broker_pb2.RunLimits
    policy: broker_pb2.RunPolicy


class World:
    """Brokers, the store behind them, and what clients know."""

    def __init__(self, backing: Backing, loop: VirtualLoop, setting: Setting, *, num_brokers: int = 2) -> None:
        self.loop = loop
        self.setting = setting
        self.limits = Limits.from_proto(setting.limits)
        self.backing = backing
        self.crashes: list[BaseException] = []
        """Errors that no client should ever see."""
        self.store_time = StoreTime(loop)
        self.brokers = [self._start(number) for number in range(num_brokers)]
        self.truth = Truth()
        self.serials = Serials()
        self.has_lost_commits = False
        self._lost_s = -math.inf
        self._saved: Truth | None = None

    def broker(self, number: int) -> InProcessBroker:
        """One of the brokers."""
        return self.brokers[number % len(self.brokers)]

    async def call(self, method: str, request: Message, *, at: int = 0) -> Any:
        """A unary call, repeated at the next broker while one is unavailable."""
        return await self.ask(lambda broker: broker.call(method, request), at=at)

    async def ask(self, question: Callable[[InProcessBroker], Awaitable[_Answer]], *, at: int = 0) -> _Answer:
        """What a broker answers, or the next one while that is unavailable."""
        for number in range(at, at + MAX_TRIES):
            try:
                return await question(self.broker(number))
            except ServiceUnavailableError:
                await asyncio.sleep(RETRY_S)
        raise AssertionError(f"brokers unavailable {MAX_TRIES} times")

    async def restart(self, number: int) -> None:
        """Kill a broker and start another in its place."""
        await self.broker(number).kill()
        self.brokers[number % len(self.brokers)] = self._start(number)

    def _start(self, number: int) -> InProcessBroker:
        """A broker process; the clocks of their machines are an hour apart."""
        return InProcessBroker(self.backing, self.loop, self.crashes, self.store_time, skew_s=3600.0 * (number % 2))

    def save_store(self) -> None:
        """The store's present state is what it may come back with."""
        self.backing.save()
        self._saved = copy.deepcopy(self.truth)

    def lose_commits(self) -> None:
        """The store comes back as it was saved: later commits are gone, and with them what clients knew of them."""
        if self._saved is not None:
            self.backing.lose()
            self.truth = copy.deepcopy(self._saved)
            self.has_lost_commits = True
            self._lost_s = self.store_time.read().now_s

    def has_lately_lost(self, now_s: float) -> bool:
        """Whether commits were lost so lately that brokers may not know again who lives."""
        return now_s - self._lost_s < KNOWN_AGAIN_S

    async def audit(self, *, at: int = 0) -> broker_pb2.Audit:
        """The books."""
        response = await self.call("AuditRun", broker_pb2.AuditRunRequest(run_id=RUN), at=at)
        return response.audit

    async def state(self, *, at: int = 0) -> RunState:
        """A broker's copy of the run, up to date."""
        await self.audit(at=at)
        for broker in self.brokers[at:] + self.brokers[:at]:
            state = broker.run_registry.replica(RUN).copy
            if state is not None:
                return state
        raise AssertionError("no broker has a copy")


class Link:
    """A client's stream, opened again at the next broker when it was lost."""

    def __init__(self, world: World, method: str, on_response: Callable[[Any], None], *, at: int = 0) -> None:
        self.world = world
        self._method, self._on_response, self._at = method, on_response, at
        self._stream: Stream | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a stream that has not ended."""
        return self._stream is not None and not self._stream.is_ended

    def open(self, first: Message | bytes) -> None:
        """Open it with its first message, at the next broker."""
        self._at += 1
        self._stream = Stream(self.world.broker(self._at), self._method, self._on_response, first)

    def send(self, request: Message | bytes) -> None:
        """Queue a request."""
        assert self._stream is not None
        self._stream.send(request)

    def error(self) -> PenstockError | None:
        """Why it ended, where a retry does not help."""
        error = self._stream.error if self._stream is not None else None
        return None if isinstance(error, ServiceUnavailableError) else error

    async def close(self) -> None:
        """Cut it."""
        if self._stream is not None:
            await self._stream.cut()
            self._stream = None


async def settle() -> None:
    """Let everything happen that is under way, the brokers' caretakers included."""
    await asyncio.sleep(RETRY_S)
