"""Connects the broker to Redis, Sentinel or Cluster: deadlines, retries, outages.

Promises:
- Every call ends within CALL_TIMEOUT_S, with an answer or a ServiceUnavailableError that names the reason and the fix.
- Transient faults (a lost connection, a fail-over, LOADING) are retried for RETRY_FOR_S with back-off; after that
  Redis counts as unreachable, and one call at a time tries it, ever more rarely, while others fail at once.
- A Redis that only refuses writes (out of memory, no disk, a replica) still answers reads.
- A change of fault is logged once; every fault is counted by kind.
- At most MAX_CONNECTIONS calls are under way; further ones wait, within their deadline.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import hiredis
import structlog
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, ResponseError

from penstock.errors import ServiceUnavailableError
from penstock.network.rpc import backoff_s
from penstock.process.time_limits import TimeLimit
from services.broker.storage.redis.address import RedisAddress, parse_redis_url
from services.broker.storage.redis.authentication import NO_CREDENTIALS, RedisCredentials
from services.broker.storage.redis.faults import REDIS_ERRORS, Outage, RedisFault, TooFewReplicasError, classify

ATTEMPT_TIMEOUT_S = 3.0
CALL_TIMEOUT_S = 6.0
RETRY_FOR_S = 1.5
MAX_CONNECTIONS = 32
REPLICATION_TIMEOUT_S = 1.0
MAX_REASON_CHARACTERS = 300
MAX_COPIED_BYTES = 16 * 1024
SEND_BUFFER_BYTES = 4 * 1024 * 1024
"""Buffer of a unix socket, as far as the kernel allows: the largest put. TCP sizes its own."""

_log = structlog.get_logger()
_LUA = Path(__file__).parent / "lua"
_T = TypeVar("_T")
_Arg = bytes | memoryview | str | int
_DATA = (bytes, memoryview)
_Command = Sequence[_Arg]


class Script:
    """A Lua script, called by its digest and sent if the server does not know it (yet, or after a restart).

    With `num_replicas`, an answer comes only once this many replicas have all the writes it depends on, those of others
    included. That holds for scripts that only read, too: a master that lost its replicas to a fail-over would
    otherwise confirm writes that the new one never received.
    """

    def __init__(self, *names: str, num_replicas: int = 0) -> None:
        """The files of these names in `lua` make one script, in order."""
        self._text = "".join((_LUA / f"{name}.lua").read_text(encoding="ascii") for name in names)
        self._digest = hashlib.sha1(self._text.encode("ascii"), usedforsecurity=False).hexdigest()
        self._num_replicas = num_replicas

    async def run(
        self, redis: Redis, *, keys: Sequence[str], args: Sequence[_Arg], ahead: Sequence[_Command] = ()
    ) -> Any:
        """The script's result; the commands `ahead` run before it, in the same round trip if possible."""
        rest = (len(keys), *keys, *args)
        try:
            return await exchange(redis, [*ahead, ("EVALSHA", self._digest, *rest)], num_replicas=self._num_replicas)
        except NoScriptError:
            return await exchange(redis, [("EVAL", self._text, *rest)], num_replicas=self._num_replicas)


async def exchange(redis: Redis, commands: Sequence[_Command], *, num_replicas: int = 0) -> Any:
    """The answer to the last of some commands, sent together, once `num_replicas` replicas are as far as the master."""
    if isinstance(redis, RedisCluster):
        return await _through_cluster(redis, commands)
    return (await _answers(redis, commands, num_replicas))[-1]


async def pipelined(redis: Redis | RedisCluster, commands: Sequence[_Command]) -> list[Any]:
    """The answers to some commands, sent together."""
    if not isinstance(redis, RedisCluster):
        return await _answers(redis, commands)
    pipeline = redis.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    return await pipeline.execute()


