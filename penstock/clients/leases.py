"""Implements a generator's side of StreamLeases: a stream of work that survives the broker's restarts.

Promises:

- The broker never has more leases outstanding here than there are free slots: credits count per stream and only grow.
- The first heartbeat of a stream is the only one until the broker's first message: others would wait in front of those
  that name what it gets by then, and a busy broker reads them one by one.
- A heartbeat leaves at once when something changes (at most one every MIN_BEAT_GAP_S), at least every BEAT_INTERVAL_S:
  less often, of either kind, while a broker that falls behind asks for that, within bounds (`heartbeat_interval`).
- After a lost stream it reconnects with back-off under the same generator id. Heartbeats keep naming the leases in
  progress, so none is given to another generator while this one still decodes it.
- A stream on which nothing arrives for MAX_SILENCE_S (the broker sends at least every 5 s) is reopened.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import Protocol

from penstock.clients.sharding.core_connection import CoreConnection
from penstock.clients.streams import PERMANENT_ERRORS, Reconnecting
from penstock.errors import PenstockError, RunClosedError, ServiceUnavailableError, UnknownRunError
from penstock.heartbeat_interval import BEAT_INTERVAL_S, asked_s, least_gap_s
from penstock.network.connection import Connection
from penstock.process.logger import get_logger
from penstock.process.tasks import set_within
from penstock.security import NO_SECURITY, Security
from penstock.v1 import broker_pb2, broker_pb2_grpc

MAX_SILENCE_S = 15.0
MAX_WARNING_CHARACTERS = 1024

_log = get_logger()


class LeaseHandler(Protocol):
    """Works on the leases. None of its methods waits."""

    def num_free_slots(self) -> int:
        """How many more leases it can take now."""

    def beat(self) -> broker_pb2.GeneratorBeat:
        """The generator's current state; the session fills in the credits."""

    def lease(self, lease: broker_pb2.Lease) -> None:
        """Take a lease to work on."""

    def revoke(self, revocation: broker_pb2.LeaseRevocation) -> None:
        """Give up a revoked lease."""

    def owned_by(self, owner: broker_pb2.RunOwner) -> None:
        """Note which trainer owns the run: called when a stream begins, and when another trainer takes over the run."""

    def run_closed(self) -> None:
        """The run was closed: every lease is void. The session keeps trying, as the run may be opened again."""


class LeaseSession:
    """The lease stream of one generator.

    Args:
        broker: Connection to it.
        hello: Describes the generator.
        handler: Works on the leases.
        security: Certificates and token for the broker that owns the run, if that is another one.
    """

    def __init__(
        self,
        broker: Connection,
        *,
        hello: broker_pb2.GeneratorHello,
        handler: LeaseHandler,
        security: Security = NO_SECURITY,
    ) -> None:
        peer = broker.peer
        self._core = CoreConnection(broker, security=security, on_ready=self._move)
        self._patience: asyncio.Timeout | None = None
        """Of the current stream."""
        self._hello = hello
        self._hello.may_move = self._hello.accepts_lease_batches = True
        self._handler = handler
        self._peer = peer
        self._changed, self._answered = asyncio.Event(), asyncio.Event()
        self._num_received = 0
        self._credit_total = 0
        self._asked_s = 0.0
        """The heartbeat interval that the broker of the current stream asks for; 0 if it asks for none."""
        self._stream = Reconnecting(peer)
        self.outage = self._stream.outage
        """Whether the broker is away; an unknown or closed run does not count."""
        self.waiting_reason = f"connecting to {peer}"
        """Why there is no work, from the broker's last message; for display."""

    @property
    def beat_interval_s(self) -> float:
        """How long it waits now, while nothing changes, until it sends the next heartbeat."""
        return self._asked_s or BEAT_INTERVAL_S

    def notify(self) -> None:
        """Report that a field of the heartbeat has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Take leases until cancelled. Raises PenstockError if a retry cannot help."""
        try:
            await self._stream.run(self._follow, self._on_end)
        finally:
            await self._core.close()

    async def _follow(self) -> None:
        self._num_received = self._credit_total = 0
        self._asked_s = 0.0
        self._answered.clear()
        is_away = self._core.is_away
        call = broker_pb2_grpc.BrokerServiceStub(self._core.channel).StreamLeases()
        try:
            async with asyncio.timeout(None) as self._patience:
                await self._stream.converse(call, self._frames(), self._take, max_silence_s=MAX_SILENCE_S)
        except TimeoutError:
            raise ServiceUnavailableError(f"{self._peer}: the stream moves to the broker that owns the run") from None
        except PenstockError as error:
            if not is_away:
                raise
            # What the own broker says counts.
            await self._core.lost()
            raise ServiceUnavailableError(f"{self._peer}: the broker that owns the run was lost: {error}") from error
        finally:
            self._patience = None

    def _move(self) -> None:
        """Open the stream again: at the broker that owns the run, which is connected now."""
        if self._patience is not None:
            self._patience.reschedule(asyncio.get_running_loop().time())

    def _on_end(self, error: PenstockError | None) -> None:
        if error is None or isinstance(error, RunClosedError):
            self._note_closed(str(error or "the broker ended the stream"))
        elif isinstance(error, PERMANENT_ERRORS):
            raise error
        else:
            self._note_lost(error)

    async def _frames(self) -> AsyncGenerator[broker_pb2.StreamLeasesRequest, None]:
        yield broker_pb2.StreamLeasesRequest(hello=self._hello)
        while True:
            self._changed.clear()
            yield broker_pb2.StreamLeasesRequest(beat=self._beat())
            await self._answered.wait()
            interval_s = self.beat_interval_s
            gap_s = least_gap_s(interval_s)
            await asyncio.sleep(gap_s)
            await set_within(self._changed, interval_s - gap_s)

    def _beat(self) -> broker_pb2.GeneratorBeat:
        beat = self._handler.beat()
        self._credit_total = max(self._credit_total, self._num_received + self._handler.num_free_slots())
        beat.credit_total = self._credit_total
        return beat

    def _take(self, response: broker_pb2.StreamLeasesResponse) -> None:
        self._answered.set()
        match response.WhichOneof("frame"):
            case "leases":
                self._take_leases(response.leases.leases)
            case "lease":
                self._take_leases([response.lease])
            case "revocation":
                self._handler.revoke(response.revocation)
            case "idle":
                self.waiting_reason = response.idle.reason
                self._asked_s = asked_s(response.idle.heartbeat_interval)
            case "owner":
                self._handler.owned_by(response.owner)
            case "core":
                self._core.follow(response.core)
            case unknown:
                _log.warning("message of an unknown kind", peer=self._peer, frame=unknown)

    def _take_leases(self, leases: Iterable[broker_pb2.Lease]) -> None:
        for lease in leases:
            self._num_received += 1
            self._handler.lease(lease)

    def _note_closed(self, reason: str) -> None:
        if self._stream.is_up or not self.waiting_reason.startswith("run closed"):
            _log.info("run closed; waiting for it to be opened again", peer=self._peer, reason=reason)
        self.outage.answered()
        self.waiting_reason = f"run closed: {reason}"
        self._handler.run_closed()

    def _note_lost(self, error: PenstockError) -> None:
        is_expected = error.is_retryable or isinstance(error, UnknownRunError)
        if self._stream.is_up or not is_expected:
            (_log.info if is_expected else _log.warning)("lease stream lost", peer=self._peer, error=str(error))
        if isinstance(error, UnknownRunError):
            self.outage.answered()
            self.waiting_reason = f"waiting for the run: {error}"
        else:
            self.outage.failed(error)
            self.waiting_reason = self.outage.described(error)
