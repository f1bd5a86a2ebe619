"""Connects a reward worker to the broker: StreamScoring with credits, renewals and reconnects.

Invariants:
- At most `max_leases` leases are held, beside those that `num_held_back` counts; no more are ever requested.
- A held lease is renewed until its result is accepted or the broker calls it lost, over any number of reconnects.
- A result is sent again on every new stream until the broker accepts it or calls its lease lost, so none is lost.
- A lease is handed to the caller once.
- A session that drains gives back at once what nobody has taken, and in the end what has no result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.clients.streams import Reconnecting
from penstock.errors import DeadlineError, PenstockError, RunClosedError, UnknownRunError
from penstock.network.connection import Connection
from penstock.process.logger import get_logger
from penstock.process.tasks import set_within
from penstock.v1 import broker_pb2, broker_pb2_grpc
from penstock.wire.pieces import batched

if TYPE_CHECKING:
    from penstock.v1.broker_pb2_grpc import BrokerServiceAsyncStub

MAX_LEASES = 2048
MAX_RESULTS_A_MESSAGE = 256
# Half of the broker's limit: gRPC and the other fields add to a message.
MAX_MESSAGE_BYTES = 512 * 1024
MAX_REASON_CHARACTERS = 1024
SILENCE_LIMIT_S = 30.0
RECEIPT_LIMIT_S = 30.0
RETURN_S = 1.0
"""How long the broker has to confirm what is given back at the end of a drain."""
# Renewals are sent at a third of a lease's lifetime, within these bounds.
_LEAST_RENEWAL_S, _MOST_RENEWAL_S = 0.5, 5.0
_MOST_BETWEEN_CONNECTS_S = 1.5

_log = get_logger()


@dataclass(slots=True)
class _Held:
    lease: broker_pb2.ScoringLease
    result: broker_pb2.ScoreResult | None = None
    # When the result, or that it is given back, was sent on the current stream.
    sent_at_s: float | None = None
    is_returned: bool = False


class ScoringSession:
    """Leases finished samples of a run and returns scores: `run` keeps the stream up, `take` and `answer` work."""

    def __init__(
        self,
        broker: Connection,
        *,
        run_id: str,
        worker_id: str,
        max_leases: int,
        task: broker_pb2.ScoringTask.ValueType = broker_pb2.SCORING_TASK_REWARD,
    ) -> None:
        """`max_leases` is how many leases are held at once, waiting ones included; at most MAX_LEASES count.

        `run` closes the connection when it ends.
        """
        self.num_leased = self.num_lost = 0
        self._stream = Reconnecting(broker.peer, most_s=_MOST_BETWEEN_CONNECTS_S)
        self.outage = self._stream.outage
        """Whether the broker is away; an unknown or closed run does not count."""
        self.holding_reason: Callable[[], str] = lambda: ""
        """Called at every renewal: why leases are not being scored; empty while they are."""
        self.warning: Callable[[], str] = lambda: ""
        """Called at every renewal: the problems of samples so far; empty if there were none."""
        self.num_held_back: Callable[[], int] = lambda: 0
        """How many of the leases held wait for something that the others do not need; those are leased beside them."""
        self._broker = broker
        self._hello = broker_pb2.RewardHello(run_id=run_id, worker_id=worker_id, task=task)
        self._max_leases = min(max_leases, MAX_LEASES)
        self._held: dict[str, _Held] = {}
        self._waiting: asyncio.Queue[str] = asyncio.Queue()  # bounded by the credits given
        self._changed = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._is_draining = False
        self._credit_total = 0
        self._credit_sent = 0
        self._num_received = 0
        """Leases received on the current stream."""
        self._renewal_s = _MOST_RENEWAL_S

    @property
    def num_held(self) -> int:
        """Leases whose result the broker has not accepted yet."""
        return len(self._held)

    async def run(self) -> None:
        """Keep the stream up until cancelled, even while broker or run are away, unknown or closed.

        Raises PenstockError if a retry cannot help: a refused token, or a message that the broker calls malformed.
        """
        async with self._broker:
            stub = broker_pb2_grpc.BrokerServiceStub(self._broker.channel)
            await self._stream.run(lambda: self._follow(stub), self._on_end)

    async def take(self, *, max_items: int) -> list[broker_pb2.ScoringLease]:
        """Take 1 to `max_items` leases; waits while there is none."""
        taken: list[broker_pb2.ScoringLease] = []
        while not taken:
            lease_ids = [await self._waiting.get()]
            while len(lease_ids) < max_items and not self._waiting.empty():
                lease_ids.append(self._waiting.get_nowait())
            taken = [self._held[lease_id].lease for lease_id in lease_ids if self.is_held(lease_id)]
        return taken

    def is_held(self, lease_id: str) -> bool:
        """Whether a lease is still valid; scoring a lost one is wasted work."""
        entry = self._held.get(lease_id)
        return entry is not None and not entry.is_returned

    def answer(self, results: Sequence[broker_pb2.ScoreResult]) -> None:
        """Submit results; those of lost leases are ignored: their samples were given to another worker."""
        for result in results:
            if (entry := self._held.get(result.lease_id)) is not None and not entry.is_returned:
                entry.result = result
        self._changed.set()

    async def drain(self, *, timeout_s: float) -> int:
        """Request no more leases and wait until every held one is answered or given back; returns how many were not.

        What is being scored is given back RETURN_S before the time is up.
        """
        self._is_draining = True
        self._return([self._waiting.get_nowait() for _ in range(self._waiting.qsize())])
        return_s = min(RETURN_S, timeout_s / 2)
        if not await set_within(self._emptied, timeout_s - return_s):
            self._return([lease_id for lease_id, entry in self._held.items() if entry.result is None])
            await set_within(self._emptied, return_s)
        return self.num_held

    def _return(self, lease_ids: Sequence[str]) -> None:
        for lease_id in lease_ids:
            if (entry := self._held.get(lease_id)) is not None:
                entry.is_returned = True
        self._changed.set()

    def _on_end(self, error: PenstockError | None) -> None:
        if error is None or isinstance(error, (RunClosedError, UnknownRunError)):
            self._forget_all()
            self.outage.answered()
        elif not error.is_retryable and error.reason != "INTERNAL":
            raise error
        else:
            self.outage.failed(error)
        if self._stream.is_news:
            reason = "the broker ended the stream" if error is None else str(error)
            _log.info("waiting for broker and run", peer=self._stream.peer, run_id=self._hello.run_id, reason=reason)

    async def _follow(self, stub: BrokerServiceAsyncStub) -> None:
        self._credit_total = self._num_received = 0
        self._give_credit()
        for entry in self._held.values():
            entry.sent_at_s = None
        call = stub.StreamScoring()
        await self._stream.converse(call, self._requests(), self._receive, max_silence_s=SILENCE_LIMIT_S)

    def _receive(self, response: broker_pb2.StreamScoringResponse) -> None:
        for lease_id in response.accepted_lease_ids:
            self._forget(lease_id)
        for lease_id in response.lost_lease_ids:
            self.num_lost += self.is_held(lease_id)
            self._forget(lease_id)
        room = max(0, self._credit_sent - self._num_received)
        self._num_received += len(response.leases)
        if len(response.leases) > room:
            _log.warning("broker sent more leases than asked for; they are left to expire", broker=self._broker.peer)
        for lease in response.leases[:room]:
            if lease.lease_id in self._held:
                continue
            # What was asked for before the drain began.
            self._held[lease.lease_id] = _Held(lease, is_returned=self._is_draining)
            if not self._is_draining:
                self._waiting.put_nowait(lease.lease_id)
            self._renewal_s = _renewal_s(lease)
            self.num_leased += 1
        self._note_emptied()
        self._give_credit()
        if response.leases or self._credit_total != self._credit_sent:
            # New leases may need renewal before the writer wakes up.
            self._changed.set()

    async def _requests(self) -> AsyncGenerator[broker_pb2.StreamScoringRequest, None]:
        hello = self._request(is_renewal=True)
        hello.hello.CopyFrom(self._hello)
        yield hello
        renewed_at_s = time.monotonic()
        while True:
            for request in self._results_to_send():
                yield request
            self._give_credit()
            if time.monotonic() - renewed_at_s >= self._renewal_s:
                yield self._request(is_renewal=True)
                renewed_at_s = time.monotonic()
            elif self._credit_sent != self._credit_total and not self._is_draining:
                yield self._request()
            await set_within(self._changed, max(0.0, renewed_at_s + self._renewal_s - time.monotonic()))
            self._changed.clear()

    def _results_to_send(self) -> Iterator[broker_pb2.StreamScoringRequest]:
        now_s = time.monotonic()
        sent = [entry.sent_at_s for entry in self._held.values() if entry.sent_at_s is not None]
        if sent and now_s - min(sent) > RECEIPT_LIMIT_S:
            raise DeadlineError(f"{self._stream.peer} did not confirm a score within {RECEIPT_LIMIT_S:.0f} s")
        ready = [
            (entry, entry.result)
            for entry in self._held.values()
            if entry.result is not None and entry.sent_at_s is None
        ]
        for part in batched(ready, _result_bytes, MAX_MESSAGE_BYTES, most_items=MAX_RESULTS_A_MESSAGE):
            for entry, _ in part:
                entry.sent_at_s = now_s
            yield self._request(results=[result for _, result in part])
        returned = [entry for entry in self._held.values() if entry.is_returned and entry.sent_at_s is None]
        if returned:
            for entry in returned:
                entry.sent_at_s = now_s
            yield self._request(returned_lease_ids=[entry.lease.lease_id for entry in returned])

    def _request(
        self,
        *,
        results: Sequence[broker_pb2.ScoreResult] = (),
        returned_lease_ids: Sequence[str] = (),
        is_renewal: bool = False,
    ) -> broker_pb2.StreamScoringRequest:
        request = broker_pb2.StreamScoringRequest(results=results, returned_lease_ids=returned_lease_ids)
        if is_renewal:
            request.active_lease_ids.extend(name for name, entry in self._held.items() if not entry.is_returned)
            request.holding_reason = self.holding_reason()[:MAX_REASON_CHARACTERS]
            request.warning = self.warning()[:MAX_REASON_CHARACTERS]
        if not self._is_draining:
            request.credit_total = self._credit_sent = self._credit_total
        return request

    def _forget(self, lease_id: str) -> bool:
        return self._held.pop(lease_id, None) is not None

    def _give_credit(self) -> None:
        """Ask for as many more leases as may be held; what was asked for is never taken back."""
        most = min(MAX_LEASES, self._max_leases + self.num_held_back())
        num_asked = self._credit_total - self._num_received
        self._credit_total += max(0, most - len(self._held) - num_asked)

    def _forget_all(self) -> None:
        self.num_lost += len(self._held)
        self._held.clear()
        while not self._waiting.empty():
            self._waiting.get_nowait()
        self._note_emptied()

    def _note_emptied(self) -> None:
        if self._held:
            self._emptied.clear()
        else:
            self._emptied.set()


def _renewal_s(lease: broker_pb2.ScoringLease) -> float:
    if not lease.HasField("lease_duration"):
        return _MOST_RENEWAL_S
    life_s = lease.lease_duration.ToMilliseconds() / 1000
    return min(_MOST_RENEWAL_S, max(_LEAST_RENEWAL_S, life_s / 3))


def _result_bytes(ready: tuple[_Held, broker_pb2.ScoreResult]) -> int:
    return ready[1].ByteSize()
