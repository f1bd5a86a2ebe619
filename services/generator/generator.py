"""One generator: engine, lease stream, token stream and weights, wired together.

    STARTING -> SERVING <-> PAUSED      (leases come only while an attested version is held)
                   |
                   +-> DRAINING -> DRAINED
       any  -> FAILED -> everything given back, process ends

The loops (`run_engine`, `watch_engine`, `send_tokens`, `watch_weights`, `pull_weights`, `take_leases`) are run by the
server; each ends with an error only if the process has to end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial

import structlog

from penstock.clients.leases import LeaseSession
from penstock.clients.sharding.sharded_tokens import ShardedTokens
from penstock.clock import SystemClock
from penstock.errors import InvalidFieldError, NotOfferedError, PenstockError, ServiceUnavailableError
from penstock.model.model_folder import TextDecoder
from penstock.network.connection import Connection
from penstock.network.outage import Outage
from penstock.process.busy_time import BusyTracker
from penstock.process.grace_periods import ENGINE_STOP_S
from penstock.process.tasks import end
from penstock.rewards.score_messages import THIRD_PARTY
from penstock.security import NO_SECURITY, Security
from penstock.v1 import generator_pb2
from services.generator.config import GeneratorConfig
from services.generator.decoding.drain import drained
from services.generator.decoding.lease_handler import GeneratorLeaseHandler
from services.generator.decoding.rollout_parts import RolloutParts
from services.generator.decoding.sample_runner import Rollouts
from services.generator.decoding.token_rate import TokenRate
from services.generator.decoding.unleased import UnleasedSamples
from services.generator.engine.attested_weights import AttestedWeights
from services.generator.engine.engine import (
    Engine,
    EngineError,
    EngineHungError,
    PausableEngine,
    UpdateMode,
    UpdateReport,
)
from services.generator.engine.model_files import end_token_ids
from services.generator.environments.client import EnvironmentClient
from services.generator.environments.rendering import ChatTokenizer
from services.generator.environments.sessions import EnvironmentSessions
from services.generator.failure_log import Failure, FailureCounts
from services.generator.hello import generator_hello, routing_shape
from services.generator.incarnation import Incarnation
from services.generator.metrics import GeneratorMetrics
from services.generator.watchdog import watch_engine
from services.generator.weights.wiring import build_puller

FLUSH_TIMEOUT_S = 3.0
MAX_DRAIN_S = 3600.0
"""Longest a drain without a stated grace waits for samples to finish."""
LEASES_ARRIVE_WITHIN_S = 0.2
"""The heartbeat that says "draining" leaves within 50 ms; what the broker sent before reading it arrives soon after."""
MODE_MESSAGES = {
    UpdateMode.KEEP: generator_pb2.UPDATE_MODE_KEEP,
    UpdateMode.RECOMPUTE: generator_pb2.UPDATE_MODE_RECOMPUTE,
    UpdateMode.DRAIN: generator_pb2.UPDATE_MODE_DRAIN,
}

_log = structlog.get_logger()


class GeneratorFailedError(Exception):
    """The engine has failed; everything was given back."""


class Generator:
    """Use as an async context manager around the loops; on exit the engine and every connection are closed.

    Args:
        config: Its settings.
        engine: Not started.
        text: Decodes completions for reward models.
        metrics: Its Prometheus numbers.
        security: Credentials of the process.
        tokenizer: Renders what an environment says; None without one, or for a model without a tokenizer.
        judges: Credentials that an environment is shown.
    """

    def __init__(
        self,
        config: GeneratorConfig,
        *,
        engine: Engine,
        text: TextDecoder,
        metrics: GeneratorMetrics,
        security: Security = NO_SECURITY,
        tokenizer: ChatTokenizer | None = None,
        judges: Security = NO_SECURITY,
    ) -> None:
        self._config = config
        self._engine = engine
        self._metrics = metrics
        # Kept across restarts, so the folder's name omits the process's own suffix.
        cache_dir = config.cache_dir / config.generator_id
        self._incarnation = Incarnation(config.generator_id, cache_dir)
        self.generator_id = self._incarnation.generator_id
        self._failures = FailureCounts(cache_dir, metrics.engine_failures)
        self._resources = AsyncExitStack()
        self._started = asyncio.Event()
        self._failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._start_s = time.monotonic()
        self._busy = BusyTracker(SystemClock())
        self._session: LeaseSession | None = None
        self._held = AttestedWeights(on_change=self._notify)
        self._security = security
        self._broker = Connection(config.broker, security=security)
        self._tokens = ShardedTokens(
            self._broker,
            run_id=config.run_id,
            generator_id=self.generator_id,
            flush_interval_s=config.flush_interval_s,
            security=security,
        )
        self._environment = _environment_connection(config, judges)
        self._routing = routing_shape(config)
        self._parts = self._rollout_parts(text, tokenizer)
        self._rollouts = Rollouts(self._parts, max_concurrent_samples=config.engine.max_concurrent_samples)
        rate = TokenRate()
        self._puller, self._connections = build_puller(
            config,
            generator_id=self.generator_id,
            cache_dir=cache_dir,
            engine=engine,
            held=self._held,
            drained=partial(drained, self._rollouts, engine=engine, rate=rate, max_wait_s=config.engine.max_drain_s),
            metrics=metrics,
            security=security,
        )
        self._lease_handler = GeneratorLeaseHandler(
            engine=engine,
            rollouts=self._rollouts,
            held=self._held,
            busy=self._busy,
            rate=rate,
            on_owner=self._puller.note_owner,
        )
        self.warn_of(lambda: "")
        self._leasing: asyncio.Task[None] | None = None
        self._drain: asyncio.Task[None] | None = None
        self._is_paused = False

    def _rollout_parts(self, text: TextDecoder, tokenizer: ChatTokenizer | None) -> RolloutParts:
        config = self._config
        return RolloutParts(
            engine=self._engine,
            records_routes=config.records_routes,
            tokens=self._tokens,
            held=self._held,
            text=text,
            end_token_ids=end_token_ids(config.model_folder),
            busy=self._busy,
            metrics=self._metrics,
            on_change=self._notify,
            on_engine_failure=self.fail,
            sessions=self._sessions(config, text, tokenizer),
        )

    async def __aenter__(self) -> Generator:
        """Open the connections."""
        self._failures.begin()
        self._resources.callback(self._failures.end)
        self._incarnation.begin()
        self._resources.callback(self._incarnation.end)
        self._resources.push_async_callback(self._broker.close)
        if self._environment is not None:
            self._resources.push_async_callback(self._environment.close)
        for connection in self._connections:
            await self._resources.enter_async_context(connection)
        self._resources.push_async_callback(self._stop_engine)
        return self

    async def __aexit__(self, *_exception: object) -> None:
        """Stop the engine and close every connection."""
        if self._drain is not None:
            await end(self._drain)
        await self._resources.aclose()

    async def run_engine(self, on_ready: Callable[[], Awaitable[None]]) -> None:
        """Start the engine, then wait for its failure.

        Raises:
            EngineError, DigestMismatchError: It did not start.
            GeneratorFailedError: It failed later.
        """
        await self._engine.start()
        self._started.set()
        _log.info("engine started", generator_id=self.generator_id, engine=self._config.engine.engine)
        await on_ready()
        error = await self._failure
        _log.error("engine failed; giving everything back", generator_id=self.generator_id, exc_info=error)
        await self._give_back(grace_s=0.0)
        raise GeneratorFailedError(f"{type(error).__name__}: {error}") from error

    async def watch_engine(self) -> None:
        """Treat an engine that owes tokens, or an installation, and makes no progress as failed; until cancelled."""
        await self._started.wait()
        await watch_engine(
            self._engine,
            self._rollouts.decoding,
            max_silence_s=self._config.engine.max_silence_s,
            owes_tokens=self._owes_tokens,
            on_hung=self.fail,
        )

    async def send_tokens(self) -> None:
        """Keep the token stream going."""
        await self._tokens.run()

    async def watch_weights(self) -> None:
        """Note published versions, once the engine can take them."""
        await self._started.wait()
        await self._puller.watch()

    async def pull_weights(self) -> None:
        """Install published versions; an engine that cannot take them is a failure of the generator."""
        await self._started.wait()
        try:
            await self._puller.run()
        except (EngineError, PenstockError) as error:
            self.fail(error)

    async def take_leases(self) -> None:
        """Keep the lease stream going, from the first attested version until the generator is drained."""
        await self._started.wait()
        await self._held.wait_for(0)
        hello = generator_hello(
            self._config,
            self._engine,
            generator_id=self.generator_id,
            replaces_generator_id=self._incarnation.predecessor,
            routing=self._routing,
            listens_in_plain_text=bool(self._security.plain_listeners),
        )
        self._session = LeaseSession(self._broker, hello=hello, handler=self._lease_handler, security=self._security)
        self._leasing = asyncio.create_task(self._session.run())
        if self._lease_handler.is_draining:
            self._leasing.cancel()
        try:
            await asyncio.wait({self._leasing})
            if not self._leasing.cancelled():
                self._leasing.result()
        finally:
            self._leasing.cancel()

    def _sessions(
        self, config: GeneratorConfig, text: TextDecoder, tokenizer: ChatTokenizer | None
    ) -> EnvironmentSessions | None:
        if self._environment is None or config.environment is None:
            return None

        def instance_id() -> str:
            return self._held.current.instance_id if self._held.current is not None else ""

        return EnvironmentSessions(
            client=EnvironmentClient(self._environment, config.environment),
            text=text,
            tokenizer=tokenizer,
            run_id=config.run_id,
            instance_id=instance_id,
        )

    @property
    def broker_outage(self) -> Outage | None:
        """Whether the broker is away; None before the first lease was asked for."""
        return self._session.outage if self._session is not None else None

    def fail(self, error: Exception) -> None:
        """The engine has failed; only the first report counts."""
        if not self._failure.done():
            self._failures.count(Failure.HUNG if isinstance(error, EngineHungError) else Failure.FAILED)
            self._failure.set_result(error)

    def drain(self, grace_s: float | None) -> bool:
        """Begin to drain; returns whether nothing is held any more. Calling again restarts the grace period."""
        self._lease_handler.is_draining = True
        self._rollouts.stop_accepting()
        if self._rollouts.is_empty:
            return True
        if self._drain is not None:
            self._drain.cancel()
        self._drain = asyncio.create_task(self._give_back(grace_s=MAX_DRAIN_S if grace_s is None else grace_s))
        return False

    async def stop(self) -> None:
        """Give everything back now; takes seconds at most."""
        await self._give_back(grace_s=0.0)

    async def pause(self, is_paused: bool) -> None:
        """Pause the engine, or resume it. Raises NotOfferedError, ServiceUnavailableError."""
        self._check_started()
        if not isinstance(self._engine, PausableEngine):
            raise NotOfferedError(f"the {self._config.engine.engine} engine cannot be paused")
        await (self._engine.pause() if is_paused else self._engine.resume())
        self._is_paused = is_paused

    async def pull(self, policy_version: int | None, mode: UpdateMode) -> UpdateReport:
        """Fetch and install a version now. Raises PenstockError; see the proto."""
        self._check_started()
        try:
            return await self._puller.pull(policy_version, mode)
        except TimeoutError as error:
            raise ServiceUnavailableError("running samples did not finish in time") from error
        except EngineError as error:
            self.fail(error)
            raise ServiceUnavailableError(f"the engine failed: {error}") from error

    @property
    def update_mode(self) -> UpdateMode:
        """The default for what happens to running samples."""
        return self._config.engine.update_mode

    def warn_of(self, warning: Callable[[], str]) -> None:
        """Report to the broker, in each heartbeat, what an operator has to fix; empty if nothing.

        Beside that, while it is so, that the environment is away.
        """
        sessions = self._parts.sessions

        def warnings() -> str:
            return "; ".join(filter(None, (warning(), "" if sessions is None else sessions.client.notice)))

        self._lease_handler.warning = warnings

    @property
    def run_id(self) -> str:
        """The run for which it works."""
        return self._config.run_id

    def set_relay_patience(self, patience_s: float) -> None:
        """Leave each new version so long to another machine of the site. Raises InvalidFieldError without a site."""
        if (wait := self._puller.relay_wait) is None:
            message = "patience: this generator has no site, and so no relay; set `site` in its configuration"
            raise InvalidFieldError(message, field="patience")
        wait.set_patience(patience_s)
        _log.info("the relay of the site changed", relay_patience_s=patience_s)

    def unleased(self) -> UnleasedSamples:
        """An interface for another part of this process to decode beside the leases."""
        return UnleasedSamples(generator_id=self.generator_id, rollouts=self._rollouts, parts=self._parts)

    def view(self) -> generator_pb2.GetGeneratorResponse:
        """State, speed and version."""
        is_started = self._started.is_set()
        held, counters = self._held.current, self._puller.counters
        response = generator_pb2.GetGeneratorResponse(
            generator_id=self.generator_id,
            state=self._state(),
            engine=self._config.engine.engine,
            engine_version=self._config.engine.version(),
            policy_version=held.policy_version if held is not None else 0,
            weights_digest=held.digest if held is not None else "",
            busy_s=self._busy.busy_s,
            uptime_s=time.monotonic() - self._start_s,
            num_weight_updates=counters.num_updates,
            max_swap_pause_s=counters.max_pause_s,
            num_weights_refused=counters.num_refused,
            max_context_tokens=self._engine.max_model_len if is_started else 0,
            update_mode=MODE_MESSAGES[self.update_mode],
            num_recomputed_tokens=counters.num_recomputed_tokens,
            total_swap_pause_s=counters.total_pause_s,
            total_environment_wait_s=self._rollouts.waits.total_s,
            num_environment_sessions=self._rollouts.waits.num_sessions,
        )
        if (wait := self._puller.relay_wait) is not None:
            response.relay_patience.FromMilliseconds(round(1000 * wait.patience_s))
        if is_started:
            stats = self._engine.stats()
            response.num_running = stats.num_running
            response.num_waiting = stats.num_waiting
            response.kv_cache_usage = stats.kv_cache_usage
            response.num_preemptions = stats.num_preemptions
            response.num_tokens_generated = stats.tokens_generated
            response.num_samples_borne = self._rollouts.num_in_slots + self._rollouts.num_free_slots()
        return response

    async def _give_back(self, *, grace_s: float) -> None:
        self._lease_handler.is_draining = True
        self._rollouts.stop_accepting()
        await self._rollouts.wait_until_empty(timeout_s=grace_s)
        if self._leasing is not None:
            # Leases on their way here arrive and go back with the others, instead of waiting for their expiry.
            await asyncio.sleep(LEASES_ARRIVE_WITHIN_S)
            # Without a lease stream the broker cannot lease the samples to this process again as they come back.
            self._leasing.cancel()
        await self._rollouts.give_back_all(flush_timeout_s=FLUSH_TIMEOUT_S)

    async def _stop_engine(self) -> None:
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(ENGINE_STOP_S):
                await self._engine.stop()
            _log.info("engine stopped", took_s=round(time.monotonic() - started_s, 2))
        except TimeoutError:
            _log.warning("the engine did not stop in time", timeout_s=ENGINE_STOP_S)

    def _owes_tokens(self) -> bool:
        """Whether the engine is to sample, if it has samples."""
        return not self._is_paused and self._held.is_trusted

    def _check_started(self) -> None:
        if not self._started.is_set():
            raise ServiceUnavailableError("the engine is still being built")

    def _notify(self) -> None:
        if self._session is not None:
            self._session.notify()

    def _state(self) -> generator_pb2.GeneratorState.ValueType:
        if self._failure.done():
            return generator_pb2.GENERATOR_STATE_FAILED
        if not self._started.is_set():
            return generator_pb2.GENERATOR_STATE_STARTING
        if self._lease_handler.is_draining:
            is_empty = self._rollouts.is_empty
            return generator_pb2.GENERATOR_STATE_DRAINED if is_empty else generator_pb2.GENERATOR_STATE_DRAINING
        return generator_pb2.GENERATOR_STATE_PAUSED if self._is_paused else generator_pb2.GENERATOR_STATE_SERVING


def _environment_connection(config: GeneratorConfig, judges: Security) -> Connection | None:
    if config.environment is None:
        return None
    return Connection(config.environment.target.removeprefix(THIRD_PARTY), security=judges, service="environment")
