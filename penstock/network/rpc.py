"""The gRPC set-up of every Penstock server and client.

Servers: health per service, reflection, message-size limits, errors as typed statuses, and a drain on SIGTERM or SIGINT
that lets calls under way end (one some seconds after the first ends at once). Clients: channels with keepalive, calls
that always have a deadline, back-off with jitter, and fail-over between interchangeable servers.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from penstock import tracing
from penstock.errors import BadCertificateError, PenstockError, from_rpc_error
from penstock.network.failover import FailoverChannel
from penstock.network.guard import ErrorInterceptor
from penstock.network.outage import Outage
from penstock.process.grace_periods import SERVER_STOP_S
from penstock.process.logger import get_logger
from penstock.process.signals import StopSignals
from penstock.process.tasks import Cancellation, end, until_first_failure
from penstock.security import NO_SECURITY, Security
from penstock.security.access import AccessInterceptor
from penstock.security.checks.troubles import TROUBLES
from penstock.security.checks.watching import CertificateWatch, hosts_of
from penstock.security.tls import add_port
from penstock.targets import split_targets
from penstock.tracing.interceptor import TraceInterceptor

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
HTTP2_FRAME_BYTES = 1024 * 1024
DEFAULT_TIMEOUT_S = 10.0
PLAIN_TEXT = "penstock.PlainText"
"""Health service name that reports SERVING if other machines can reach the process in plain text."""
MAX_CONCURRENT_STREAMS = 1024
"""Concurrent streams per connection; further ones wait at the client."""
MAX_CONCURRENT_CALLS = 4096
"""Concurrent calls per server, streams included; more are refused with RESOURCE_EXHAUSTED, which bounds memory."""

_log = get_logger()
_Response = TypeVar("_Response")

_COMMON_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Messages of many trajectories have half a megabyte: gRPC's own 16 KiB would cut each into thirty frames.
    ("grpc.http2.max_frame_size", HTTP2_FRAME_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    # Otherwise two servers silently share one port, and each gets half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)
# A restarted peer must be found again within seconds; gRPC's own default backs off to two minutes. What it calls the
# least back-off is how long an attempt to connect may take: with TLS several round trips, perhaps on a busy machine.
_CLIENT_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 3_000),
    # A channel of its own per client object: a broken one never blocks another through the shared pool.
    ("grpc.use_local_subchannel_pool", 1),
)


_AWAY = ("Connection refused", "DNS resolution failed", "No route to host", "Network is unreachable")
"""gRPC's message when there is no server to speak TLS with."""


class PortUnavailableError(Exception):
    """The address is not available for listening; the message names it and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A servicer, how it is added to a server, and its full name as in the proto."""

    name: str
    add: Callable[[Any, grpc.aio.Server], None]
    servicer: object


def service_of(servicer: object) -> Service:
    """The service of the generated class that a servicer is derived from."""
    base = next(each for each in type(servicer).__mro__ if each.__module__.endswith("_pb2_grpc"))
    add = getattr(sys.modules[base.__module__], f"add_{base.__name__}_to_server")
    return Service(name=f"penstock.v1.{base.__name__.removesuffix('Servicer')}", add=add, servicer=servicer)