async def _answers(redis: Redis, commands: Sequence[_Command], num_replicas: int = 0) -> list[Any]:
    """The answers to some commands, sent together, once `num_replicas` replicas are as far as the master.

    As a pipeline of redis-py, but without its bookkeeping, which takes as long as all the rest. A connection that fails
    here closes itself. Raises the first error among the answers, once all are read, and TooFewReplicasError.
    """
    if num_replicas:
        # WAIT counts only writes of its own connection.
        commands = [*commands, ("WAIT", num_replicas, round(REPLICATION_TIMEOUT_S * 1000))]
    answers: list[Any] = []
    errors: list[ResponseError] = []
    pool = redis.connection_pool
    connection = await _borrowed(pool)
    try:
        parts: list[bytes] = []
        for command in commands:
            # Packed by hiredis, in C; by redis-py if a value is too large to copy.
            is_large = any([len(arg) > MAX_COPIED_BYTES for arg in command if isinstance(arg, _DATA)])
            parts += connection.pack_command(*command) if is_large else [hiredis.pack_command(tuple[Any, ...](command))]
        await connection.send_packed_command(parts)
        for _ in commands:
            try:
                answers.append(await connection.read_response())
            except ResponseError as error:
                errors.append(error)
    finally:
        await _give_back(pool, connection)
    if errors:
        raise errors[0]
    if num_replicas and (num_have := answers.pop()) < num_replicas:
        # It may no longer be the master: the next connection asks the Sentinels again.
        await redis.connection_pool.disconnect(inuse_connections=False)
        raise TooFewReplicasError(f"{num_have} of {num_replicas} replicas followed within {REPLICATION_TIMEOUT_S} s")
    return answers


async def _borrowed(pool: ConnectionPool) -> AbstractConnection:
    """A connection of the pool, as its `get_connection` finds one, but without its locks and statistics.

    Those take four times as long as a round trip. Nothing is awaited in between here, so that no lock is needed.
    """
    connection: AbstractConnection = pool.get_available_connection()  # type: ignore[no-untyped-call]
    try:
        if not await _is_fresh(connection):
            await pool.ensure_connection(connection)
    except BaseException:
        await pool.release(connection)
        raise
    return connection


async def _is_fresh(connection: AbstractConnection) -> bool:
    """Whether it is connected, and no answer or end of an earlier call is left on it."""
    try:
        return connection.is_connected and not await connection.can_read()
    except REDIS_ERRORS:
        return False


async def _give_back(pool: ConnectionPool, connection: AbstractConnection) -> None:
    if connection.should_reconnect():  # type: ignore[no-untyped-call]
        await pool.release(connection)
        return
    pool._in_use_connections.remove(connection)
    pool._available_connections.append(connection)


async def _through_cluster(redis: RedisCluster, commands: Sequence[_Command]) -> Any:
    """The answer to the last command; those before it are sent first, as a Cluster's pipeline accepts no scripts."""
    *ahead, last = commands
    if ahead:
        await pipelined(redis, ahead)
    return await redis.execute_command(*last)


