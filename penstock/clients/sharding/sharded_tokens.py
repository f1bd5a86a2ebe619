"""Sends a generator's tokens to the brokers that own their shards, over one token stream each.

    SampleStream -> the session of its shard's owner, once that is connected
                 -> the session with the generator's own broker, which passes on: until then, or if it is out of reach

Promises:

- The chunks of one sample are on one stream at a time: it changes over only once all of them are acknowledged, or takes
  the unacknowledged ones along, in order. So none is lost, and brokers recognise those that come twice.
- Answers say who owns what when it changes. While a request is overdue its own broker is asked; one that cannot answer
  is left for the next of the list.
- Of two maps the one with the higher epoch counts. At most MAX_OWNERS brokers are connected to besides the own one.
- A run without token shards has one stream, to its own broker, and nothing else goes on here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from penstock.clients.sample_stream import SampleStream, StreamListener
from penstock.clients.sharding.shard_owners import BadShardMapError, ShardOwners
from penstock.clients.tokens import TokenSession
from penstock.errors import PenstockError
from penstock.network.connection import Connection
from penstock.network.rpc import call
from penstock.process.logger import get_logger
from penstock.process.tasks import end, run_beside
from penstock.security import NO_SECURITY, Security
from penstock.security.plain_text import is_local
from penstock.v1 import broker_pb2, broker_pb2_grpc, types_pb2

MAX_OWNERS = 64
LOOK_EVERY_S = 0.5
OVERDUE_S = 1.5
"""A request that waits for longer makes the generator ask who owns what."""
ASK_TIMEOUT_S = 3.0
CONNECT_TIMEOUT_S = 5.0
RETRY_AFTER_S = 10.0
"""An owner that could not be reached, or was lost, is left alone for this long."""

_log = get_logger()


@dataclass(slots=True, eq=False)
class _Owner:
    """A broker that owns shards, and the session with it."""

    address: str
    connection: Connection
    session: TokenSession
    is_ready: bool = False
    task: asyncio.Task[None] = field(init=False)


@dataclass(slots=True)
class _Routes:
    """Which session sends each open sample of a shard."""

    sessions: dict[SampleStream, TokenSession] = field(default_factory=dict)
    num_pruned: int = 0

    def prune(self) -> None:
        """Forget samples that ended, now and then."""
        if len(self.sessions) > 2 * self.num_pruned + 64:
            self.sessions = {stream: session for stream, session in self.sessions.items() if not stream.is_closed}
            self.num_pruned = len(self.sessions)


class ShardedTokens:
    """The tokens of one generator; as `TokenSession`, over several brokers where the run has token shards.

    Args:
        broker: Connection to the generator's own broker, or several of which one answers.
        run_id: Which run.
        generator_id: Which generator.
        flush_interval_s: Longest time a token waits before it is sent, seconds.
        security: Certificates and token for the other brokers.
    """

    def __init__(
        self,
        broker: Connection,
        *,
        run_id: str,
        generator_id: str,
        flush_interval_s: float,
        security: Security = NO_SECURITY,
    ) -> None:
        self._stub = broker_pb2_grpc.BrokerServiceStub(broker.channel)
        self._peer, self._run_id, self._security = broker.peer, run_id, security
        self._session = partial(
            TokenSession, run_id=run_id, generator_id=generator_id, flush_interval_s=flush_interval_s
        )
        self._own = self._session(broker, on_map=self._take_own_map)
        self._own_address = ""
        """Of the broker that the own stream is at."""
        self._owners: dict[str, _Owner] = {}
        self._left_alone: dict[str, float] = {}
        """Until when, by address."""
        self._map = ShardOwners()
        self._routes = _Routes()
        self._has_shards = asyncio.Event()
        self._num_stored = 0
        """Tokens stored over sessions that ended."""

    # -- as a TokenSession ---------------------------------------------------------------------------------------------

    def open(
        self, key: types_pb2.SampleKey, *, lease_id: str, offset: int, listener: StreamListener, token_shard: int = 0
    ) -> SampleStream:
        """Open a stream for the tokens of one lease, which follow `offset` accepted ones."""
        session = self._session_of(token_shard)
        stream = session.open(key, lease_id=lease_id, offset=offset, listener=listener, token_shard=token_shard)
        if token_shard:
            self._has_shards.set()
            self._routes.prune()
            self._routes.sessions[stream] = session
        return stream

    @property
    def has_room(self) -> bool:
        """Whether tokens may be appended without `wait_for_room`."""
        return all(session.has_room for session in self._sessions())

    async def wait_for_room(self) -> None:
        """Wait until the brokers have taken enough of the buffered tokens."""
        while not self.has_room:
            for session in self._sessions():
                await session.wait_for_room()

    async def flush(self, *, timeout_s: float) -> bool:
        """Send everything now; returns whether the brokers acknowledged it all within `timeout_s` seconds."""
        return all(await asyncio.gather(*(session.flush(timeout_s=timeout_s) for session in self._sessions())))

    @property
    def num_tokens_stored(self) -> int:
        """Tokens that brokers have acknowledged since the start."""
        return self._num_stored + sum(session.num_tokens_stored for session in self._sessions())

    async def run(self) -> None:
        """Send until cancelled. Raises PenstockError if a retry cannot help."""
        try:
            await run_beside(self._own.run(), [self._watch])
        finally:
            await self._leave_all(lambda _owner: True)

    # -- who owns what -------------------------------------------------------------------------------------------------

    def _sessions(self) -> list[TokenSession]:
        return [self._own, *(owner.session for owner in self._owners.values())]

    def _session_of(self, shard: int) -> TokenSession:
        """The session by which chunks of a shard are to go at the moment."""
        owner = self._owners.get(self._map.of_shard(shard))
        return owner.session if owner is not None and owner.is_ready else self._own

    def _take_map(self, said: broker_pb2.ShardMap, *, is_own: bool = False) -> None:
        """Take note of what a broker says; `is_own` if it is the generator's own one."""
        try:
            found = ShardOwners.of(said)
        except BadShardMapError as error:
            _log.warning("shard map refused", peer=self._peer, error=str(error))
            return
        if found.epoch < self._map.epoch:
            _log.info("shard map refused: older than the one known", epoch=found.epoch, known=self._map.epoch)
            return
        here = found.here if is_own else self._map.here
        self._map = ShardOwners(epoch=found.epoch, by_shard=found.by_shard, here=here)

    def _take_own_map(self, said: broker_pb2.ShardMap) -> None:
        """Take note of what is said on the own stream."""
        self._own_address = said.here
        self._take_map(said, is_own=True)

    async def _watch(self) -> None:
        """Keep the sessions with owners, and ask who they are while a request is overdue, until cancelled."""
        await self._has_shards.wait()
        while True:
            await self._look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _look(self) -> None:
        await self._leave_all(lambda owner: owner.task.done())
        if any(session.overdue_s > OVERDUE_S for session in self._sessions()):
            await self._ask()
        wanted = self._wanted()
        await self._leave_all(lambda owner: owner.task.done() or owner.address not in wanted)
        now_s = asyncio.get_running_loop().time()
        self._left_alone = {address: until_s for address, until_s in self._left_alone.items() if until_s > now_s}
        for address in sorted(wanted - self._owners.keys() - self._left_alone.keys()):
            if len(self._owners) < MAX_OWNERS:
                self._enter(address)
        self._own.must_pass_on = any(
            address not in self._owners or not self._owners[address].is_ready for address in wanted
        )
        self._move()

    def _wanted(self) -> set[str]:
        """The other brokers that own shards of samples under way."""
        shards = {stream.token_shard for stream in self._routes.sessions if not stream.is_closed}
        wanted = {self._map.of_shard(shard) for shard in shards} - {"", self._map.here}
        # A broker of another machine means that machine's loopback by such an address.
        return wanted if is_local(self._map.here) else {address for address in wanted if not is_local(address)}

    async def _ask(self) -> None:
        """Ask the own broker who owns what. One that cannot say is left, if there is another in the list."""
        request = broker_pb2.GetShardMapRequest(run_id=self._run_id)
        try:
            response = await call(self._stub.GetShardMap, request, peer=self._peer, timeout_s=ASK_TIMEOUT_S)
        except PenstockError as error:
            _log.info("own broker does not say who owns token shards", peer=self._peer, error=str(error))
            self._own.reconnect()
        else:
            is_elsewhere = response.shard_map.here != self._own_address
            self._take_map(response.shard_map, is_own=True)
            if is_elsewhere and self._own.overdue_s > OVERDUE_S:
                # Calls go to the next of the list by now, but the stream is still at the one before.
                self._own.reconnect()

    # -- sessions with owners ------------------------------------------------------------------------------------------

    def _enter(self, address: str) -> None:
        connection = Connection(address, security=self._security)
        owner = _Owner(address, connection, self._session(connection, on_map=self._take_map))
        owner.task = asyncio.create_task(self._follow(owner))
        self._owners[address] = owner

    async def _follow(self, owner: _Owner) -> None:
        """Connect to an owner and send to it; ends when that fails, or its stream is lost."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await owner.connection.channel.channel_ready()
            owner.is_ready = True
            self._move()
            await owner.session.run_until_lost()
        except (PenstockError, TimeoutError) as error:
            _log.info("owner of token shards not reached", address=owner.address, error=str(error) or "no answer")
        finally:
            owner.is_ready = False

    async def _leave_all(self, is_over: Callable[[_Owner], bool]) -> None:
        """End the sessions with some owners; those that were lost are left alone for a while."""
        for owner in list(self._owners.values()):
            if is_over(owner):
                if owner.task.done():
                    self._left_alone[owner.address] = asyncio.get_running_loop().time() + RETRY_AFTER_S
                await self._leave(owner)

    async def _leave(self, owner: _Owner) -> None:
        """End the session with an owner; what it has not acknowledged goes to the own broker."""
        await end(owner.task)
        del self._owners[owner.address]
        streams = [stream for stream, session in self._routes.sessions.items() if session is owner.session]
        owner.session.hand_over([stream for stream in streams if not stream.is_closed], self._own)
        self._routes.sessions.update(dict.fromkeys(streams, self._own))
        self._num_stored += owner.session.num_tokens_stored
        await owner.connection.close()

    def _move(self) -> None:
        """Move samples to the sessions of their owners, those with unacknowledged chunks later."""
        busy: dict[TokenSession, set[SampleStream]] = {}
        for stream, session in self._routes.sessions.items():
            target = self._session_of(stream.token_shard)
            if target is session or stream.is_closed:
                continue
            if session not in busy:
                busy[session] = session.unacknowledged()
            if stream not in busy[session]:
                session.release(stream)
                target.adopt(stream)
                self._routes.sessions[stream] = target
