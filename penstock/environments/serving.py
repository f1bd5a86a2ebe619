"""Serves an environment as an EnvironmentService."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvloop

from penstock.clock import SystemClock
from penstock.config import ConfigError
from penstock.environments import metrics
from penstock.environments.environment import EnvironmentFactory
from penstock.environments.environment_messages import describe_environment, read_task
from penstock.environments.loading import load_environment
from penstock.environments.session import Session
from penstock.errors import InternalError, InvalidFieldError, QueueFullError, UnknownSessionError
from penstock.network.metrics_server import serve_metrics
from penstock.network.rpc import Server, Service, run_until_stopped, service_of
from penstock.process.busy_time import BusyTracker
from penstock.process.log_setup import configure_logging
from penstock.process.logger import get_logger
from penstock.rewards.serving import third_party_security
from penstock.rewards.threads import DaemonThreads
from penstock.tracing.measuring import Measured, measuring_detail
from penstock.tracing.recording import Span, Value, is_on, record
from penstock.v1 import environment_pb2, environment_pb2_grpc, types_pb2

DEFAULT_LISTEN = "127.0.0.1:7320"
DEFAULT_MAX_SESSIONS = 1024
DEFAULT_MAX_IDLE_S = 1800.0
MAX_THREADS = 256
"""Plain methods that run at once; calls beyond them wait inside their deadline."""
_RECORD_EVERY_S = 5.0
"""Between spans of what the server did as a whole."""

_log = get_logger()


class EnvironmentServicer(environment_pb2_grpc.EnvironmentServiceServicer):
    """EnvironmentService over a class or factory.

    Args:
        factory: Makes the environment of each session. Raises InvalidFieldError if its description is malformed.
        max_sessions: Most sessions open at once; Reset then answers RESOURCE_EXHAUSTED.
        max_idle_s: A session without a call for this long is closed, seconds.
    """

    def __init__(
        self,
        factory: EnvironmentFactory,
        *,
        max_sessions: int = DEFAULT_MAX_SESSIONS,
        max_idle_s: float = DEFAULT_MAX_IDLE_S,
    ) -> None:
        self._factory = factory
        self._description = describe_environment(factory, max_sessions=max_sessions)
        self._max_idle_s = max_idle_s
        self._threads = DaemonThreads(max_threads=min(MAX_THREADS, max_sessions), name="environment")
        self._sessions: dict[str, Session] = {}
        self._called_s: dict[str, float] = {}
        """When each session was last called, by the event loop's clock; oldest first."""
        self._closing: set[asyncio.Task[None]] = set()
        self._busy = BusyTracker(SystemClock())

    @property
    def num_sessions(self) -> int:
        """Sessions that are open."""
        return len(self._sessions)

    async def Reset(self, request: environment_pb2.ResetRequest, context: Any) -> environment_pb2.ResetResponse:
        """Open a session, or answer as before."""
        del context
        task, name = read_task(request), request.session_id
        if request.restarts:
            self._drop(name)
        session = self._sessions.get(name)
        if session is None:
            self._close_idle()
            if len(self._sessions) >= self._description.max_sessions:
                raise QueueFullError(f"{len(self._sessions)} sessions are open, as many as this server holds")
            session = Session(self._factory, name=self._description.name, threads=self._threads)
            self._sessions[name] = session
            metrics.SESSIONS.inc()
        self._note_call(name)
        try:
            with self._working("reset", name, {}):
                return await session.reset(task)
        except (InvalidFieldError, InternalError, QueueFullError):
            # Of several callers that waited for it, one may have begun another one since.
            if self._sessions.get(name) is session:
                self._drop(name)
            raise

    async def Step(self, request: environment_pb2.StepRequest, context: Any) -> environment_pb2.StepResponse:
        """Take a turn, or answer as before."""
        del context
        session = self._sessions.get(request.session_id)
        if session is None:
            raise UnknownSessionError(f"session_id: {request.session_id[:100]!r} is not open here")
        self._note_call(request.session_id)
        try:
            with self._working("step", request.session_id, {"rl.turn": request.turn}) as measured:
                response = await session.step(request)
                if response.status not in (types_pb2.SCORE_STATUS_UNSPECIFIED, types_pb2.SCORE_STATUS_OK):
                    measured.error = response.message
                return response
        finally:
            self._note_call(request.session_id)

    async def Close(self, request: environment_pb2.CloseRequest, context: Any) -> environment_pb2.CloseResponse:
        """End a session."""
        del context
        self._drop(request.session_id)
        return environment_pb2.CloseResponse()

    async def GetEnvironment(
        self, request: environment_pb2.GetEnvironmentRequest, context: Any
    ) -> environment_pb2.GetEnvironmentResponse:
        """Describe the environment."""
        del request, context
        return self._description

    @contextmanager
    def _working(self, call: str, session: str, attributes: Mapping[str, Value]) -> Iterator[Measured]:
        self._busy.begin()
        outcome = "refused"
        try:
            attributes = {"rl.session": session, **attributes}
            with metrics.CALL_S.labels(call).time(), measuring_detail(f"rl.environment.{call}", attributes) as measured:
                yield measured
            outcome = "failed" if measured.error else "ok"
        finally:
            self._busy.end()
            metrics.CALLS.labels(call, outcome).inc()

    async def record_work(self) -> None:
        """Record the periods in which it was at work, until cancelled; those of the last seconds at the end."""
        try:
            while is_on():
                await asyncio.sleep(_RECORD_EVERY_S)
                self._record_work()
        finally:
            self._record_work()

    def _record_work(self) -> None:
        for start_s, end_s in self._busy.take_spans():
            record(Span(name="rl.environment.work", start_s=start_s, end_s=end_s))

    async def close_idle(self) -> None:
        """Close idle sessions, until cancelled."""
        while True:
            await asyncio.sleep(min(60.0, self._max_idle_s / 4))
            self._close_idle()

    async def close(self) -> None:
        """End every session whose environment is not at work, and let the threads end."""
        for name in list(self._sessions):
            self._drop(name)
        if self._closing:
            await asyncio.wait(self._closing, timeout=1.0)
        self._threads.close()

    def _close_idle(self) -> None:
        oldest_s = asyncio.get_running_loop().time() - self._max_idle_s
        for name, called_s in list(self._called_s.items()):
            if called_s > oldest_s:
                return
            if not self._sessions[name].is_busy:
                self._drop(name)

    def _note_call(self, name: str) -> None:
        if name in self._sessions:
            self._called_s.pop(name, None)
            self._called_s[name] = asyncio.get_running_loop().time()

    def _drop(self, name: str) -> None:
        session = self._sessions.pop(name, None)
        self._called_s.pop(name, None)
        if session is not None:
            metrics.SESSIONS.dec()
            closing = asyncio.create_task(session.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


def environment_service(servicer: EnvironmentServicer) -> Service:
    """EnvironmentService, to be given to a Server."""
    return service_of(servicer)


async def serve_async(
    target: EnvironmentFactory | str,
    *,
    listen: str = DEFAULT_LISTEN,
    metrics_listen: str | None = None,
    max_sessions: int = DEFAULT_MAX_SESSIONS,
    max_idle_s: float = DEFAULT_MAX_IDLE_S,
) -> None:
    """Serve an environment until SIGTERM or SIGINT.

    Args:
        target: A subclass of Environment, a function that makes one, or the name of either as `module:Class`.
        listen: Address to listen on, host:port; port 0 takes a free one, which is logged.
        metrics_listen: Address of its Prometheus metrics, host:port; None serves none.
        max_sessions: Most sessions open at once.
        max_idle_s: A session without a call for this long is closed, seconds.

    Raises:
        EnvironmentLoadError, PortUnavailableError, ConfigError.
    """
    factory = load_environment(target) if isinstance(target, str) else target
    try:
        servicer = EnvironmentServicer(factory, max_sessions=max_sessions, max_idle_s=max_idle_s)
    except InvalidFieldError as error:
        raise ConfigError(f"environment: {error}") from error
    security = third_party_security()
    serve_metrics(metrics_listen, security)
    server = Server(listen=listen, services=[environment_service(servicer)], security=security)

    def announce() -> None:
        address = f"{listen.rpartition(':')[0]}:{server.port}"
        _log.info("environment is served", address=address, use_as=f"grpc://{address}")

    try:
        await run_until_stopped(server, loops=[servicer.close_idle, servicer.record_work], on_started=announce)
    finally:
        await servicer.close()


def serve(target: EnvironmentFactory | str, *, listen: str = DEFAULT_LISTEN) -> None:
    """`serve_async` for a program of its own: sets up logging, blocks until SIGTERM or SIGINT."""
    configure_logging("environment")
    try:
        uvloop.run(serve_async(target, listen=listen))
    except ConfigError as error:
        sys.exit(str(error))