class RedisConnection:
    """See the module."""

    def __init__(
        self,
        redis: Redis,
        *,
        sentinels: Sentinel | None = None,
        on_fault: Callable[[str], None] = lambda _kind: None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`sentinels` are those that `redis` asks for its master; `on_fault` is called with the kind of every fault."""
        self._redis = redis
        self._sentinels = sentinels
        self._on_fault = on_fault
        self._monotonic_s = monotonic_s
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._out_of_reach: Outage | None = None
        self._unwritable: Outage | None = None

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        credentials: RedisCredentials = NO_CREDENTIALS,
        on_fault: Callable[[str], None] = lambda _kind: None,
    ) -> RedisConnection:
        """Connects on first use. Raises ValueError if the URL is malformed."""
        redis, sentinels = _clients(parse_redis_url(url), credentials)
        return cls(redis, sentinels=sentinels, on_fault=on_fault)

    async def read(self, operation: Callable[[Redis], Awaitable[_T]]) -> _T:
        """The result of an operation that changes nothing; see `write`."""
        return await self._call(operation)

    async def write(self, operation: Callable[[Redis], Awaitable[_T]]) -> _T:
        """The result of an operation that is safe to repeat: it may run several times.

        Raises:
            ServiceUnavailableError: Redis is unavailable or refused; whether the operation took place is unknown.
        """
        result = await self._call(operation)
        if self._unwritable is not None:
            self._note_end(self._unwritable)
            self._unwritable = None
        return result

    async def close(self) -> None:
        """Close every connection."""
        await self._redis.aclose()
        if self._sentinels is not None:
            await self._sentinels.aclose()

    async def _call(self, operation: Callable[[Redis], Awaitable[_T]]) -> _T:
        """The result of the first attempt that succeeds, within the call's deadline."""
        outage = self._out_of_reach
        if outage is not None and not outage.may_try(self._monotonic_s()):
            raise self._unavailable(outage)
        try:
            with TimeLimit(CALL_TIMEOUT_S):
                async with self._slots:
                    result = await self._attempts(operation, RETRY_FOR_S if outage is None else 0.0)
        except REDIS_ERRORS as error:
            raise self._unavailable(self._note(error)) from error
        if self._out_of_reach is not None:
            self._note_end(self._out_of_reach)
            self._out_of_reach = None
        return result

    async def _attempts(self, operation: Callable[[Redis], Awaitable[_T]], retry_for_s: float) -> _T:
        """The result of the first attempt that succeeds.

        redis-py asks Sentinels through `asyncio.wait_for`, which up to Python 3.11 forgets a cancellation that comes
        together with the result (bpo-37658): a task that cancels a loop over Redis and waits for its end would wait for
        ever. So each result is taken only if nothing was cancelled meanwhile.
        """
        task = asyncio.current_task()
        num_cancelled = task.cancelling() if task is not None else 0
        give_up_s = self._monotonic_s() + retry_for_s
        for delay_s in backoff_s(first_s=0.02, most_s=0.3):
            try:
                with TimeLimit(ATTEMPT_TIMEOUT_S):
                    result = await operation(self._redis)
                    if task is not None and task.cancelling() > num_cancelled:
                        raise asyncio.CancelledError
                    return result
            except REDIS_ERRORS as error:
                if not self._may_repeat(error, latest_s=give_up_s - delay_s):
                    raise
                await asyncio.sleep(delay_s)
        raise AssertionError("unreachable: backoff_s never ends")

    def _may_repeat(self, error: Exception, *, latest_s: float) -> bool:
        """Whether the fault is transient and time is left to retry; if so it is counted."""
        fault = classify(error)
        if not fault.is_brief or self._monotonic_s() > latest_s:
            return False
        self._on_fault(fault)
        return True

    def _note(self, error: Exception) -> Outage:
        """Record the fault; log it if it is new."""
        fault = classify(error)
        self._on_fault(fault)
        message = " ".join(str(error).split())[:MAX_REASON_CHARACTERS] or type(error).__name__
        known = self._unwritable if fault.concerns_writes_only else self._out_of_reach
        if known is not None and known.fault is fault:
            known.message = message
            return known
        _log.warning("redis is away", fault=str(fault), error=message, fix=fault.advice)
        found = Outage.begin(fault, message, self._monotonic_s())
        if fault.concerns_writes_only:
            self._unwritable = found
        elif fault is not RedisFault.REFUSED:
            # A refusal concerns one command and says nothing about the next.
            self._out_of_reach = found
        return found

    def _note_end(self, outage: Outage) -> None:
        _log.info("redis works again", fault=str(outage.fault), after_s=round(self._monotonic_s() - outage.since_s, 1))

    def _unavailable(self, outage: Outage) -> ServiceUnavailableError:
        return ServiceUnavailableError(outage.describe(self._monotonic_s()), redis_fault=outage.fault)


async def _connected(connection: AbstractConnection) -> None:
    """Set up a new connection.

    By default unix sockets buffer 208 kB: a put of 4 MB needed sixteen writes, now one.
    """
    writer = connection._writer  # redis-py has a setting for the sockets of TCP only
    found: socket.socket | None = writer.get_extra_info("socket") if writer else None
    if found is not None and found.family == socket.AF_UNIX:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    await connection.on_connect()


def _clients(address: RedisAddress, credentials: RedisCredentials) -> tuple[Redis, Sentinel | None]:
    """A client, and the Sentinels it asks, without retries of their own: `RedisConnection` decides."""
    common: dict[str, Any] = {
        # Each attempt has a deadline of ours; redis-py's own would cost a task for each command (`asyncio.wait_for`).
        "socket_timeout": None,
        "socket_connect_timeout": ATTEMPT_TIMEOUT_S,
        # A semaphore bounds the calls under way: it waits, but a full pool would raise.
        "max_connections": 2 * MAX_CONNECTIONS,
        "retry": Retry(NoBackoff(), 0),
    }
    if address.kind == "single":
        tls = credentials.tls_settings if address.url.startswith("rediss://") else {}
        return Redis.from_url(address.url, **common, **tls, redis_connect_func=_connected), None
    tls = {"ssl": True, **credentials.tls_settings} if address.is_tls else {"ssl": False}
    common |= {"username": address.username, "password": address.password, **tls}
    if address.kind == "cluster":
        nodes = [ClusterNode(host, port) for host, port in address.hosts]
        # It has all commands that the broker uses, under the same names.
        return cast("Redis", RedisCluster(startup_nodes=nodes, **common)), None
    asking: dict[str, Any] = {"socket_timeout": 1.0, "socket_connect_timeout": 1.0, **tls}
    asking |= {"retry": Retry(NoBackoff(), 0), "password": credentials.sentinel_password}
    sentinels = Sentinel(list(address.hosts), sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
    master: Redis = sentinels.master_for(address.service, db=address.db, **common)
    return master, sentinels