class Server:
    """A gRPC server of one or more services. `stopping` is set when it drains: long streams watch it and end.

    One that is not `serves_at_once` reports itself unhealthy until `set_serving` is called. `public_hosts` are the
    names and addresses under which others reach this process: its certificate must contain them.
    """

    def __init__(
        self,
        *,
        listen: str,
        services: Sequence[Service],
        security: Security = NO_SECURITY,
        serves_at_once: bool = True,
        public_hosts: Sequence[str] = (),
    ) -> None:
        self.stopping = asyncio.Event()
        self._serves_at_once = serves_at_once
        self._listen = listen
        self._names = [service.name for service in services]
        interceptors: list[grpc.aio.ServerInterceptor] = [
            AccessInterceptor(security.tokens, security.revocations),
            ErrorInterceptor(),
        ]
        if tracing.is_on():
            interceptors.append(TraceInterceptor())
        self._server = grpc.aio.server(
            interceptors=interceptors, options=_SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS
        )
        for service in services:
            service.add(service.servicer, self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        self._security = security
        self._watch = CertificateWatch(security.tls_files, hosts=[*hosts_of(listen), *public_hosts])
        self._watching: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> int:
        """Listen and report health; returns the port.

        Raises:
            PortUnavailableError: The address cannot be listened on.
            ConfigError: It must not be listened on without TLS.
        """
        self._security.admit_listener(self._listen, setting="listen")
        try:
            self.port = add_port(self._server, self._listen, self._security.tls_files)
        except RuntimeError as error:
            raise PortUnavailableError(
                f"cannot listen on {self._listen}: the port is in use or the address is not this machine's; "
                "stop the other process or choose another port"
            ) from error
        await self.set_serving(self._serves_at_once)
        if self._security.plain_listeners:
            await self.set_serving(True, PLAIN_TEXT)
        await self._server.start()
        self._watching = asyncio.create_task(self._watch.run())
        return self.port

    @property
    def certificate_problems(self) -> list[str]:
        """What is wrong with this process's certificate now, one line each."""
        return [finding.text for finding in self._watch.findings]

    async def set_serving(self, is_serving: bool, *names: str) -> None:
        """Set health of the named services (all, and the overall state, when none is named)."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in names or ("", *self._names):
            await self._health.set(name, status)

    async def stop(self, *, grace_s: float) -> None:
        """Refuse new calls, let those under way end for `grace_s` seconds, then end them."""
        self.stopping.set()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        if self._watching is not None:
            self._watching.cancel()


async def run_until_stopped(
    server: Server,
    *,
    loops: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
    on_started: Callable[[], None] = lambda: None,
    before_stop: Callable[[], Awaitable[None]] | None = None,
    grace_s: float = SERVER_STOP_S,
) -> None:
    """Serve until SIGTERM or SIGINT, or until a loop fails (its error is raised); see `StopSignals`.

    `before_stop` runs after the signal and before the server stops, for work that needs the server still up.
    """
    with StopSignals() as signals:
        await server.start()
        on_started()
        tasks = [asyncio.create_task(make()) for make in loops]
        waiter = asyncio.create_task(signals.requested.wait())
        try:
            await until_first_failure(waiter, tasks)
            server.stopping.set()
            if before_stop is not None:
                await before_stop()
        finally:
            await server.stop(grace_s=grace_s)
            await end(waiter, *tasks)


def open_channel(target: str, security: Security = NO_SECURITY) -> grpc.aio.Channel:
    """A channel to `target` (host:port) that reconnects by itself; close it when done.

    Several targets, separated by commas, are interchangeable: see `FailoverChannel`. Raises ValueError.
    """
    targets = split_targets(target)
    for name in targets:
        TROUBLES.note_target(name, security.tls_files)
    channels = [security.open_channel(name, _CLIENT_OPTIONS) for name in targets]
    return channels[0] if len(channels) == 1 else FailoverChannel(channels, targets)


async def call(
    method: Callable[..., Awaitable[_Response]], request: Any, *, peer: str, timeout_s: float = DEFAULT_TIMEOUT_S
) -> _Response:
    """One unary call with a deadline, within the current trace; raises the PenstockError the server raised.

    `peer` names it in messages.
    """
    # Streams live longer than any span: what they carry names its trace itself. A coroutine function is no method of a
    # stub, but makes calls of its own.
    sent = None if inspect.iscoroutinefunction(method) else tracing.metadata()
    async with translated_errors(peer):
        if sent is None:
            return await method(request, timeout=timeout_s)
        return await method(request, timeout=timeout_s, metadata=sent)


@asynccontextmanager
async def translated_errors(peer: str) -> AsyncIterator[None]:
    """Inside, a call's AioRpcError becomes the PenstockError the server raised."""
    cancellation = Cancellation()
    try:
        yield
    except grpc.aio.AioRpcError as error:
        cancellation.check()
        raise await explained(error, peer=peer) from error


async def explained(error: grpc.aio.AioRpcError, *, peer: str) -> PenstockError:
    """The error that the server raised; BadCertificateError if TLS fails, which takes up to some seconds to find out.

    `peer` names the server as it was given to `open_channel`.
    """
    found = from_rpc_error(error, peer=peer)
    said = error.details() or ""
    if error.code() != grpc.StatusCode.UNAVAILABLE or error.trailing_metadata():
        return found
    # A name may have several addresses, and gRPC reports only the last one's error.
    if any(sign in said for sign in _AWAY) and not TROUBLES.is_by_name(peer):
        return found
    trouble = await TROUBLES.trouble_with(peer)
    return BadCertificateError(f"{peer}: {trouble}") if trouble else found


def backoff_s(*, first_s: float = 0.1, most_s: float = 3.0) -> Iterator[float]:
    """Delays that double up to `most_s`, each cut by up to half at random so that clients do not retry in lockstep."""
    delay_s = first_s
    while True:
        yield delay_s * random.uniform(0.5, 1.0)
        delay_s = min(most_s, delay_s * 2)


async def call_with_retry(
    method: Callable[..., Awaitable[_Response]],
    request: Any,
    *,
    peer: str,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    give_up_after_s: float | None,
    outage: Outage | None = None,
) -> _Response:
    """`call`, repeated with back-off while the error is retryable, for at most `give_up_after_s` seconds.

    None retries for ever; errors that a retry cannot fix are raised at once. `outage` is kept up to date.
    """
    loop = asyncio.get_running_loop()
    deadline = None if give_up_after_s is None else loop.time() + give_up_after_s
    outage = outage or Outage(peer)
    for delay_s in backoff_s():
        try:
            response = await call(method, request, peer=peer, timeout_s=timeout_s)
        except PenstockError as error:
            if not error.is_retryable or _is_too_large(error):
                outage.answered()
                raise
            if deadline is not None and loop.time() + delay_s > deadline:
                raise
            outage.failed(error)
            await asyncio.sleep(delay_s)
        else:
            outage.answered()
            return response
    raise AssertionError("unreachable: backoff_s never ends")


def _is_too_large(error: PenstockError) -> bool:
    """Whether gRPC refused an oversized message: it uses the code of a full queue, but no retry helps."""
    return "message larger than max" in str(error)


async def wait_until_serving(
    target: str, *, service: str = "", timeout_s: float, security: Security = NO_SECURITY
) -> bool:
    """Whether the server at `target` reports SERVING for `service` within `timeout_s` seconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    async with open_channel(target, security) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for delay_s in backoff_s(first_s=0.05, most_s=0.5):
            try:
                request = health_pb2.HealthCheckRequest(service=service)
                response = await stub.Check(request, timeout=max(0.1, min(2.0, deadline - loop.time())))
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return True
            except grpc.aio.AioRpcError as error:
                _log.debug("not serving yet", target=target, code=error.code().name)
            if loop.time() + delay_s > deadline:
                return False
            await asyncio.sleep(delay_s)
    return False
